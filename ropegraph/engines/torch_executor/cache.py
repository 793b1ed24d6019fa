"""Rows into a KV cache, in torch.

On a CPU wrong positions raise before anything is written. Elsewhere that would wait for the device:
the rows of such a batch entry are then written with what they hold already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ropegraph.errors import PositionError
from ropegraph.ir.ops import op_name
from ropegraph.lowering.engine import Step


class CacheRows(NamedTuple):
    """Which rows of a cache are written, [b, s].  bad: [b, 1], elsewhere than on a CPU."""

    nth: Tensor
    bad: Tensor | None = None


class CachePlace:
    """Finds and writes the rows of one step."""

    def __init__(self, step: Step) -> None:
        self.where = f"{op_name(step.node.attrs)} {step.name!r}"
        self.positions, self.out = step.slot("cache_positions"), step.slot("output")
        self.cache = step.value("cache")
        self.count = step.value("input").dim[2]
        self._bad: Tensor | None = None

    def rows(self, env: Sequence[Tensor]) -> CacheRows:
        """Raises PositionError on a CPU if a row lies outside of the cache."""
        first = env[self.positions].to(torch.int64)[:, None]
        most = self.cache.dim[2] - self.count
        bad = (first < 0) | (first > most)
        row = torch.arange(self.count, device=first.device)
        if not first.is_cpu:
            return CacheRows(first.masked_fill(bad, 0) + row, bad)
        if bool(bad.any()):
            entry = int(bad.nonzero()[0, 0])
            raise PositionError(
                f"{self.where}: cache_positions of batch entry {entry} is {int(first[entry])}, but "
                f"the cache {self.cache.name!r} has {self.cache.dim[2]} rows for {self.count} "
                f"more; use 0 to {most}"
            )
        return CacheRows(first + row)

    def write(self, env: Sequence[Tensor], rows: CacheRows, x: Tensor) -> None:
        """Write x [b, h, s, d]; it is rounded to the type of the cache."""
        cache, self._bad = env[self.out], rows.bad
        entry = torch.arange(x.shape[0], device=x.device)[:, None]
        x = x.transpose(1, 2).to(cache.dtype)
        if rows.bad is not None:
            x = torch.where(rows.bad[:, :, None, None], cache[entry, :, rows.nth], x)
        cache[entry, :, rows.nth] = x

    def faults(self) -> tuple[str, ...]:
        """What the last write noticed; waits for the device."""
        if self._bad is None or not bool(self._bad.any()):
            return ()
        return ("cache_positions outside of the cache; their rows were not written",)


class CacheWriteStep:
    """Rows of the input, bit for bit.  Of three parts in a launch it is one that turns nothing."""

    def __init__(self, step: Step) -> None:
        self.x, self.cache = step.slot("input"), CachePlace(step)
        self.faults = self.cache.faults

    def place(self, env: Sequence[Tensor]) -> CacheRows:
        """Where it writes.  Raises PositionError; nothing is written yet."""
        return self.cache.rows(env)

    def run(self, env: Sequence[Tensor], place: CacheRows) -> None:
        self.cache.write(env, place, env[self.x])

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        self.run(env, self.place(env))
