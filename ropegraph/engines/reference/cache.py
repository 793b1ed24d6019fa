"""Rows into a KV cache, one batch entry after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropegraph.engines.reference.buffers import integers, round_once
from ropegraph.errors import PositionError
from ropegraph.ir.ops import op_name
from ropegraph.lowering.engine import Step


def cache_starts(step: Step, env: Sequence[Tensor]) -> list[int | None]:
    """The first row that each batch entry writes; None for one that would leave the cache.

    Raises PositionError for such a one on a CPU.
    """
    most = step.value("cache").dim[2] - step.value("input").dim[2]
    found = integers(step, "cache_positions", env)
    wrong = [i for i, start in enumerate(found) if not 0 <= start <= most]
    if wrong and env[step.slot("cache")].is_cpu:
        raise PositionError(
            f"{op_name(step.node.attrs)} {step.name!r}: batch entry {wrong[0]} is to be written at "
            f"row {found[wrong[0]]} of its cache; use 0 to {most}"
        )
    return [None if i in wrong else start for i, start in enumerate(found)]


def write_rows(step: Step, env: Sequence[Tensor], starts: list[int | None], rows: Tensor) -> None:
    """The output is the cache, and the rows in it."""
    cache, out = env[step.slot("cache")].detach(), env[step.slot("output")]
    if out.data_ptr() != cache.data_ptr():  # verify() keeps what is exact apart
        out.copy_(cache)
    count = rows.shape[2]
    for i, start in enumerate(starts):
        if start is not None:
            out[i, :, start : start + count] = round_once(rows[i], out.dtype)


@dataclass(frozen=True)
class RunCacheWrite:
    """The input as it is, in the cache."""

    step: Step

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        starts = cache_starts(self.step, env)
        write_rows(self.step, env, starts, env[self.step.slot("input")].detach())
