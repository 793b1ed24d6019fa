"""The recording methods of rope, rope_backward and of products with a host number."""

from __future__ import annotations

from typing import Any

from ropegraph.api.cache_ops import cache_ports, written
from ropegraph.api.checks import as_number, is_tensor, refuse_unknown
from ropegraph.api.recording import Recorder, shaped_like
from ropegraph.api.rotary import rotation
from ropegraph.api.tensor import Tensor
from ropegraph.dtypes import DType, as_compute
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Rope, RopeBackward, Rotation, Scale, data_ports


class RopeOps:
    """Part of pygraph: what rotates and what scales."""

    recorder: Recorder

    def rope(
        self,
        input: Any,  # noqa: A002 - FE's name
        freqs: Any = None,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = None,
        name: str = "",
        *,
        rope_offset: int | None = None,
        interleaved: bool = False,
        interleaved_output: bool | None = None,
        attention_factor: float = 1.0,
        inverse: bool = False,
        half_width: bool = False,
        table_layout: str | None = None,
        angle_precision: str = "float32",
        numerics: str = "fp32",
        cos: Any = None,
        sin: Any = None,
        cos_sin: Any = None,
        inv_freq: Any = None,
        position_ids: Any = None,
        start_positions: Any = None,
        cu_seqlens: Any = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        head_groups: int = 0,
        cache: Any = None,
        cache_positions: Any = None,
        **fe_arguments: Any,
    ) -> Tensor:
        """Rotate channel pairs of ``input`` by its positions, then scale every row by output_scale.

        input: [b, h, s, D], fp16, bf16, fp32 or fp64; ragged if it has a ragged_offset, positions
        then restart in each sequence.
        rope_dim: width r of the rotated segment, even; 0 is D.  rope_offset: its first channel,
        D - r if left out (cuDNN's tail; TransformerEngine and Hugging Face use 0).
        interleaved: pairs (2i, 2i+1) instead of (i, i + r/2); interleaved_output: as input.
        attention_factor: multiplies the rotated channels alone.  inverse: rotate by -t.
        head_groups: input is [b, head_groups, h / head_groups, s, D]: heads in two levels.

        Angles, from exactly one source. Row i of a table belongs to position i:
        freqs: [s_max, 1 or b, 1, r] radians, fp32.  cos and sin: tables of that shape, fp32, bf16
        or fp16.  cos_sin: both side by side on the last axis.  inv_freq: [r/2] radians a position.
        half_width: tables have r/2 columns (of each kind).  table_layout: which columns of a
        full-width table hold the angles: "first_half" (cuDNN), "pairs" (t0 t0 t1 t1) or "full" (a
        column per channel).  angle_precision: with inv_freq, "float32" rounds position * inv_freq
        to fp32, "exact" is within 1 ulp of fp32 sine and cosine up to position 2^24.

        Positions, int32 or int64; without any of these row s has position s:
        position_ids: [b or 1, s].  start_positions: [b], the position of row 0, or one for each
        sequence.  cu_seqlens: [n + 1], n sequences packed along s of [1, h, t, D]; positions
        restart in each, and rows of no sequence become 0.  cp_size, cp_rank: this rank holds chunks
        cp_rank and 2 cp_size - 1 - cp_rank of each sequence.

        cache: [b, h, s_max, D], any strides, an input of the graph, and cache_positions [b]: row i
        of batch entry n is written over row cache_positions[n] + i of the cache, in place, and all
        other rows keep their bits. Returns the cache then. No fold changes what is written there,
        and it has no gradient.

        numerics: "fp32"; "nemo" (one fma in fp32 a channel) or "hf" (every product rounded to the
        type of input) with cosines and sines, bit for bit as those libraries.
        Returns [b, h, s, D] in the dtype of input unless set, computed in fp32 (fp64 for fp64
        input), rounded once.
        Raises GraphError if r is odd or wider than D, if a table is too narrow or too short, or if
        two arguments say the same thing; PositionError, at execute on a CPU, for positions outside
        of a table and lengths that do not fit.  Source: arXiv:2104.09864, eq. 34.
        """
        options = dict(locals())
        return self._rotate(Rope, "rope", "input", options)

    def rope_backward(
        self,
        dY: Any,
        freqs: Any = None,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = None,
        name: str = "",
        *,
        rope_offset: int | None = None,
        interleaved: bool = False,
        interleaved_output: bool | None = None,
        attention_factor: float = 1.0,
        inverse: bool = False,
        half_width: bool = False,
        table_layout: str | None = None,
        angle_precision: str = "float32",
        numerics: str = "fp32",
        cos: Any = None,
        sin: Any = None,
        cos_sin: Any = None,
        inv_freq: Any = None,
        position_ids: Any = None,
        start_positions: Any = None,
        cu_seqlens: Any = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        head_groups: int = 0,
        **fe_arguments: Any,
    ) -> Tensor:
        """The exact adjoint of ``rope`` with the same arguments: dX from dY, same shapes."""
        options = dict(locals())
        return self._rotate(RopeBackward, "rope_backward", "dY", options)

    def _rotate(
        self, kind: type[Rope] | type[RopeBackward], word: str, port: str, options: dict[str, Any]
    ) -> Tensor:
        options.pop("self")
        cache, rows = options.pop("cache", None), options.pop("cache_positions", None)
        name = self.recorder.node_name(kind, options.pop("name"))
        where = f"{word} {name!r}"
        data = self.recorder.adopt(options.pop(port), f"{where}: {port}")
        dim = data.get_dim()
        attrs, tensors = rotation(kind, where, dim[-1] if dim else 0, **options)
        ports = self.recorder.adopt_all(tensors, where)
        _, out_port = data_ports(attrs)
        into = cache_ports(self.recorder, where, cache, rows)
        if into:
            _refuse_beside_cache(where, attrs, ports, data)
        made = self.recorder.record(attrs, name, {port: data} | ports | into, (out_port,))
        if into:
            return written(made[out_port], into["cache"])
        return shaped_like(made[out_port], data)

    def scale(
        self,
        input: Any,  # noqa: A002 - FE's name
        scale: float,
        compute_data_type: object = None,
        name: str = "",
        **fe_arguments: Any,
    ) -> Tensor:
        """The input times a host number; a rotation before or after it takes the factor over."""
        name = self.recorder.node_name(Scale, name)
        where = f"scale {name!r}"
        refuse_unknown(where, fe_arguments, {})
        if as_compute(compute_data_type, f"{where}: compute_data_type") is DType.DOUBLE:
            raise GraphError(
                f"{where}: compute_data_type={compute_data_type!r}; a product is computed in fp32, "
                "in fp64 for fp64 input; leave it out"
            )
        factor = as_number(scale, f"{where}: scale")
        data = self.recorder.adopt(input, f"{where}: input")
        made = self.recorder.record(Scale(factor), name, {"input": data}, ("output",))
        return shaped_like(made["output"], data)

    def mul(
        self, a: Any, b: Any, compute_data_type: object = None, name: str = "", **fe_arguments: Any
    ) -> Tensor:
        """a times b, where one of them is a host number."""
        numbers = [x for x in (a, b) if not (isinstance(x, Tensor) or is_tensor(x))]
        if len(numbers) != 1:
            raise GraphError(
                f"mul {name!r}: a={a!r:.40}, b={b!r:.40}; "
                "one must be a tensor and one a host number"
            )
        tensor = b if a is numbers[0] else a
        return self.scale(tensor, numbers[0], compute_data_type, name, **fe_arguments)


def _refuse_beside_cache(
    where: str, attrs: Rotation, ports: dict[str, Tensor], data: Tensor
) -> None:
    """A cache has one sequence a batch entry, all of it, and heads in one level."""
    found = {
        "cu_seqlens": "cu_seqlens" in ports,
        "a ragged input": data.get_ragged_offset() is not None,
        f"cp_size={attrs.cp_size}": attrs.cp_size > 1,
        f"head_groups={attrs.head_groups}": attrs.head_groups > 0,
    }
    if given := [what for what, is_given in found.items() if is_given]:
        raise GraphError(
            f"{where}: cache together with {' and '.join(given)}; write [b, h, s, D] into a cache, "
            "one sequence a batch entry"
        )
