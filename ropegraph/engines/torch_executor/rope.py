"""rope, rope_backward and the gradient of the angles, in torch.

Every rotation here is o1 = x1 cos1 - x2 sin1, o2 = x2 cos2 + x1 sin2 on views of the data. The
adjoint has the same form with (sin1, sin2) = (-sin2, -sin1), the inverse with both negated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.angles import Tables, columns, compute_dtype, cos_sin, scaled
from ropegraph.engines.torch_executor.sequences import lengths_of, read_starts, views
from ropegraph.ir.ops import Rope, RopeBackward, RopeFreqsGrad, RopePair, Rotation
from ropegraph.lowering.engine import Executable, Step

# The [h, n, d] views of one ragged tensor that are read, with those that are written.
Sequences = list[tuple[Tensor, Tensor]]


def split_pairs(x: Tensor, attrs: Rotation, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second channel of every pair in the rotated segment."""
    begin, r = attrs.rope_offset, attrs.rope_dim
    if interleaved:
        return x[..., begin : begin + r : 2], x[..., begin + 1 : begin + r : 2]
    middle = begin + r // 2
    return x[..., begin:middle], x[..., middle : begin + r]


class Rotator:
    """Applies one rotation, or its adjoint, to dense [b, h, s, d] or [h, s, d] tensors."""

    def __init__(self, attrs: Rope | RopeBackward) -> None:
        self.attrs = attrs
        self.adjoint = isinstance(attrs, RopeBackward)
        self.reads, self.writes = attrs.interleaved, attrs.interleaved_output
        if self.adjoint:
            self.reads, self.writes = self.writes, self.reads
        self.factor = attrs.output_scale * attrs.attention_factor

    def __call__(self, x: Tensor, out: Tensor, tables: Tables) -> None:
        """Write the rotated x to ``out``; ``tables`` are unscaled and as long as x."""
        attrs = self.attrs
        if x.data_ptr() == out.data_ptr():
            x = x.clone()  # in place: every product reads what the first one would overwrite
        x1, x2 = split_pairs(x, attrs, self.reads)
        out1, out2 = split_pairs(out, attrs, self.writes)
        cos1, sin1, cos2, sin2 = scaled(tables, self.factor)
        if self.adjoint:
            sin1, sin2 = sin2, sin1
        sign = -1.0 if self.adjoint == attrs.inverse else 1.0
        _rotate(x1, x2, cos1, sin1, sign, out1)
        _rotate(x2, x1, cos2, sin2, -sign, out2)
        end = attrs.rope_offset + attrs.rope_dim
        for part in (slice(0, attrs.rope_offset), slice(end, x.shape[-1])):
            if part.start < part.stop:
                _pass(x[..., part], out[..., part], attrs.output_scale, cos1.dtype)


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


class RopeStep:
    """One rotation of the graph, dense or ragged.  part: "0" or "1" inside a pair."""

    def __init__(self, step: Step, attrs: Rope | RopeBackward, part: str = "") -> None:
        ports = ("dY", "dX") if isinstance(attrs, RopeBackward) else ("input", "output")
        source, target = (port + part for port in ports)
        self.attrs, self.rotate = attrs, Rotator(attrs)
        self.x, self.out, self.freqs = map(step.slot, (source, target, "freqs" + part))
        self.x_value, self.out_value = step.value(source), step.value(target)
        self.rows = self.x_value.dim[2]
        ragged = self.x_value.ragged_offset
        self.offsets = -1 if ragged is None else step.slots[ragged]

    def tables(self, env: Sequence[Tensor], rows: int) -> Tables:
        """The unscaled tables for positions 0 to rows - 1."""
        return cos_sin(self.attrs, env[self.freqs], rows, compute_dtype(self.attrs, env[self.x]))

    def sequences(self, env: Sequence[Tensor]) -> Sequences | None:
        """What is read and written for each sequence of a ragged tensor; None for a dense one.

        Raises PositionError for offsets outside of a buffer; nothing is written yet.
        """
        if self.offsets < 0:
            return None
        starts = read_starts(env[self.offsets], self.x_value)
        lengths = lengths_of(starts, self.x_value)
        sources = views(env[self.x], self.x_value, starts, lengths)
        targets = views(env[self.out], self.out_value, starts, lengths)
        return list(zip(sources, targets, strict=True))

    def run(self, env: Sequence[Tensor], tables: Tables, sequences: Sequences | None) -> None:
        """Rotate with tables that have exactly ``rows`` rows.

        Positions restart in each sequence; memory outside every sequence becomes zero.
        """
        if sequences is None:
            self.rotate(env[self.x], env[self.out], tables)
            return
        env[self.out].zero_()
        for i, (source, target) in enumerate(sequences):
            row = min(i, tables[0].shape[0] - 1)
            own = tuple(t[row, :, : source.shape[1]] for t in tables)
            self.rotate(source, target, own)  # pyright: ignore[reportArgumentType]

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        self.run(env, self.tables(env, self.rows), self.sequences(env))


