"""The steps of rope and rope_backward in torch: dense or ragged data, one launch's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.angles import Tables, compute_dtype, cos_sin
from ropegraph.engines.torch_executor.cache import CachePlace, CacheRows, CacheWriteStep
from ropegraph.engines.torch_executor.freqs_grad import FreqsGradStep
from ropegraph.engines.torch_executor.positions import Positions, Rows
from ropegraph.engines.torch_executor.rotator import Rotator
from ropegraph.engines.torch_executor.sequences import lengths_of, read_starts, views
from ropegraph.ir.graph import singles
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    CacheWrite,
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    RopePair,
    data_ports,
)
from ropegraph.lowering.engine import Executable, Step

# The [h, n, d] views of one ragged tensor that are read, with those that are written.
Sequences = list[tuple[Tensor, Tensor]]


class Place(NamedTuple):
    """Where one execution reads and writes: the sequences of ragged data, the rows' positions.

    cache: the rows that are written, where that is a cache.
    """

    sequences: Sequences | None
    rows: Rows | None
    cache: CacheRows | None = None


class RopeStep:
    """One rotation of the graph, dense or ragged."""

    def __init__(self, step: Step, attrs: Rope | RopeBackward) -> None:
        source, target = data_ports(attrs)
        self.attrs, self.rotate = attrs, Rotator(attrs)
        self.x, self.out = step.slot(source), step.slot(target)
        self.sources = [step.slot(port) for port in ANGLE_PORTS[attrs.angles]]
        self.x_value, self.out_value = step.value(source), step.value(target)
        self.count, self.positions = self.x_value.dim[-2], Positions(step)
        ragged = self.x_value.ragged_offset
        self.offsets = -1 if ragged is None else step.slots[ragged]
        self.cache = CachePlace(step) if step.has("cache") else None
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
            cache = None if self.cache is None else self.cache.rows(env)
            return Place(None, self.positions(env), cache)
        starts = read_starts(env[self.offsets], self.x_value)
        lengths = lengths_of(starts, self.x_value)
        sources = views(env[self.x], self.x_value, starts, lengths)
        targets = views(env[self.out], self.out_value, starts, lengths)
        return Place(list(zip(sources, targets, strict=True)), self.positions(env, lengths))

    def run(self, env: Sequence[Tensor], tables: Tables, place: Place) -> None:
        """Rotate with tables that have exactly ``count`` rows.

        What belongs to no sequence becomes zero.
        """
        x, out, (sequences, rows, cache) = env[self.x], env[self.out], place
        if sequences is None:
            x, out = self._alike(x, out)
        self._rows = rows
        if self.cache is not None and cache is not None:
            turned = torch.empty_like(x, dtype=out.dtype)
            self.rotate(x, turned, tables)
            if rows is not None:
                _mark(turned, rows)
            self.cache.write(env, cache, turned)
            return
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
        found = () if self._rows is None else self._rows.faults()
        return found if self.cache is None else found + self.cache.faults()


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
    """Two or three parts; cosines and sines are made once where one after the other needs them."""

    def __init__(self, step: Step, pair: RopePair) -> None:
        self.parts = [
            CacheWriteStep(replace(step, node=node))
            if isinstance(attrs, CacheWrite)
            else RopeStep(replace(step, node=node), attrs)
            for node, attrs in zip(singles(step.node), pair.parts, strict=True)
        ]

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        placed = [(part, part.place(env)) for part in self.parts]
        tables, key = None, None
        for part, place in placed:
            if isinstance(part, CacheWriteStep):
                part.run(env, cast(CacheRows, place))
                continue
            place = cast(Place, place)
            if tables is None or part.key != key:
                tables, key = part.tables(env, place.rows), part.key
            part.run(env, tables, place)

    def faults(self) -> tuple[str, ...]:
        """What the last run noticed in any part."""
        return tuple(dict.fromkeys(text for part in self.parts for text in part.faults()))


def compile_rope(step: Step) -> Executable:
    """The executable of a Rope, RopeBackward, RopePair, RopeFreqsGrad or CacheWrite step."""
    match step.node.attrs:
        case CacheWrite():
            return CacheWriteStep(step)
        case RopePair() as pair:
            return RopePairStep(step, pair)
        case RopeFreqsGrad() as attrs:
            return FreqsGradStep(step, attrs)
        case Rope() | RopeBackward() as attrs:
            return RopeStep(step, attrs)
        case other:
            raise TypeError(f"{other} is no rotation")
