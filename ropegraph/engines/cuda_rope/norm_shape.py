"""How a launch of norm_rope.cu is cut. Plain arithmetic, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropegraph.engines.cuda_rope.job import Job
from ropegraph.engines.cuda_rope.norm import NormJob
from ropegraph.engines.cuda_rope.shape import LANES, MAX_WORD, Cut, Shape, Split, alignment

# Tuned on an H200; docs/benchmarks/cuda_norm_rope_h200.md has the figures.
UNITS, BACKWARD_UNITS = 6, 16
UNIT_BYTES = 16
WARPS = 4  # of a block
MANY_WARPS = 8192
LOG_GROUP, LOG_GROUP_LONG = 14, 10
# Of the backward: enough to fill a GPU a few times, few enough that their sums cost little.
TOTAL_WARPS = 4224


@dataclass(frozen=True)
class NormShape:
    """A kernel's way of working on given jobs.

    base: as rope.cu takes it.  turns, passes: vectors of channels a lane that turn, that do not.
    warps: of the backward, that share the tokens of a part, for each job.
    """

    base: Shape
    turns: int
    passes: int
    warps: tuple[int, ...]

    def items(self, nth: int, job: NormJob) -> int:
        """Tiles of all batch entries of job ``nth``; none where there are no heads."""
        return job.rope.dim[0] * self.base.cuts[nth].tiles if job.rope.dim[1] else 0

    def workers(self, nth: int) -> int:
        """Warps that the backward has for job ``nth``."""
        return self.base.cuts[nth].parts * self.warps[nth]

    def sum_rows(self, nth: int, job: NormJob) -> int:
        """Rows of sums that it leaves for them: over all heads the parts lie in one row."""
        return self.warps[nth] if job.is_whole else self.workers(nth)


def widest_vector(jobs: Sequence[NormJob]) -> int:
    """Pairs that a lane can hold at once: 8, 4 or 2; 1 if strides or widths allow no vector."""
    vec = MAX_WORD // min(side.dtype.itemsize for job in jobs for side in job.sides)
    while vec > 1 and not all(_fits(job, vec) for job in jobs):
        vec //= 2
    return vec


def scale_alignment(job: NormJob, vec: int) -> int:
    """Bytes that the base of the weight must be a multiple of."""
    return min(MAX_WORD, vec * job.scale_dtype.itemsize)


def _fits(job: NormJob, vec: int) -> bool:
    rope = job.rope
    if any(n % vec for n in (rope.pairs, rope.begin, rope.dim[3])):
        return False
    for side in job.sides:
        *outer, stride_d = side.stride
        if stride_d != 1 or any(s * side.dtype.itemsize % alignment(side, vec) for s in outer):
            return False
    head, channel = job.scale_stride
    return channel == 1 and not head * job.scale_dtype.itemsize % scale_alignment(job, vec)


def norm_shape(jobs: Sequence[NormJob], vec: int) -> NormShape:
    """The shape of a launch of these jobs with vectors of ``vec`` pairs."""
    lanes = [_lanes(job.rope, vec) for job in jobs]
    log_tokens = min(_log_tokens(job, n) for job, n in zip(jobs, lanes, strict=True))
    cuts = tuple(_cut(job, vec, n, log_tokens) for job, n in zip(jobs, lanes, strict=True))
    turns = max(-(-(j.rope.pairs // vec) // n) for j, n in zip(jobs, lanes, strict=True))
    passes = max(-(-_others(j.rope, vec) // n) for j, n in zip(jobs, lanes, strict=True))
    angles = 1
    while angles * LANES < max(cut.turn.lanes << cut.turn.log_tokens for cut in cuts) * vec:
        angles *= 2
    batch = max(job.rope.dim[0] for job in jobs)
    warps = batch * sum(cut.tiles * cut.parts for cut in cuts)
    is_busy = warps >= MANY_WARPS and not jobs[0].is_backward
    log_group = 0
    if all(_is_token_next(job.rope) for job in jobs):
        is_long = max(cut.tiles for cut in cuts) > 2**LOG_GROUP
        log_group = LOG_GROUP_LONG if is_long else LOG_GROUP
    base = Shape(vec, angles, 1 if is_busy else WARPS, log_group, cuts)
    share = max(1, TOTAL_WARPS // base.parts)
    own = tuple(
        min(share, job.rope.dim[0] * cut.tiles) if job.rope.dim[1] else 0
        for job, cut in zip(jobs, cuts, strict=True)
    )
    return NormShape(base, max(turns, 1), passes, own)


def _others(rope: Job, vec: int) -> int:
    return (rope.dim[3] - 2 * rope.pairs) // vec


def _lanes(rope: Job, vec: int) -> int:
    """Lanes of a head row: a power of two; up to two vectors a lane of what does not turn."""
    lanes = 1
    while lanes < LANES and (lanes * vec < rope.pairs or lanes * 2 < _others(rope, vec)):
        lanes *= 2
    return lanes


def _is_token_next(rope: Job) -> bool:
    return 0 < rope.x.stride[2] < rope.x.stride[1]


def _log_tokens(job: NormJob, lanes: int) -> int:
    """Tokens that share a unit: two where they lie closer than heads, more where heads are few."""
    rope, rows = job.rope, LANES // lanes
    _, h, s, _ = rope.dim
    if rope.offsets is not None or job.is_whole:
        return 0
    heads = min(max(h, 1), max(1, rows // 2) if _is_token_next(rope) else rows)
    log_tokens = 0
    while heads << log_tokens + 1 <= rows and 1 << log_tokens < s:
        log_tokens += 1
    return log_tokens


def _cut(job: NormJob, vec: int, lanes: int, log_tokens: int) -> Cut:
    """An even share of the heads for each warp, in whole units.

    Where they are one row, a warp of the forward has all of them, and one of the backward a unit:
    it adds up the gradient of a weight that is each head's own.
    """
    rope = job.rope
    turn = Split(lanes, log_tokens, LANES // (lanes << log_tokens))
    units = max(1, -(-rope.dim[1] // turn.heads))
    most = BACKWARD_UNITS if job.is_backward else UNITS
    most *= max(1, UNIT_BYTES // (vec * rope.x.dtype.itemsize))
    part_heads = -(-units // -(-units // most)) * turn.heads
    if job.is_whole:
        part_heads = turn.heads if job.is_backward else max(rope.dim[1], 1)
    tiles = -(-rope.dim[2] >> turn.log_tokens)
    return Cut(turn, turn, part_heads, max(1, -(-rope.dim[1] // part_heads)), tiles)
