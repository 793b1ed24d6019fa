"""Which position every row of a rotation has, as an index tensor: what Rotation says, row by row.

On a CPU a wrong position raises before anything is written. On another device that would wait for
it, so wrong rows are marked, read row 0 or the last one, and become NaN in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from ropegraph.errors import PositionError
from ropegraph.ir.ops import ANGLE_PORTS, POSITION_PORTS, Rotation, op_name
from ropegraph.lowering.engine import Step


@dataclass(frozen=True)
class Rows:
    """What is known of the rows; every tensor is [1 or b, s].

    index: int64 positions, within the table.  dead: rows of no sequence, which have index 0.
    bad: rows whose position is wrong, elsewhere than on a CPU.  sequence: the number of each row's.
    """

    index: Tensor
    dead: Tensor | None = None
    bad: Tensor | None = None
    sequence: Tensor | None = None

    def faults(self) -> tuple[str, ...]:
        """What is wrong, as text; waits for the device."""
        if self.bad is None or not bool(self.bad.any()):
            return ()
        return ("rows with a position outside of the table, or cu_seqlens that do not fit",)


class Positions:
    """The positions of one rotation.  is_plain: row s has position s, and nothing can be wrong."""

    def __init__(self, step: Step) -> None:
        attrs = cast(Rotation, step.node.attrs)
        self.where = f"{op_name(step.node.attrs)} {step.name!r}"
        self.size, self.rank = attrs.cp_size, attrs.cp_rank
        port = next(iter(step.node.inputs))
        data = step.value(port)
        self.x, self.data, self.rows = step.slot(port), data, data.dim[-2]
        self.ids, self.starts, self.cu_seqlens = map(step.slot, POSITION_PORTS)
        table = ANGLE_PORTS[attrs.angles][0]
        self.table = None if table == "inv_freq" else step.value(table)
        self.table_port = table
        self.is_plain = self.size == 1 and not any(map(step.has, POSITION_PORTS))
        offsets = -1 if data.ragged_offset is None else step.slots[data.ragged_offset]
        # Equal where two rotations have the same positions whatever is bound.
        self.key = (
            *(self.ids, self.starts, self.cu_seqlens, self.size, self.rank, self.rows),
            *(() if self.is_plain else (offsets, data.ragged_multiplier, data.stride[2])),
        )

    def __call__(self, env: Sequence[Tensor], lengths: Sequence[int] | None = None) -> Rows | None:
        """The rows, None where they are plain.  lengths: tokens of each sequence of ragged data.

        Raises PositionError on a CPU if a position, a length or cu_seqlens is wrong.
        """
        if self.is_plain:
            return None
        if self.ids >= 0:
            return self._checked(Rows(env[self.ids].to(torch.int64)))
        if self.cu_seqlens >= 0:
            return self._checked(self._packed(env))
        return self._checked(self._counted(env, lengths))

    def _counted(self, env: Sequence[Tensor], lengths: Sequence[int] | None) -> Rows:
        """Row after row in every batch entry, or in every sequence of ragged data."""
        device = env[self.x].device
        row = torch.arange(self.rows, device=device)[None]
        if lengths is None:
            index, dead = self._chunked(row, self.rows), None
        else:
            self._check_halves(lengths)
            length = torch.tensor(lengths, dtype=torch.int64, device=device)[:, None]
            index, dead = self._chunked(row, length), row >= length
        if self.starts >= 0:
            index = _from(env[self.starts].to(torch.int64)[:, None], index)
        return Rows(index if dead is None else index.masked_fill(dead, 0), dead)

    def _chunked(self, row: Tensor, length: Tensor | int) -> Tensor:
        """The place of a rank's row in its whole sequence; ``length``: the rank's own rows of it.

        A rank holds two chunks of 2 cp_size: number cp_rank, and the same counted from the end.
        """
        if self.size == 1:
            return row
        half = length // 2
        late = row + (length * self.size - (self.rank + 2) * half)
        return torch.where(row < half, row + self.rank * half, late)

    def _packed(self, env: Sequence[Tensor]) -> Rows:
        """Sequences one behind the other; cu_seqlens counts tokens of all ranks."""
        cu = env[self.cu_seqlens].to(torch.int64).contiguous()
        row, last = torch.arange(self.rows, device=cu.device), cu.numel() - 2
        broken = self._why_broken(cu)
        begin = torch.div(cu, self.size, rounding_mode="floor")
        sequence = torch.searchsorted(begin, row, right=True) - 1
        dead = (sequence < 0) | (sequence > last)
        if last < 0:
            return Rows(torch.zeros_like(row)[None], dead[None], broken)
        own = sequence.clamp(0, last)
        first = begin[own]
        index = self._chunked(row - first, begin[own + 1] - first)
        if self.starts >= 0:
            index = _from(env[self.starts].to(torch.int64)[own], index)
        return Rows(index.masked_fill(dead, 0)[None], dead[None], broken, own[None])

    def _why_broken(self, cu: Tensor) -> Tensor | None:
        """Raise on a CPU if cu_seqlens does not fit the data; elsewhere mark every row then."""
        if cu.is_cpu:
            self._check_packed(cast("list[int]", cu.tolist()))
            return None
        lengths = cu.diff()
        broken = (cu[0] < 0) | (cu[-1] // self.size > self.rows) | (lengths < 0).any()
        if self.size > 1:
            broken = broken | (lengths % (2 * self.size) != 0).any()
        return broken.expand(1, self.rows)

    def _check_packed(self, cu: list[int]) -> None:
        what = f"{self.where}: cu_seqlens"
        if cu[0] < 0:
            raise PositionError(f"{what} starts at {cu[0]}; use 0, or the first token's row")
        for i, (begin, end) in enumerate(pairwise(cu)):
            if end < begin:
                raise PositionError(
                    f"{what} decreases at sequence {i}, from {begin} to {end}; give a running sum"
                )
            if self.size > 1 and (end - begin) % (2 * self.size):
                raise PositionError(
                    f"{what}: sequence {i} has length {end - begin}, which 2*cp_size="
                    f"{2 * self.size} does not divide; pad it to a multiple"
                )
        if cu[-1] // self.size > self.rows:
            raise PositionError(
                f"{what}: sequence {len(cu) - 2} ends at token {cu[-1]}, past the "
                f"{self.rows * self.size} tokens of {self.data.name!r} {list(self.data.dim)}"
                + (f" on {self.size} ranks" if self.size > 1 else "")
            )

    def _check_halves(self, lengths: Sequence[int]) -> None:
        for i, length in enumerate(lengths):
            if self.size > 1 and length % 2:
                raise PositionError(
                    f"{self.where}: sequence {i} of {self.data.name!r} has {length} rows here, "
                    f"{length * self.size} on cp_size={self.size} ranks, which 2*cp_size="
                    f"{2 * self.size} does not divide; pad it to a multiple"
                )

    def _checked(self, rows: Rows) -> Rows:
        """Raise on a CPU for rows outside of the table; elsewhere mark them and stay within."""
        if self.table is None:
            return rows
        count = self.table.dim[0]
        bad = (rows.index < 0) | (rows.index >= count)
        if rows.dead is not None:
            bad = bad & ~rows.dead
        if not rows.index.is_cpu:
            bad = bad if rows.bad is None else bad | rows.bad
            return replace(rows, index=rows.index.clamp(0, max(count - 1, 0)), bad=bad)
        if bool(bad.any()):
            entry, row = (int(n) for n in bad.nonzero()[0])
            who = f"batch entry {entry}" if self.data.ragged_offset is None else f"sequence {entry}"
            if rows.sequence is not None:
                who = f"sequence {int(rows.sequence[0, row])}"
            raise PositionError(
                f"{self.where}: row {row} of {who} has position {int(rows.index[entry, row])}, "
                f"outside of the {count} rows of {self.table_port} {self.table.name!r}; use "
                f"positions from 0 to {count - 1}, or a longer table"
            )
        return rows


def _from(start: Tensor, row: Tensor) -> Tensor:
    """start + row, at most 2^63 - 1: in fp64 and in fp32 that is the same position."""
    place = start + row
    return torch.where(place < start, torch.iinfo(torch.int64).max, place)
