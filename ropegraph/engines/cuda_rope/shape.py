"""How a launch is cut: vector width, units, parts and grid. Plain arithmetic, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropegraph.engines.cuda_rope.job import Job, Side

LANES = 32
MAX_X, MAX_YZ = 2**31 - 1, 65535  # blocks along each axis of a grid
MAX_WORD = 16  # bytes that one instruction moves

# Warps that keep a large GPU busy: fewer tokens than this are shared out among several warps each.
BUSY_WARPS = 4096
WARPS = 4  # warps of a block


@dataclass(frozen=True)
class Grid:
    """Blocks along x, y and z, and log2 of the warps of a block that lie along s."""

    x: int
    y: int
    z: int
    warps_s: int


@dataclass(frozen=True)
class Shape:
    """A kernel's way of working on given jobs.

    vec: pairs a lane.  angles: sines a lane takes for others.  unit_heads: heads of a unit, alike
    for both jobs if joined.  parts, first_parts: warps a token for all jobs, and for the first.
    """

    vec: int
    angles: int
    unit_heads: tuple[int, ...]
    units: tuple[int, ...]
    part_units: int
    parts: int
    first_parts: int


def can_join(jobs: Sequence[Job]) -> bool:
    """True if two jobs turn the same tokens by the same angles, so a warp can do both."""
    if len(jobs) != 2:
        return False
    a, b = jobs
    alike = ("angles", "begin", "pairs", "sign", "is_adjoint", "passes")
    return (
        a.offsets is None
        and b.offsets is None
        and (a.dim[0], a.dim[2]) == (b.dim[0], b.dim[2])
        and all(getattr(a, name) == getattr(b, name) for name in alike)
    )


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
    lanes = [min(LANES, job.pairs // vec) for job in jobs]
    angles = 1
    while angles * LANES < max(lanes) * vec:
        angles *= 2
    unit_heads = tuple(LANES // n for n in lanes)
    units = tuple(-(-job.dim[1] // n) for job, n in zip(jobs, unit_heads, strict=True))
    together = [sum(units)] if can_join(jobs) else list(units)
    tokens = max(job.dim[0] * job.dim[2] for job in jobs)
    part_units = _part_units(max(together), tokens)
    parts = [-(-n // part_units) for n in together]
    return Shape(vec, angles, unit_heads, units, part_units, sum(parts), parts[0])


def _part_units(units: int, tokens: int) -> int:
    """Units a warp takes: all of a token if there are warps enough, else an even share."""
    parts = min(units, max(1, BUSY_WARPS // max(tokens, 1)))
    return -(-units // parts)


def grid_of(batch: int, tokens: int, parts: int) -> Grid:
    """The grid over ``batch`` entries of ``tokens`` tokens, inside the limits of the hardware."""
    warps_s = 0
    while 2**warps_s < min(WARPS, tokens):
        warps_s += 1
    tiles = -(-tokens // 2**warps_s)
    entries = -(-batch * 2**warps_s // WARPS)
    z = -(-entries // MAX_YZ)
    y = -(-entries // z)
    grid = Grid(tiles * parts, y, z, warps_s)
    assert grid.x <= MAX_X, grid
    assert grid.z <= MAX_YZ, grid
    return grid
