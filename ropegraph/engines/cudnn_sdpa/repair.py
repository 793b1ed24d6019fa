"""What is put right around cuDNN's kernels, on the same stream, before they run.

Rows of no sequence: the kernels leave O and the gradients of such rows as they are, and of
sequences with nothing to attend to as well; they are to be zero (Stats -inf), so they are filled.
Lengths: one beyond its tensor would be read past the end, so cuDNN is given them cut to fit.
Stats of -inf: a row that a bias of -inf hides whole has logits of -inf, and exp(-inf - -inf) is
NaN. With +inf in its place it is 0, the right weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch

from ropegraph.dtypes import torch_dtype
from ropegraph.engines.cudnn_sdpa.operands import Operand
from ropegraph.engines.cudnn_sdpa.places import Places
from ropegraph.engines.cudnn_sdpa.recipe import Recipe


@dataclass(frozen=True)
class Copy:
    """An input at slot -> bytes [start, start + size) of the workspace, mended; one launch.

    most: the longest that a length may be; None for Stats, whose -inf becomes +inf.
    """

    slot: int
    start: int
    size: int
    operand: Operand
    most: int | None

    def room(self, scratch: torch.Tensor) -> torch.Tensor:
        """Where the copy lies."""
        dtype = torch_dtype(self.operand.dtype)
        flat = scratch[self.start : self.start + self.size].view(dtype)
        return flat.as_strided(self.operand.dim, self.operand.stride)

    def __call__(self, env: Sequence[Any], room: torch.Tensor) -> None:
        if self.most is None:
            torch.nan_to_num(env[self.slot], nan=nan, posinf=inf, neginf=inf, out=room)
        else:
            torch.clamp(env[self.slot], min=0, max=self.most, out=room)


@dataclass(frozen=True)
class Repair:
    """fills: (slot, value) of the outputs to fill."""

    fills: tuple[tuple[int, float], ...]
    copies: tuple[Copy, ...]

    def rooms(self, scratch: torch.Tensor) -> list[torch.Tensor]:
        """Where the copies lie in a workspace: found once for each, as it costs host time."""
        return [copy.room(scratch) for copy in self.copies]

    def __call__(self, env: Sequence[Any], rooms: Sequence[torch.Tensor]) -> None:
        for slot, value in self.fills:
            env[slot].fill_(value)
        for copy, room in zip(self.copies, rooms, strict=True):
            copy(env, room)


def repair_of(recipe: Recipe, places: Places) -> Repair | None:
    """None where there is nothing to do, which is the common case."""
    fills = tuple(
        (slot, -inf if operand.port == "Stats" else 0.0)
        for _, operand, slot in recipe
        if recipe.padding and operand.is_output and operand.ragged and slot >= 0
    )
    most: dict[str, int] = dict(zip(("seq_len_q", "seq_len_kv"), recipe.most_rows, strict=True))
    copies = tuple(
        Copy(
            slot,
            places.copies[operand.port],
            recipe.copied_bytes(operand),
            operand,
            most.get(operand.port),
        )
        for _, operand, slot in recipe
        if operand.port in places.copies
    )
    return Repair(fills, copies) if fills or copies else None
