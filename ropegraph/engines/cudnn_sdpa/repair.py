"""What is put right around cuDNN's kernels, on the same stream, before they run.

Rows of no sequence: the kernels leave O and the gradients of such rows as they are, and of
sequences with nothing to attend to as well; they are to be zero (Stats -inf), so they are filled.
Stats of -inf: a row that a bias of -inf hides whole has logits of -inf, and exp(-inf - -inf) is
NaN. With +inf in its place it is 0, the right weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch

from ropegraph.engines.cudnn_sdpa.operands import Operand
from ropegraph.engines.cudnn_sdpa.places import Places
from ropegraph.engines.cudnn_sdpa.recipe import Recipe


@dataclass(frozen=True)
class StatsCopy:
    """Stats at slot -> workspace, with +inf for -inf; one launch."""

    slot: int
    start: int
    operand: Operand
    size: int

    def __call__(self, env: Sequence[Any], scratch: torch.Tensor) -> None:
        room = scratch[self.start : self.start + self.size].view(torch.float32)
        copy = room.as_strided(self.operand.dim, self.operand.stride)
        torch.nan_to_num(env[self.slot], nan=nan, posinf=inf, neginf=inf, out=copy)


@dataclass(frozen=True)
class Repair:
    """fills: (slot, value) of the outputs to fill."""

    fills: tuple[tuple[int, float], ...]
    stats: StatsCopy | None

    def __call__(self, env: Sequence[Any], scratch: torch.Tensor) -> None:
        for slot, value in self.fills:
            env[slot].fill_(value)
        if self.stats is not None:
            self.stats(env, scratch)


def repair_of(recipe: Recipe, places: Places) -> Repair | None:
    """None where there is nothing to do, which is the common case."""
    fills = tuple(
        (slot, -inf if operand.port == "Stats" else 0.0)
        for _, operand, slot in recipe
        if recipe.padding and operand.is_output and operand.ragged and slot >= 0
    )
    stats: StatsCopy | None = None
    if places.stats_start is not None:
        operand, slot = next((o, s) for _, o, s in recipe if o.port == "stats")
        stats = StatsCopy(slot, places.stats_start, operand, recipe.stats_bytes)
    return Repair(fills, stats) if fills or stats is not None else None