class RopePairStep:
    """Two rotations; the cosines and sines are made once where both read the same table."""

    def __init__(self, step: Step, pair: RopePair) -> None:
        self.first, self.second = (RopeStep(step, p, str(i)) for i, p in enumerate(pair.parts))
        same = self.first.freqs == self.second.freqs and self.first.rows == self.second.rows
        self.shared = same and self.first.x_value.dtype is self.second.x_value.dtype

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        first, second = self.first.sequences(env), self.second.sequences(env)
        tables = self.first.tables(env, self.first.rows)
        self.first.run(env, tables, first)
        if not self.shared:
            tables = self.second.tables(env, self.second.rows)
        self.second.run(env, tables, second)


class FreqsGradStep:
    """dfreqs: each angle's gradient, summed over heads, and over the batch if the table is shared.

    d o1 / d t1 = -(x1 sin1 + x2 cos1), d o2 / d t2 = x1 cos2 - x2 sin2, times the scales.
    """

    def __init__(self, step: Step, attrs: RopeFreqsGrad) -> None:
        self.attrs = attrs
        self.x, self.dy, self.freqs, self.out = map(step.slot, ("input", "dY", "freqs", "dfreqs"))
        factor = attrs.output_scale * attrs.attention_factor
        self.factor = -factor if attrs.inverse else factor

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        attrs, out = self.attrs, env[self.out]
        x, dy = env[self.x], env[self.dy]
        dtype = compute_dtype(attrs, x)
        cos1, sin1, cos2, sin2 = cos_sin(attrs, env[self.freqs], x.shape[2], dtype)
        if attrs.inverse:
            sin1, sin2 = -sin1, -sin2
        x1, x2 = (t.to(dtype) for t in split_pairs(x, attrs, attrs.interleaved))
        dy1, dy2 = (t.to(dtype) for t in split_pairs(dy, attrs, attrs.interleaved_output))
        grad1 = -dy1 * (x1 * sin1 + x2 * cos1)
        grad2 = dy2 * (x1 * cos2 - x2 * sin2)
        out.zero_()
        first, second = columns(attrs, out[: x.shape[2]].permute(1, 2, 0, 3))
        for grad, target in ((grad1, first), (grad2, second)):
            total = grad.sum(1, keepdim=True)
            if target.shape[0] == 1:
                total = total.sum(0, keepdim=True)
            target.add_(total, alpha=self.factor)


def compile_rope(step: Step) -> Executable:
    """The executable of a Rope, RopeBackward, RopePair or RopeFreqsGrad step."""
    match step.node.attrs:
        case RopePair() as pair:
            return RopePairStep(step, pair)
        case RopeFreqsGrad() as attrs:
            return FreqsGradStep(step, attrs)
        case Rope() | RopeBackward() as attrs:
            return RopeStep(step, attrs)
        case other:
            raise TypeError(f"{other} is no rotation")
