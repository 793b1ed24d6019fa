"""How a launch is cut: vector width, units, parts and grid. Plain arithmetic, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropegraph.engines.cuda_rope.job import Job, Side

LANES = 32
MAX_X, MAX_YZ = 2**31 - 1, 65535  # blocks along each axis of a grid
MAX_WORD = 16  # bytes that one instruction moves

# Tuned on an H200; docs/benchmarks/cuda_rope_h200.md has the figures.
# A warp takes few units, so that the last warps do not run alone for long, but enough to pay for
# the sines, and for the search of its sequence where the data is ragged.
UNITS, RAGGED_UNITS = 2, 4
UNIT_BYTES = 16  # that a lane reads at once of a whole unit; narrow vectors take more units
# Blocks of one warp leave no warp waiting for the slowest of its block, but blocks start at a
# limited rate: they pay where there are many warps with something to do.
WARPS = 4
MANY_WARPS = 8192
# Where tokens lie closer than heads, blocks sweep over the tokens of some heads before they go on
# to the next: whole heads in the order of memory, as long as the L2 keeps the table meanwhile.
LOG_GROUP, LOG_GROUP_LONG = 14, 10


@dataclass(frozen=True)
class Grid:
    """Blocks along x, y and z.

    warps_s: log2 of the warps of a block that lie along s.  log_group: of the blocks along s that
    run over one part of the heads before they run over the next.
    """

    x: int
    y: int
    z: int
    warps_s: int
    log_group: int

    @property
    def blocks(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


@dataclass(frozen=True)
class Split:
    """How the lanes of a warp are dealt out.

    lanes: of one head row.  heads: of 2^log_tokens tokens each, at a time.
    """

    lanes: int
    log_tokens: int
    heads: int

    @property
    def magic(self) -> int:
        """m with x * m >> 10 == x // lanes for x < 32: it spares the kernel a division."""
        return -(-1024 // self.lanes)


@dataclass(frozen=True)
class Cut:
    """How one job is worked on.

    turn, others: the channels that turn, the others.  part_heads: heads a warp takes.
    parts: warps for all heads.  tiles: of tokens, in a batch entry.
    """

    turn: Split
    others: Split
    part_heads: int
    parts: int
    tiles: int


@dataclass(frozen=True)
class Shape:
    """A kernel's way of working on given jobs.

    vec: pairs a lane.  angles: sines that a lane takes for others.  warps: of a block.
    log_group: as in Grid.
    """

    vec: int
    angles: int
    warps: int
    log_group: int
    cuts: tuple[Cut, ...]

    @property
    def parts(self) -> int:
        return sum(cut.parts for cut in self.cuts)

    @property
    def tiles(self) -> int:
        return max(cut.tiles for cut in self.cuts)


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
        if any(s * side.dtype.itemsize % alignment(side, vec) for s in (*outer, side.group)):
            return False
    return True


def shape_of(jobs: Sequence[Job], vec: int) -> Shape:
    """The shape of a launch of these jobs with vectors of ``vec`` pairs."""
    # One kernel serves all jobs: where one wants many tokens, the lanes of all take more sines.
    log_tokens = min(_log_tokens(job, _vectors(job, vec)) for job in jobs)
    cuts = tuple(_cut(job, vec, log_tokens) for job in jobs)
    held = max(cut.turn.lanes << cut.turn.log_tokens for cut in cuts)
    angles = 1
    while angles * LANES < held * vec:
        angles *= 2
    batch = max(job.dim[0] for job in jobs)
    warps = batch * sum(cut.tiles * cut.parts for cut in cuts)
    is_busy = all(cut.part_heads >= UNITS * cut.turn.heads for cut in cuts)
    log_group = 0
    if all(_is_token_next(job) for job in jobs):
        is_long = max(cut.tiles for cut in cuts) > 2**LOG_GROUP
        log_group = LOG_GROUP_LONG if is_long else LOG_GROUP
    return Shape(vec, angles, 1 if is_busy and warps >= MANY_WARPS else WARPS, log_group, cuts)


def _cut(job: Job, vec: int, log_tokens: int) -> Cut:
    """An even share of the heads for each warp, in whole units."""
    turn = _split(_vectors(job, vec), log_tokens)
    others = _split((job.dim[3] - 2 * job.pairs) // vec, turn.log_tokens)
    units = -(-job.dim[1] // turn.heads)
    most = UNITS if job.offsets is None else RAGGED_UNITS
    most *= max(1, UNIT_BYTES // (vec * job.x.dtype.itemsize))
    part_heads = -(-units // -(-units // most)) * turn.heads
    tiles = -(-job.dim[2] >> turn.log_tokens)
    return Cut(turn, others, part_heads, -(-job.dim[1] // part_heads), tiles)


def _vectors(job: Job, vec: int) -> int:
    """Vectors of pairs in a head row; what turns nothing is dealt out as if all of it turned."""
    return max(1, (job.pairs or job.dim[3] // 2) // vec)


def _is_token_next(job: Job) -> bool:
    """True if the next token of a head lies closer than the next head of a token."""
    return job.kind.sequences != "ragged" and 0 < job.x.stride[2] < job.x.stride[1]


def _log_tokens(job: Job, vectors: int) -> int:
    """Tokens that share a unit: two where they lie closer than heads, more where heads are few."""
    rows = LANES // min(LANES, vectors)
    _, h, s, _ = job.dim
    if job.offsets is not None:
        return 0
    heads = min(h, max(1, rows // 2) if _is_token_next(job) else rows)
    log_tokens = 0
    while heads << log_tokens + 1 <= rows and 1 << log_tokens < s:
        log_tokens += 1
    return log_tokens


def _split(vectors: int, log_tokens: int) -> Split:
    lanes = min(LANES, max(vectors, 1))
    while lanes << log_tokens > LANES:
        log_tokens -= 1
    return Split(lanes, log_tokens, LANES // (lanes << log_tokens))


def grid_of(batch: int, tiles: int, parts: int, warps: int, log_group: int = 0) -> Grid:
    """The grid over ``batch`` entries of ``tiles`` tiles, inside the limits of the hardware."""
    warps_s = 0
    while 2**warps_s < min(warps, tiles):
        warps_s += 1
    blocks = -(-tiles // 2**warps_s)
    while log_group and 2**log_group > blocks:
        log_group -= 1
    groups = -(-blocks // 2**log_group)
    entries = -(-batch * 2**warps_s // warps)
    z = -(-entries // MAX_YZ)
    y = -(-entries // z)
    grid = Grid((groups << log_group) * parts, y, z, warps_s, log_group)
    assert grid.x <= MAX_X, grid
    assert grid.z <= MAX_YZ, grid
    return grid
