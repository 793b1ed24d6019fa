"""A step for norm_rope.cu, as plain numbers: each rotation and the norm beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.job import Job, Side, jobs_of, side_of
from ropegraph.ir.graph import Node, singles
from ropegraph.ir.norm import is_over_heads
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    POSITION_PORTS,
    NormRope,
    NormRopeBackward,
    Op,
    RopeBackward,
)
from ropegraph.lowering.engine import Step

# Below this epsilon, squares of tiny rows are made again, scaled up.
_SMALL_EPSILON, _SMALL_MEAN = 1e-25, 1e-20


@dataclass(frozen=True)
class NormJob:
    """A rotation and the norm beside it.  Slots are -1 where there is no such tensor.

    x: what the backward reads beside dY.  scale_stride, dscale_stride: from head to head and from
    channel to channel.  inverse_stride: along b, h and s.  is_whole: all heads of a token are one
    row.
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
    dscale_stride: tuple[int, int]
    epsilon: float
    zero_centered: bool

    @property
    def sides(self) -> tuple[Side, ...]:
        """The tensors that rows are read from and written to."""
        own = (self.rope.x, self.rope.y)
        return own if self.x is None else (*own, self.x)

    @property
    def size(self) -> int:
        """Numbers whose squares are added up; a row of sums of the gradient of the weight."""
        _, h, _, d = self.rope.dim
        return h * d if self.is_whole else d

    @property
    def small(self) -> float:
        """A mean of squares below which they are made again."""
        return _SMALL_MEAN if self.epsilon <= _SMALL_EPSILON else 0.0


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
    dscale = step.value("Dscale").stride if step.has("Dscale") else (0, 0, 0, 0)
    is_whole = is_over_heads(step.value("scale").dim)
    return NormJob(
        rope=rope,
        is_backward=is_backward,
        norm_first=attrs.norm_first,
        is_whole=is_whole,
        y_slot=step.slot("dX" if is_backward else "output"),
        x=side_of(step, "input") if is_backward else None,
        scale=scale.slot,
        scale_dtype=scale.dtype,
        scale_stride=(scale.stride[1], scale.stride[3]),
        inverse=step.slot("inv_variance"),
        inverse_stride=(inverse[0], 0 if is_whole else inverse[1], inverse[2]),
        dscale=step.slot("Dscale"),
        dscale_stride=(dscale[1], dscale[3]),
        epsilon=attrs.norm.epsilon if isinstance(attrs, NormRope) else 0.0,
        zero_centered=attrs.norm.zero_centered,
    )
