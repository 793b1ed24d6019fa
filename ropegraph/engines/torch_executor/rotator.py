"""One rotation of dense tensors in torch.

Every rotation here is o1 = x1 cos1 - x2 sin1, o2 = x2 cos2 + x1 sin2 on views of the data. The
adjoint has the same form with (sin1, sin2) = (-sin2, -sin1), the inverse with both negated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.angles import Tables, scaled
from ropegraph.engines.torch_executor.pairs import split_pairs
from ropegraph.engines.torch_executor.rounding import hugging_face, nemo
from ropegraph.ir.ops import Rope, RopeBackward

Pair = tuple[Tensor, Tensor]  # the first and the second channels of all pairs


class Rotator:
    """Applies one rotation, or its adjoint, to dense [b, h, s, d] or [h, s, d] tensors."""

    def __init__(self, attrs: Rope | RopeBackward) -> None:
        self.attrs = attrs
        self.adjoint = isinstance(attrs, RopeBackward)
        self.reads, self.writes = attrs.interleaved, attrs.interleaved_output
        if self.adjoint:
            self.reads, self.writes = self.writes, self.reads
        self.factor = attrs.output_scale * attrs.attention_factor
        self.negated = self.adjoint != attrs.inverse  # rotates by -t

    def __call__(self, x: Tensor, out: Tensor, tables: Tables) -> None:
        """Write the rotated x to ``out``; ``tables`` are unscaled and as long as x."""
        attrs = self.attrs
        if x.data_ptr() == out.data_ptr():
            x = x.clone()  # in place: every product reads what the first one would overwrite
        x1, x2 = split_pairs(x, attrs, self.reads)
        out1, out2 = split_pairs(out, attrs, self.writes)
        if attrs.numerics == "fp32":
            self._turn((x1, x2), (out1, out2), scaled(tables, self.factor))
        else:
            self._turn_exactly((x1, x2), (out1, out2), tables)
        end = attrs.rope_offset + attrs.rope_dim
        for part in (slice(0, attrs.rope_offset), slice(end, x.shape[-1])):
            if part.start < part.stop:
                _pass(x[..., part], out[..., part], attrs.output_scale, tables[0].dtype)

    def _turn(self, x: Pair, out: Pair, tables: Tables) -> None:
        cos1, sin1, cos2, sin2 = tables
        if self.adjoint:
            sin1, sin2 = sin2, sin1
        sign = 1.0 if self.negated else -1.0
        _rotate(x[0], x[1], cos1, sin1, sign, out[0])
        _rotate(x[1], x[0], cos2, sin2, -sign, out[1])

    def _turn_exactly(self, x: Pair, out: Pair, tables: Tables) -> None:
        """With the roundings of attrs.numerics; x and out do not overlap."""
        cos1, sin1, cos2, sin2 = tables
        if self.adjoint:
            sin1, sin2 = sin2, sin1
        if self.negated:
            sin1, sin2 = -sin1, -sin2
        tables = cos1, sin1, cos2, sin2
        if self.attrs.numerics == "nemo":
            results = nemo(*x, tables)
        else:
            results = hugging_face(*x, tables, self.attrs.attention_factor)
        for target, result in zip(out, results, strict=True):
            target.copy_(result)


def _rotate(x: Tensor, other: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor) -> None:
    """out = x cos + sign * other sin, rounded once to the dtype of ``out``."""
    if x.dtype == out.dtype == cos.dtype:
        torch.mul(x, cos, out=out)
        out.addcmul_(other, sin, value=sign)
    else:
        product = other.to(cos.dtype) * sin
        out.copy_(torch.add(x.to(cos.dtype) * cos, product, alpha=sign))


def _pass(x: Tensor, out: Tensor, output_scale: float, dtype: torch.dtype) -> None:
    """Channels outside the rotation: a bitwise copy, or one product with output_scale."""
    if output_scale == 1.0:
        out.copy_(x)
    elif x.dtype == out.dtype == dtype:
        torch.mul(x, output_scale, out=out)
    else:
        out.copy_(x.to(dtype) * output_scale)
