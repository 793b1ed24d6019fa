"""Rotations of every source and position kind, and what they mean, element by element in fp64."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ropegraph.ir.ops import Rope, RopeBackward, Rotation
from ropegraph.testing.inputs import normal

F32, F64 = torch.float32, torch.float64
INT32, INT64 = torch.int32, torch.int64
H, D, R, OFFSET = 3, 9, 6, 2
ROWS = 40  # of every table

Place = list[list[int | None]]


def chunks(whole: Sequence[int], size: int, rank: int) -> list[int]:
    """What a rank holds of a sequence: chunk ``rank`` of 2 size, and that from the end."""
    n = len(whole) // (2 * size)
    cut = [list(whole[i * n : (i + 1) * n]) for i in range(2 * size)]
    return cut[rank] + cut[2 * size - 1 - rank]


@dataclass(frozen=True)
class Positions:
    """How rows get positions: attributes, tensors, and the positions [b][s] (None: no sequence)."""

    rows: Place
    tensors: dict[str, Tensor] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def b(self) -> int:
        return len(self.rows)

    @property
    def s(self) -> int:
        return len(self.rows[0])


def packed(
    lengths: Sequence[int],
    gap: int = 0,
    starts: Sequence[int] | None = None,
    size: int = 1,
    rank: int = 0,
    dtype: torch.dtype = INT32,
) -> Positions:
    """Sequences one after the other (whole lengths), and ``gap`` rows of no sequence."""
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows: list[int | None] = []
    for n, start in zip(lengths, starts or [0] * len(lengths), strict=True):
        rows += [start + p for p in (range(n) if size == 1 else chunks(range(n), size, rank))]
    tensors = {"cu_seqlens": torch.tensor(cu, dtype=dtype)}
    if starts is not None:
        tensors["start_positions"] = torch.tensor(starts, dtype=dtype)
    return Positions([rows + [None] * gap], tensors, {"cp_size": size, "cp_rank": rank})


def dense(
    b: int, s: int, starts: Sequence[int] | None = None, size: int = 1, rank: int = 0
) -> Positions:
    """s rows of this rank in b entries."""
    own = list(range(s)) if size == 1 else chunks(range(s * size), size, rank)
    tensors = {} if starts is None else {"start_positions": torch.tensor(starts, dtype=INT64)}
    rows: Place = [[start + p for p in own] for start in (starts or [0] * b)]
    return Positions(rows, tensors, {"cp_size": size, "cp_rank": rank})


def ids(rows: Sequence[Sequence[int]], b: int, dtype: torch.dtype = INT32) -> Positions:
    own = [list(r) for r in rows]
    return Positions(
        own if len(own) == b else own * b, {"position_ids": torch.tensor(rows, dtype=dtype)}
    )


POSITIONS: dict[str, Positions] = {
    "plain": dense(2, 6),
    "shared ids": ids([[4, 0, 9, 9, 39, 2]], 2),
    "ids": ids([[4, 0, 9, 9, 39, 2], [1, 2, 3, 5, 8, 13]], 2, INT64),
    "starts": dense(2, 6, [3, 0]),
    "cp": dense(2, 6, size=3, rank=1),
    "cp, starts": dense(2, 6, [5, 1], size=2, rank=1),
    "packed": packed([0, 3, 0, 4, 0], gap=2),
    "packed, starts": packed([3, 0, 4], 1, [7, 2, 0], dtype=INT64),
    "packed, cp": packed([8, 0, 4], 1, size=2, rank=1),
    "packed, cp, starts": packed([12, 6], 0, [1, 6], size=3, rank=2),
}
SOURCES = ("freqs", "cos_sin", "packed", "inv_freq", "exact")
TABLES = ("half", "first_half", "pairs", "full")


@dataclass(frozen=True)
class Case:
    """A rotation put together.  cos, sin: [rows of the data, R/2] a lane, as a formula needs them.

    tensors: the angle and position ports.
    """

    attrs: Rope
    tensors: dict[str, Tensor]
    cos: tuple[Tensor, Tensor]
    sin: tuple[Tensor, Tensor]
    dead: Tensor

    @property
    def backward(self) -> RopeBackward:
        return RopeBackward(**vars(self.attrs))

    def formula(self, x: Tensor) -> Tensor:
        """The rotation of x [b, h, s, d] in fp64; differentiable, linear."""
        x = torch.where(self.dead[:, None, :, None], 0.0, x.double())
        a, sign = self.attrs.attention_factor, -1.0 if self.attrs.inverse else 1.0
        out = list(x.unbind(3))
        read = lanes(self.attrs, self.attrs.interleaved)
        written = lanes(self.attrs, self.attrs.interleaved_output)
        for i, ((r1, r2), (w1, w2)) in enumerate(zip(read, written, strict=True)):
            x1, x2 = x[..., r1], x[..., r2]
            (c1, c2), (s1, s2) = ([t[:, None, :, i] for t in pair] for pair in (self.cos, self.sin))
            out[w1] = a * (x1 * c1 - sign * x2 * s1)
            out[w2] = a * (x2 * c2 + sign * x1 * s2)
        return self.attrs.output_scale * torch.stack(out, dim=3)


def lanes(attrs: Rotation, interleaved: bool) -> list[tuple[int, int]]:
    o, r = attrs.rope_offset, attrs.rope_dim
    if interleaved:
        return [(o + 2 * i, o + 2 * i + 1) for i in range(r // 2)]
    return [(o + i, o + r // 2 + i) for i in range(r // 2)]


def case(
    source: str,
    layout: str,
    positions: Positions,
    per_batch: bool = False,
    dtype: torch.dtype = F64,
    **attrs: Any,
) -> Case:
    """A rotation of R of D channels.  dtype: of tables that may have one."""
    base = {"rope_dim": R, "rope_offset": OFFSET, **attrs, **positions.attrs}
    index = torch.tensor([[p or 0 for p in row] for row in positions.rows])
    dead = torch.tensor([[p is None for p in row] for row in positions.rows])
    if source in ("inv_freq", "exact"):
        inv = torch.tensor([1.0, 0.3, 0.01])
        base |= {"angle_precision": source} if source == "exact" else {}
        op = Rope(angles="inv_freq", half_width=True, **base)
        angle = index[..., None].double() * inv.double()
        angle = angle if source == "exact" else (index[..., None].float() * inv).double()
        one = angle.cos(), angle.sin()
        tensors = {"inv_freq": inv, **positions.tensors}
        return Case(op, tensors, (one[0],) * 2, (one[1],) * 2, dead)
    op = Rope(angles=source, half_width=layout == "half", **base)
    if layout != "half":
        op = replace(op, table_layout=layout)
    b = positions.b if per_batch else 1
    angles = [(3 * normal((ROWS, b, 1, R // 2), F32, seed=n)).double() for n in (7, 8)]
    if layout != "full":
        angles[1] = angles[0]
    entry = torch.arange(positions.b)[:, None] if per_batch else 0
    cos, sin = ([f(t).to(dtype) for t in angles] for f in (torch.cos, torch.sin))
    if source == "freqs":
        tensors = {"freqs": spread(op, [t.float() for t in angles])}
    elif source == "cos_sin":
        tensors = {"cos": spread(op, cos), "sin": spread(op, sin)}
    else:
        tensors = {"cos_sin": torch.cat([spread(op, cos), spread(op, sin)], dim=3)}
    if source == "freqs":
        cos, sin = ([f(t) for t in angles] for f in (torch.cos, torch.sin))
    read = [[t.double()[index, entry, 0] for t in pair] for pair in (cos, sin)]
    return Case(op, tensors | positions.tensors, tuple(read[0]), tuple(read[1]), dead)


def spread(attrs: Rope, halves: list[Tensor]) -> Tensor:
    """Both halves in the table's layout, NaN where nothing should be read."""
    first, second = halves
    if attrs.half_width:
        return first
    unread = torch.full_like(first, torch.nan)
    if attrs.table_layout == "first_half":
        return torch.cat([first, unread], dim=3)
    if attrs.table_layout == "pairs":
        return torch.stack([first, unread], dim=4).flatten(3)
    if attrs.interleaved_output:
        return torch.stack([first, second], dim=4).flatten(3)
    return torch.cat([first, second], dim=3)
