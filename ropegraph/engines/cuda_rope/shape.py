"""How a launch is cut: vector width, units, parts and grid. Plain arithmetic, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropegraph.engines.cuda_rope.job import Job, Side

LANES = 32
MAX_X, MAX_YZ = 2**31 - 1, 65535  # blocks along each axis of a grid
MAX_WORD = 16  # bytes that one instruction moves

# Tuned on an H200. A warp takes few units, so that the last warps do not run alone for long, but
# enough to pay for the sines; narrow vectors need more of them.
UNITS = 2
UNIT_BYTES = 16  # that a lane reads at once of a whole unit
# Blocks of one warp leave no warp waiting for the slowest of its block, but blocks start at a
# limited rate: they pay where there are many warps with something to do.
WARPS = 4
MANY_WARPS = 8192


@dataclass(frozen=True)
class Grid:
    """Blocks along x, y and z, and log2 of the warps of a block that lie along s."""

    x: int
    y: int
    z: int
    warps_s: int


@dataclass(frozen=True)
class Split:
    """How the lanes of a warp are dealt out: ``lanes`` to a head, ``heads`` heads at a time."""

    lanes: int
    heads: int

    @property
    def magic(self) -> int:
        """m with x * m >> 10 == x // lanes for x < 32: it spares the kernel a division."""
        return -(-1024 // self.lanes)


@dataclass(frozen=True)
class Cut:
    """How one job is worked on.  part_heads: heads a warp takes.  parts: warps a token."""

    turn: Split
    others: Split
    part_heads: int
    parts: int


@dataclass(frozen=True)
class Shape:
    """A kernel's way of working on given jobs.

    vec: pairs a lane.  angles: sines that a lane takes for others.  warps: of a block.
    """

    vec: int
    angles: int
    warps: int
    cuts: tuple[Cut, ...]

    @property
    def parts(self) -> int:
        return sum(cut.parts for cut in self.cuts)


def widest_vector(jobs: Sequence[Job]) -> int:
    """Pairs that a lane can hold at once: 8, 4 or 2; 1 if strides or widths allow no vector.

    The base pointers have to be aligned as well: alignment() says how much.
    """
    narrowest = min(side.dtype.itemsize for job in jobs for side in (job.x, job.y))
    vec = MAX_WORD // narrowest
    while vec > 1 and not all(_fits(job, vec) for job in jobs):
        vec //= 2
    return vec


def alignment(side: Side, vec: int) -> int:
    """Bytes that the base of a tensor must be a multiple of."""
    return min(MAX_WORD, vec * side.dtype.itemsize)


def _fits(job: Job, vec: int) -> bool:
    if job.pairs > LANES * vec:
        return False
    if any(n % vec for n in (job.pairs, job.begin, job.dim[3])):
        return False
    for side in (job.x, job.y):
        *outer, stride_d = side.stride
        if stride_d != 1:
            return False
        if any(s * side.dtype.itemsize % alignment(side, vec) for s in outer):
            return False
    return True


def shape_of(jobs: Sequence[Job], vec: int) -> Shape:
    """The shape of a launch of these jobs with vectors of ``vec`` pairs."""
    cuts = tuple(_cut(job, vec) for job in jobs)
    angles = 1
    while angles * LANES < max(cut.turn.lanes for cut in cuts) * vec:
        angles *= 2
    tokens = max(job.dim[0] * job.dim[2] for job in jobs)
    is_busy = all(cut.part_heads >= UNITS * cut.turn.heads for cut in cuts)
    is_large = tokens * sum(cut.parts for cut in cuts) >= MANY_WARPS
    return Shape(vec, angles, 1 if is_busy and is_large else WARPS, cuts)


def _cut(job: Job, vec: int) -> Cut:
    """An even share of the heads for each warp, in whole units."""
    turn, others = _split(job.pairs // vec), _split((job.dim[3] - 2 * job.pairs) // vec)
    units = -(-job.dim[1] // turn.heads)
    most = UNITS * max(1, UNIT_BYTES // (vec * job.x.dtype.itemsize))
    part_units = -(-units // -(-units // most))
    part_heads = part_units * turn.heads
    return Cut(turn, others, part_heads, -(-job.dim[1] // part_heads))


def _split(vectors: int) -> Split:
    lanes = min(LANES, max(vectors, 1))
    return Split(lanes, LANES // lanes)


def grid_of(batch: int, tokens: int, parts: int, warps: int) -> Grid:
    """The grid over ``batch`` entries of ``tokens`` tokens, inside the limits of the hardware."""
    warps_s = 0
    while 2**warps_s < min(warps, tokens):
        warps_s += 1
    tiles = -(-tokens // 2**warps_s)
    entries = -(-batch * 2**warps_s // warps)
    z = -(-entries // MAX_YZ)
    y = -(-entries // z)
    grid = Grid(tiles * parts, y, z, warps_s)
    assert grid.x <= MAX_X, grid
    assert grid.z <= MAX_YZ, grid
    return grid
