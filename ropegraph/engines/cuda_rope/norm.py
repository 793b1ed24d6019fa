"""Norm and rotation for norm_rope.cu: a step as plain numbers, how it is cut, its variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ropegraph.dtypes import DType, short
from ropegraph.engines.cuda_rope.job import Job, Side, jobs_of, side_of
from ropegraph.engines.cuda_rope.kind import Kind
from ropegraph.engines.cuda_rope.shape import LANES, MAX_WORD, Cut, Shape, Split, alignment
from ropegraph.engines.cuda_rope.unit import Unit
from ropegraph.engines.cuda_rope.variant import SOURCE as ROPE_SOURCE
from ropegraph.ir.graph import Node, singles
from ropegraph.ir.norm import is_over_heads
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    POSITION_PORTS,
    NormRope,
    NormRopeBackward,
    NormRopePair,
    Op,
    RopeBackward,
)
from ropegraph.lowering.engine import Step

SOURCE = Path(__file__).with_name("norm_rope.cu")
MAX_WIDTH = 512  # channels of a head row: what a warp holds in registers
NORMS = (NormRope, NormRopeBackward, NormRopePair)
_SERVED = (DType.HALF, DType.BFLOAT16, DType.FLOAT)

# Tuned on an H200; docs/benchmarks/cuda_norm_rope_h200.md has the figures.
UNITS, BACKWARD_UNITS = 6, 16
UNIT_BYTES = 16
WARPS = 4  # of a block
MANY_WARPS = 8192
LOG_GROUP, LOG_GROUP_LONG = 14, 10
FLIGHT = 2
# Of the backward: enough to fill a GPU a few times, few enough that their sums cost little.
TOTAL_WARPS = 4224
SUM_COLUMNS = 8  # that a block of norm_sum adds up
# Below this epsilon, squares of tiny rows are made again, scaled up.
_SMALL_EPSILON, _SMALL_MEAN = 1e-25, 1e-20


@dataclass(frozen=True)
class NormJob:
    """A rotation and the norm beside it.  Slots are -1 where there is no such tensor.

    x: what the backward reads beside dY.  scale_stride: from head to head and from channel to
    channel.  inverse_stride: along b, h and s.  is_whole: all heads of a token are one row.
    """

    rope: Job
    is_backward: bool
    norm_first: bool
    is_whole: bool
    y_slot: int
    x: Side | None
    scale: int
    scale_dtype: DType
    scale_stride: tuple[int, int]
    inverse: int
    inverse_stride: tuple[int, int, int]
    dscale: int
    dscale_stride: int
    epsilon: float
    zero_centered: bool

    @property
    def sides(self) -> tuple[Side, ...]:
        """The tensors that rows are read from and written to."""
        own = (self.rope.x, self.rope.y)
        return own if self.x is None else (*own, self.x)

    @property
    def size(self) -> int:
        """Numbers whose squares are added up."""
        _, h, _, d = self.rope.dim
        return h * d if self.is_whole else d

    @property
    def small(self) -> float:
        """A mean of squares below which they are made again."""
        return _SMALL_MEAN if self.epsilon <= _SMALL_EPSILON else 0.0


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

    def sum_rows(self, nth: int) -> int:
        """Rows of sums that the backward leaves for job ``nth``."""
        return self.base.cuts[nth].parts * self.warps[nth]


@dataclass(frozen=True)
class NormVariant(Unit):
    """One translation unit: norm_vector for ``vec`` > 1, norm_any, and norm_sum in the backward."""

    kind: Kind
    is_backward: bool
    norm_first: bool
    is_whole: bool
    x: DType
    scale: DType
    vec: int
    turns: int
    passes: int
    any_turns: int
    any_passes: int
    angles: int
    warps: int

    @property
    def resident(self) -> int:
        """Warps that an SM holds at least, which bounds registers."""
        held = self.turns * 2 + self.passes
        wide = held * self.vec * (2 if self.kind.is_full else 1)
        if self.is_backward:
            return 12 if wide <= 16 else 8
        if self.norm_first and not self.is_whole and wide <= 16:
            return 28  # weight and rotation lie in shared memory
        return 20 if wide <= 16 else 12

    @property
    def macros(self) -> dict[str, str]:
        """Those of rope.cu are among them."""
        own = {
            "BACKWARD": int(self.is_backward),
            "FIRST": int(self.norm_first),
            "WHOLE": int(self.is_whole),
            "X": self.x.c_name,
            "SCALE": self.scale.c_name,
            "VEC": self.vec,
            "TURNS": self.turns,
            "PASSES": self.passes,
            "ANY_TURNS": self.any_turns,
            "ANY_PASSES": self.any_passes,
            "ANGLES": self.angles,
            "FLIGHT": 1 if self.is_backward else FLIGHT,
            "WARPS": self.warps,
            "RESIDENT": self.resident,
        }
        rope = {"ROPE_PASS": "1", "ROPE_VEC": "1", "ROPE_ANGLES": "1", "ROPE_FLIGHT": "1"}
        rope |= {"ROPE_GROUPS": "0", "ROPE_CACHE": "0", "ROPE_ROW": "int"}
        rope |= {"ROPE_WARPS": str(self.warps), "ROPE_RESIDENT": "16"}
        return self.kind.macros | rope | {f"NORM_{name}": str(v) for name, v in own.items()}

    @property
    def code(self) -> str:
        return source()

    @property
    def kernels(self) -> tuple[str, ...]:
        vector = ("norm_vector",) if self.vec > 1 else ()
        return (*vector, "norm_any", *(("norm_sum",) if self.is_backward else ()))


def source() -> str:
    """rope.cu without its kernels, and norm_rope.cu behind it."""
    library, _, _ = ROPE_SOURCE.read_text(encoding="utf-8").partition("// ---- the grid")
    return f"{library}\n}}  // namespace\n\n{SOURCE.read_text(encoding='utf-8')}"


def fused_parts(step: Step) -> list[Node[NormRope] | Node[NormRopeBackward]]:
    """Each norm with its rotation."""
    return list(singles(step.node))


def rotation_steps(step: Step) -> list[Step]:
    """Each rotation of the step alone, reading and writing what the fused one does."""
    found: list[Step] = []
    for single in fused_parts(step):
        rope, ins, outs = single.attrs.rope, single.inputs, single.outputs
        ports = {p: ins[p] for p in (*ANGLE_PORTS[rope.angles], *POSITION_PORTS) if p in ins}
        if isinstance(rope, RopeBackward):
            # Where no dX is wanted, its layout does not matter.
            dx = outs.get("dX", ins["input"])
            node = Node[Op](single.name, rope, {"dY": ins["dY"], **ports}, {"dX": dx})
        else:
            written = {"output": outs["output"]}
            node = Node[Op](single.name, rope, {"input": ins["input"], **ports}, written)
        found.append(replace(step, node=node))
    return found


def why_not_norm(step: Step) -> tuple[str, ...]:
    """Every rule, beyond those of the rotation, that the step breaks."""
    broken: list[str] = []
    for single in fused_parts(step):
        own = replace(step, node=single)
        attrs, x = single.attrs, own.value("input")
        is_backward = isinstance(attrs, NormRopeBackward)
        if attrs.norm.compute is DType.DOUBLE:
            broken.append("computes in fp32, fp64 is asked for")
        if x.dtype not in _SERVED:
            broken.append(f"input is {short(x.dtype)}, not fp16, bf16 or fp32")
        if own.value("scale").dtype not in _SERVED:
            broken.append(f"scale is {short(own.value('scale').dtype)}, not fp16, bf16 or fp32")
        for port in ("inv_variance", "Dscale"):
            if own.has(port):
                wanted = DType.FLOAT if port == "inv_variance" else own.value("scale").dtype
                if own.value(port).dtype is not wanted:
                    broken.append(f"{port} is {short(own.value(port).dtype)}, not {short(wanted)}")
        if x.dim[3] > MAX_WIDTH:
            broken.append(f"input {list(x.dim)} has rows of more than {MAX_WIDTH} channels")
        if x.ragged_offset is not None:
            broken.append("input lies at ragged offsets")
        if attrs.rope.head_groups:
            broken.append("heads in two levels")
        if attrs.rope.numerics != "fp32":
            broken.append(f"numerics={attrs.rope.numerics!r} rounds between norm and rotation")
        if is_backward and is_over_heads(own.value("scale").dim):
            broken.append("the gradient of a norm over all heads of a token has no kernel")
        if x.dim[0] * x.dim[2] >= 2**31:
            broken.append(f"input {list(x.dim)} has 2^31 tokens or more")
        broken += [f"{p} is passed by value" for p in single.inputs if own.value(p).is_host]
    if not broken and len(kinds := {_common(job) for job in norm_jobs(step)}) > 1:
        broken.append(f"the pair differs in types or in what is normalised: {sorted(kinds)}")
    return tuple(broken)


def _common(job: NormJob) -> tuple[str, ...]:
    """What is compiled into a kernel beside the kind of rotation."""
    dtypes = [short(job.scale_dtype), *([] if job.x is None else [short(job.x.dtype)])]
    return (*dtypes, f"norm_first={job.norm_first}", f"over all heads={job.is_whole}")


def norm_jobs(step: Step) -> tuple[NormJob, ...]:
    """The one or two jobs of a step that the engine takes."""
    pairs = zip(fused_parts(step), rotation_steps(step), strict=True)
    return tuple(_job(replace(step, node=single), rope) for single, rope in pairs)


def _job(step: Step, rotation: Step) -> NormJob:
    attrs = step.node.attrs
    assert isinstance(attrs, (NormRope, NormRopeBackward))
    is_backward = isinstance(attrs, NormRopeBackward)
    (rope,) = jobs_of(rotation)
    scale = side_of(step, "scale")
    inverse = side_of(step, "inv_variance").stride if step.has("inv_variance") else (0, 0, 0, 0)
    return NormJob(
        rope=rope,
        is_backward=is_backward,
        norm_first=attrs.norm_first,
        is_whole=is_over_heads(step.value("scale").dim),
        y_slot=step.slot("dX" if is_backward else "output"),
        x=side_of(step, "input") if is_backward else None,
        scale=scale.slot,
        scale_dtype=scale.dtype,
        scale_stride=(scale.stride[1], scale.stride[3]),
        inverse=step.slot("inv_variance"),
        inverse_stride=inverse[:3],
        dscale=step.slot("Dscale"),
        dscale_stride=step.value("Dscale").stride[3] if step.has("Dscale") else 0,
        epsilon=attrs.norm.epsilon if isinstance(attrs, NormRope) else 0.0,
        zero_centered=attrs.norm.zero_centered,
    )


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
    """An even share of the heads for each warp, in whole units; all of them if they are one row."""
    rope = job.rope
    turn = Split(lanes, log_tokens, LANES // (lanes << log_tokens))
    units = max(1, -(-rope.dim[1] // turn.heads))
    most = BACKWARD_UNITS if job.is_backward else UNITS
    most *= max(1, UNIT_BYTES // (vec * rope.x.dtype.itemsize))
    part_heads = -(-units // -(-units // most)) * turn.heads
    if job.is_whole:
        part_heads = max(rope.dim[1], 1)
    tiles = -(-rope.dim[2] >> turn.log_tokens)
    return Cut(turn, turn, part_heads, max(1, -(-rope.dim[1] // part_heads)), tiles)


def norm_variant(jobs: Sequence[NormJob], shape: NormShape) -> NormVariant:
    """The variant for jobs of one kind."""
    job, single = jobs[0], norm_shape(jobs, 1)
    return NormVariant(
        kind=job.rope.kind,
        is_backward=job.is_backward,
        norm_first=job.norm_first,
        is_whole=job.is_whole,
        x=job.rope.kind.read if job.x is None else job.x.dtype,
        scale=job.scale_dtype,
        vec=shape.base.vec,
        turns=shape.turns,
        passes=shape.passes,
        any_turns=single.turns,
        any_passes=single.passes,
        angles=shape.base.angles,
        warps=shape.base.warps,
    )
