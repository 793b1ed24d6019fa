"""The recording methods of rmsnorm and rmsnorm_backward."""

from __future__ import annotations

from typing import Any

from ropegraph.api.checks import as_flag, as_number, refuse_unknown
from ropegraph.api.enums import norm_forward_phase as phases
from ropegraph.api.recording import Recorder, nested_like, shaped_like
from ropegraph.api.tensor import Tensor
from ropegraph.dtypes import as_compute
from ropegraph.errors import GraphError
from ropegraph.ir.ops import RmsNorm, RmsNormBackward


class NormOps:
    """Part of pygraph: the norm of Q and K."""

    recorder: Recorder

    def rmsnorm(
        self,
        norm_forward_phase: Any,
        input: Any,  # noqa: A002 - FE's name
        scale: Any,
        bias: Any = None,
        epsilon: float = 1e-6,
        compute_data_type: object = None,
        name: str = "",
        *,
        zero_centered: bool = False,
        **fe_arguments: Any,
    ) -> list[Tensor | None]:
        """Divide each row by its root mean square and multiply by a weight: [Y, inv_variance].

        Y = x * inv_variance * w with inv_variance = 1 / sqrt(mean(x^2) + epsilon), in fp32 (fp64
        for fp64) and rounded once. No square overflows: rows are scaled by a power of two first
        where theirs would.
        norm_forward_phase: TRAINING; with INFERENCE there is no inv_variance and no gradient.
        input: [b, h, s, d], any strides.  scale: w, fp32 or the dtype of input: [1, 1, 1, d] to
        normalise each head by itself (Qwen3), [1, h, 1, d] for all heads of a token together
        (OLMo2).  zero_centered: w is 1 + scale (Gemma).  bias: must be None.  epsilon: a host
        number, 0 or more.
        Y: [b, h, s, d] in the dtype of input unless set.  inv_variance: [b, h, s, 1], [b, 1, s, 1]
        over all heads; fp32 (fp64), computed only if it is used. Unless set, both are packed and
        nested in memory as input is, so that heads side by side have their numbers side by side.
        One launch with the rope before or after it, and for Q and K together.
        Raises GraphError naming the argument and what would fit.  Source: arXiv:1910.07467.
        """
        name = self.recorder.node_name(RmsNorm, name)
        where = f"rmsnorm {name!r}"
        refuse_unknown(where, fe_arguments, {}, known=("bias", "epsilon", "zero_centered"))
        if bias is not None:
            raise GraphError(f"{where}: bias={bias!r:.60} is not supported; leave it out, or None")
        attrs = RmsNorm(
            zero_centered=as_flag(zero_centered, f"{where}: zero_centered"),
            compute=as_compute(compute_data_type, f"{where}: compute_data_type"),
            epsilon=as_number(epsilon, f"{where}: epsilon"),
        )
        if attrs.epsilon < 0:
            raise GraphError(f"{where}: epsilon={attrs.epsilon:g} is negative; use 0 or more")
        is_training = _phase(norm_forward_phase, where) is not phases.INFERENCE
        ports = self.recorder.adopt_all({"input": input, "scale": scale}, where)
        outputs = ("Y", "inv_variance") if is_training else ("Y",)
        made = self.recorder.record(attrs, name, ports, outputs)
        x = ports["input"]
        inverse = nested_like(made["inv_variance"], x) if is_training else None
        return [shaped_like(made["Y"], x), inverse]

    def rmsnorm_backward(
        self,
        grad: Any,
        input: Any,  # noqa: A002 - FE's name
        scale: Any,
        inv_variance: Any,
        has_dbias: bool = False,
        compute_data_type: object = None,
        name: str = "",
        *,
        zero_centered: bool = False,
        **fe_arguments: Any,
    ) -> list[Tensor | None]:
        """The gradients of ``rmsnorm``: [DX, Dscale, None].

        grad: that of Y.  input, scale, zero_centered: as in the forward.  inv_variance: what the
        forward wrote.  has_dbias: must be False.
        DX: as input.  Dscale: as scale, added up over tokens (and over heads, where they share the
        weight) in fp32 (fp64) and rounded once; two runs give the same bits.
        A row that nothing comes back for (grad is 0 all over it) gets nothing and adds nothing,
        whatever input and inv_variance hold there: padding may be NaN.
        Raises GraphError naming the argument and what would fit.
        """
        name = self.recorder.node_name(RmsNormBackward, name)
        where = f"rmsnorm_backward {name!r}"
        refuse_unknown(where, fe_arguments, {}, known=("has_dbias", "zero_centered"))
        if as_flag(has_dbias, f"{where}: has_dbias"):
            raise GraphError(f"{where}: has_dbias=True, but rmsnorm has no bias here; use False")
        attrs = RmsNormBackward(
            zero_centered=as_flag(zero_centered, f"{where}: zero_centered"),
            compute=as_compute(compute_data_type, f"{where}: compute_data_type"),
        )
        given = {"grad": grad, "input": input, "scale": scale, "inv_variance": inv_variance}
        ports = self.recorder.adopt_all(given, where)
        made = self.recorder.record(attrs, name, ports, ("DX", "Dscale"))
        return [shaped_like(made["DX"], ports["input"]), made["Dscale"], None]


def _phase(given: object, where: str) -> phases:
    """FE's enumeration too: it goes by the name."""
    name = getattr(given, "name", None)
    found = getattr(phases, name, None) if isinstance(name, str) else None
    if not isinstance(found, phases):
        raise GraphError(
            f"{where}: norm_forward_phase={given!r:.60}; use norm_forward_phase.TRAINING or "
            "INFERENCE"
        )
    return found
