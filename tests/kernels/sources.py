"""Cases of every source of angles, kind of positions and way to hold sequences."""

import random
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ropegraph.ir.ops import Rope, RopeBackward
from ropegraph.testing.inputs import Layout, normal, placed, poisoned
from tests.kernels.cases import Case, Ragged, case, like, offset_by
from tests.kernels.test_host import DTYPES, LAYOUTS, PAIRS, WIDTHS, adjoint, rotation, seeded, table

Source = Literal["freqs", "cos_sin", "packed", "inv_freq", "exact"]
Positions = Literal["rows", "ids", "starts", "cp", "cp and starts"]
Sequences = Literal["dense", "packed", "ragged"]
SOURCES: tuple[Source, ...] = ("freqs", "cos_sin", "packed", "inv_freq", "exact")
POSITIONS: tuple[Positions, ...] = ("rows", "ids", "starts", "cp", "cp and starts")
SEQUENCES: tuple[Sequences, ...] = ("dense", "packed", "ragged")
INTEGERS = (torch.int32, torch.int64)
CP = 3


@dataclass(frozen=True)
class Plan:
    """What the macros of one variant and the sizes of its cases follow from."""

    source: Source
    positions: Positions
    sequences: Sequences
    number: int

    @property
    def cp_size(self) -> int:
        return CP if self.positions.startswith("cp") else 1


def plans() -> list[Plan]:
    """Each source with each kind of positions; conventions, sequences and types in turn."""
    pairs = [(s, p) for s in range(len(SOURCES)) for p in range(len(POSITIONS))]
    return [
        Plan(SOURCES[s], POSITIONS[p], SEQUENCES[(s + p) % 3], n) for n, (s, p) in enumerate(pairs)
    ]


def tables(
    rng: random.Random, op: Rope, rows: int, batch: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors at the ports of angles; cosines and sines need not be those of angles here."""
    half, width = op.rope_dim // 2, op.rope_dim // 2 if op.half_width else op.rope_dim
    if op.angles == "freqs":
        return {"freqs": table(rng, rows, width, batch)}
    if op.angles == "inv_freq":
        radians = 10 ** -(4 * torch.rand(2 * half, generator=seeded(rng)))
        return {"inv_freq": radians[::2]}
    if op.angles == "packed":
        both = torch.rand(rows, batch, 1, 2 * width, generator=seeded(rng)) * 2 - 1
        return {"cos_sin": offset_by(both.to(dtype), 1)}
    cos, sin = (torch.rand(rows, batch, 1, width, generator=seeded(rng)) * 2 - 1 for _ in range(2))
    # Two tensors need not have the same strides.
    spread = torch.full((rows, batch, 1, 2 * width), torch.nan, dtype=dtype)
    spread[..., ::2] = sin
    return {"cos": cos.to(dtype), "sin": spread[..., ::2]}


def cases(plan: Plan) -> list[tuple[str, Case]]:
    """Forward and adjoint, in place, and on bases and strides that allow no vector."""
    rng = random.Random(plan.number)
    i = plan.number
    dtype, r = DTYPES[i % 3], WIDTHS[i % 10]
    d = r + (24 if i // 2 % 2 else 0)
    has_table = plan.source not in ("inv_freq", "exact")
    op = replace(
        rotation(rng, r, d, PAIRS[(i + i // 5) % 4], full=has_table and i % 2 == 0),
        angles="inv_freq" if plan.source == "exact" else plan.source,
        angle_precision="exact" if plan.source == "exact" else "float32",
        cp_size=plan.cp_size,
        cp_rank=rng.randrange(plan.cp_size),
    )
    made = [
        ("forward", bound(rng, plan, op, dtype, d)),
        ("adjoint", bound(rng, plan, adjoint(op), dtype, d)),
        ("misaligned", bound(rng, plan, op, dtype, d, shift=1)),
    ]
    return [(f"{plan}, {kind}: {dtype}, d={d}, {op}", given) for kind, given in made]


def bound(
    rng: random.Random, plan: Plan, op: Rope | RopeBackward, dtype: torch.dtype, d: int,
    shift: int = 0,
) -> Case:  # fmt: skip
    """The op on tensors of its own."""
    b, h, s = rng.choice(((2, 3, 6), (1, 7, 4), (3, 1, 10), (5, 2, 2)))
    kind = INTEGERS[plan.number % 2]
    tensors: dict[str, Tensor | Ragged] = {}
    if plan.sequences == "dense":
        layout: Layout = rng.choice(LAYOUTS)
        x = placed(normal((b, h, s, d), dtype, seed=rng.randrange(1000)), layout)
        y = poisoned((b, h, s, d), dtype, rng.choice(LAYOUTS))
        sequences, longest = b, s * plan.cp_size
        x, y = offset_by(x, shift), offset_by(y, shift)
    else:
        # Lengths that a rank holds: empty ones, and tokens of no sequence at the end.
        held = [0, 4, 0, 2, 6, 0] if plan.cp_size > 1 else [0, 3, 0, 1, 7, 0]
        sequences, longest = len(held), 7 * plan.cp_size
        bounds = torch.tensor([0, *held]).cumsum(0)
        # Ragged data is cut into tokens from its start: less than one of them is nobody's.
        s = int(bounds[-1]) + (0 if shift and plan.sequences == "ragged" else 2)
        b = 1 if plan.sequences == "packed" else sequences
        x = offset_by(normal((1, h, s, d), dtype, "bshd", seed=rng.randrange(1000)), shift)
        y = offset_by(like(x), shift)
        if plan.sequences == "packed":
            tensors["cu_seqlens"] = (bounds * plan.cp_size).to(INTEGERS[plan.number // 2 % 2])
        else:
            offsets = (bounds * h * d + shift).to(INTEGERS[plan.number // 2 % 2])
            s = 8
            dim, stride = (b, h, s, d), (s * h * d, d, h * d, 1)
            flat, to = (torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),),
                                         (1,), 0) for t in (x, y))  # fmt: skip
            to[:shift] = 0.0
            x, y = Ragged(flat, dim, stride, offsets), Ragged(to, dim, stride, offsets)
    first, rows = (0, longest + 2) if op.angles != "inv_freq" else (-10, 10**6)
    if plan.positions == "ids":
        ids = torch.randint(first, rows, (rng.choice((1, b)), 2 * s), generator=seeded(rng))
        tensors["position_ids"] = ids.to(kind)[:, ::2]
    if plan.positions.endswith("starts"):
        most = 3 if op.angles != "inv_freq" else 10**5
        starts = torch.randint(first, most, (sequences,), generator=seeded(rng))
        tensors["start_positions"] = starts.to(kind)
    batch = 1 if plan.sequences == "packed" else rng.choice((1, b))
    tensors |= tables(rng, op, longest + 3, batch, DTYPES[plan.number // 5 % 3])  # type: ignore[arg-type]
    if isinstance(op, RopeBackward):
        return case(op, dY=x, **tensors, dX=y)
    return case(op, input=x, **tensors, output=y)
