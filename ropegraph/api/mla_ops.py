"""The recording methods of mla_kv_rope and mla_kv_rope_backward."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ropegraph.api.checks import as_choice, as_count, refuse_unknown
from ropegraph.api.recording import Recorder, nested_like
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward

QUANTIZE: tuple[Literal["mxfp8"], ...] = ("mxfp8",)


class Mxfp8(NamedTuple):
    """A tensor quantized twice, [b, h, s, d] in memory of the order s, b, h, d.

    row: E4M3 data [b, h, s, d], whose blocks are 32 channels; row_scale: E8M0, [b, h, s, d/32].
    column: E4M3 data [b, h, s, d], whose blocks are 32 tokens; column_scale: E8M0, [b, h, s/32, d].
    """

    row: Tensor
    row_scale: Tensor
    column: Tensor
    column_scale: Tensor


class MlaOps:
    """Part of pygraph: key and value of multi-latent attention."""

    recorder: Recorder

    def mla_kv_rope(
        self,
        kv: Any,
        k_rope: Any,
        cos: Any,
        sin: Any,
        quantize: str | None = None,
        name: str = "",
        *,
        nope_dim: int | None = None,
        **fe_arguments: Any,
    ) -> list[Any]:
        """Split kv, turn k_rope and append it to the key of every head: returns [key, value].

        kv: [b, h, s, nope + v] of any strides; a head is nope channels of the key, then the value.
        k_rope: [b, 1, s, r], r even.  cos, sin: [s_max, 1, 1, r], both bf16 or both fp32; row t
        belongs to token t, column i to channel nope + i of the key.
        nope_dim: nope; half the width of kv if left out.
        Adjacent pairs (x1, x2) of k_rope are read, halves are written: x1 cos - x2 sin with the
        left half of the tables, x2 cos + x1 sin with the right half. Products with x2 are
        rounded, then comes a fused multiply-add: in bf16 where k_rope and the tables are bf16, else
        in fp32 (fp64) and rounded once to the dtype of kv.
        quantize=None: key is [b, h, s, nope + r] and value [b, h, s, v], in the dtype of kv, fp16,
        bf16, fp32 or fp64, nested in memory as kv is.
        quantize="mxfp8": key and value are Mxfp8, four tensors each. Needs bf16 kv and k_rope, and
        multiples of 32: s, nope + r and v. A scale is amax / 448 rounded up to a power of two; NaN
        does not count for amax and becomes NaN, Inf becomes 448. It has no gradient.
        Raises GraphError naming the argument and what would fit.
        Source: TransformerEngine's fused_mla_kv_rope_mxfp8, byte for byte.
        """
        name = self.recorder.node_name(MlaKvRope, name)
        where = f"mla_kv_rope {name!r}"
        refuse_unknown(where, fe_arguments, {}, known=("nope_dim", "quantize"))
        given = {"kv": kv, "k_rope": k_rope, "cos": cos, "sin": sin}
        ports = self.recorder.adopt_all(given, where)
        width = (ports["kv"].get_dim() or [0])[-1]
        if nope_dim is None and width % 2:
            raise GraphError(
                f"{where}: kv {ports['kv'].get_dim()} has {width} channels, which are not nope and "
                "v in equal parts; give nope_dim="
            )
        attrs = MlaKvRope(
            width // 2 if nope_dim is None else as_count(nope_dim, f"{where}: nope_dim"),
            None if quantize is None else as_choice(quantize, f"{where}: quantize", QUANTIZE),
        )
        if attrs.quantize is None:
            made = self.recorder.record(attrs, name, ports, ("key", "value"))
            return [nested_like(made[port], ports["kv"]) for port in ("key", "value")]
        made = self.recorder.record(attrs, name, ports, MXFP8_PORTS)
        tensors = [_token_major(made[port]) for port in MXFP8_PORTS]
        return [Mxfp8(*tensors[:4]), Mxfp8(*tensors[4:])]

    def mla_kv_rope_backward(
        self,
        dKey: Any,
        dValue: Any,
        cos: Any,
        sin: Any,
        name: str = "",
        *,
        nope_dim: int | None = None,
        v_dim: int | None = None,
        **fe_arguments: Any,
    ) -> list[Tensor]:
        """The adjoint of mla_kv_rope without quantize: returns [dKV, dK_rope].

        dKey: [b, h, s, nope + r].  dValue: [b, h, s, v].  One of them may be None: it counts as 0.
        cos, sin: as in the forward; their width is r.  nope_dim, v_dim: read off dKey and dValue;
        needed for the one that is None.
        dKV: [b, h, s, nope + v], a copy.  dK_rope: [b, 1, s, r]: the rotated channels are added up
        over the heads in fp32 (fp64 for fp64), turned back there and rounded once at the end.
        Raises GraphError naming the argument and what would fit.
        """
        name = self.recorder.node_name(MlaKvRopeBackward, name)
        where = f"mla_kv_rope_backward {name!r}"
        refuse_unknown(where, fe_arguments, {}, known=("nope_dim", "v_dim"))
        grads = {"dKey": dKey, "dValue": dValue}
        given = {p: t for p, t in grads.items() if t is not None} | {"cos": cos, "sin": sin}
        ports = self.recorder.adopt_all(given, where)
        dims = {p: t.get_dim() or [0] for p, t in ports.items()}
        nope, v = (
            None if n is None else as_count(n, f"{where}: {argument}")
            for argument, n in (("nope_dim", nope_dim), ("v_dim", v_dim))
        )
        if nope is None and "dKey" in dims:
            nope = max(dims["dKey"][-1] - dims["cos"][-1], 0)
        if v is None and "dValue" in dims:
            v = dims["dValue"][-1]
        if nope is None or v is None:
            missing, port = ("nope_dim", "dKey") if nope is None else ("v_dim", "dValue")
            raise GraphError(f"{where}: {port} is None, so its width is not known; give {missing}=")
        attrs = MlaKvRopeBackward(nope, v)
        made = self.recorder.record(attrs, name, ports, ("dKV", "dK_rope"))
        first = next(iter(ports.values()))
        return [nested_like(tensor, first) for tensor in made.values()]


def _token_major(tensor: Tensor) -> Tensor:
    """Packed strides of memory in the order s, b, h, d, as TransformerEngine's quantizer has it."""
    b, h, _, d = tensor.get_dim()
    return tensor.set_stride((h * d, d, b * h * d, 1))
