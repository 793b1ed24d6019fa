"""rope and rope_backward in torch.

Every rotation here is o1 = x1 cos1 - x2 sin1, o2 = x2 cos2 + x1 sin2 on views of the data. The
adjoint has the same form with (sin1, sin2) = (-sin2, -sin1), the inverse with both negated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.angles import Tables, compute_dtype, cos_sin, scaled
from ropegraph.engines.torch_executor.freqs_grad import FreqsGradStep
from ropegraph.engines.torch_executor.pairs import split_pairs
from ropegraph.engines.torch_executor.positions import Positions, Rows
from ropegraph.engines.torch_executor.rounding import hugging_face, nemo
from ropegraph.engines.torch_executor.sequences import lengths_of, read_starts, views
from ropegraph.ir.graph import singles
from ropegraph.ir.ops import ANGLE_PORTS, Rope, RopeBackward, RopeFreqsGrad, RopePair
from ropegraph.lowering.engine import Executable, Step

# The [h, n, d] views of one ragged tensor that are read, with those that are written.
Sequences = list[tuple[Tensor, Tensor]]
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


class Place(NamedTuple):
    """Where one execution reads and writes: the sequences of ragged data, the rows' positions."""

    sequences: Sequences | None
    rows: Rows | None


class RopeStep:
    """One rotation of the graph, dense or ragged."""

    def __init__(self, step: Step, attrs: Rope | RopeBackward) -> None:
        source, target = ("dY", "dX") if isinstance(attrs, RopeBackward) else ("input", "output")
        self.attrs, self.rotate = attrs, Rotator(attrs)
        self.x, self.out = step.slot(source), step.slot(target)
        self.sources = [step.slot(port) for port in ANGLE_PORTS[attrs.angles]]
        self.x_value, self.out_value = step.value(source), step.value(target)
        self.count, self.positions = self.x_value.dim[-2], Positions(step)
        ragged = self.x_value.ragged_offset
        self.offsets = -1 if ragged is None else step.slots[ragged]
        self._rows: Rows | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two rotations alike that make the same tables."""
        return (*self.sources, *self.positions.key, self.x_value.dtype)

    def tables(self, env: Sequence[Tensor], rows: Rows | None) -> Tables:
        """The unscaled tables, a row for each row of the data."""
        sources = [env[slot] for slot in self.sources]
        dtype = compute_dtype(self.attrs, env[self.x])
        return cos_sin(self.attrs, sources, rows, self.count, dtype)

    def place(self, env: Sequence[Tensor]) -> Place:
        """What is read and written, and where.  Raises PositionError; nothing is written yet."""
        if self.offsets < 0:
            return Place(None, self.positions(env))
        starts = read_starts(env[self.offsets], self.x_value)
        lengths = lengths_of(starts, self.x_value)
        sources = views(env[self.x], self.x_value, starts, lengths)
        targets = views(env[self.out], self.out_value, starts, lengths)
        return Place(list(zip(sources, targets, strict=True)), self.positions(env, lengths))

    def run(self, env: Sequence[Tensor], tables: Tables, place: Place) -> None:
        """Rotate with tables that have exactly ``count`` rows.

        What belongs to no sequence becomes zero.
        """
        (x, out), (sequences, rows) = self._alike(env[self.x], env[self.out]), place
        self._rows = rows
        if sequences is None:
            self.rotate(x, out, _between(tables) if x.dim() == 5 else tables)
            if rows is not None:
                _mark(out, rows)
            return
        out.zero_()
        for i, (source, target) in enumerate(sequences):
            n = source.shape[1]
            row = min(i, tables[0].shape[0] - 1)
            own = tuple(t[row, :, :n] for t in tables)
            self.rotate(source, target, own)  # pyright: ignore[reportArgumentType]
            if rows is not None and rows.bad is not None:
                target.masked_fill_(rows.bad[i, :n, None], torch.nan)

    def _alike(self, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Both with heads in two levels, if one of them has."""
        if x.dim() == out.dim():
            return x, out
        if x.dim() == 5:
            return x, out.view(*x.shape[:3], *out.shape[2:])
        return x.view(*out.shape[:3], *x.shape[2:]), out

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        place = self.place(env)
        self.run(env, self.tables(env, place.rows), place)

    def faults(self) -> tuple[str, ...]:
        """What the last run noticed of positions; waits for the device."""
        return () if self._rows is None else self._rows.faults()


def _between(tables: Tables) -> Tables:
    """The tables for data with heads in two levels; shared tensors stay shared."""
    cos1, sin1, cos2, sin2 = tables
    one = cos1.unsqueeze(1), sin1.unsqueeze(1)
    return (*one, *one) if cos2 is cos1 else (*one, cos2.unsqueeze(1), sin2.unsqueeze(1))


def _mark(out: Tensor, rows: Rows) -> None:
    """Zero for rows of no sequence, NaN for those at a wrong position."""
    for mask, fill in ((rows.dead, 0.0), (rows.bad, torch.nan)):
        if mask is not None:
            heads = (1,) * (out.dim() - 3)
            out.masked_fill_(mask.reshape(mask.shape[0], *heads, mask.shape[1], 1), fill)


class RopePairStep:
    """Two rotations; the cosines and sines are made once where both make the same ones."""

    def __init__(self, step: Step, pair: RopePair) -> None:
        parts = [replace(step, node=node) for node in singles(step.node)]
        self.first, self.second = map(RopeStep, parts, pair.parts)
        self.shared = self.first.key == self.second.key

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        first, second = self.first.place(env), self.second.place(env)
        tables = self.first.tables(env, first.rows)
        self.first.run(env, tables, first)
        if not self.shared:
            tables = self.second.tables(env, second.rows)
        self.second.run(env, tables, second)

    def faults(self) -> tuple[str, ...]:
        """What the last run noticed in either part."""
        return tuple(dict.fromkeys(self.first.faults() + self.second.faults()))


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
