"""rmsnorm, its backward, and both fused with a rotation, in torch: nothing is read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropegraph.dtypes import torch_dtype, wider
from ropegraph.engines.torch_executor.rope import RopeStep
from ropegraph.ir.graph import singles
from ropegraph.ir.norm import is_over_heads, unfused
from ropegraph.ir.ops import Norm, RmsNorm, RmsNormBackward, Rope, RopeBackward
from ropegraph.lowering.engine import Executable, Step

# Where epsilon is this small, rows that small are scaled up before they are squared.
_SMALL_EPSILON = 1e-25


def normalised(x: Tensor, over: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms and 1 / rms over some axes, in the type of x: no square overflows.

    Rows are multiplied by a power of two, which rounds nothing, so that their largest element is
    near 1 where it is larger (and where it is smaller, if epsilon would not hide that).
    """
    largest = x.abs().amax(over, keepdim=True)
    low = 0 if epsilon > _SMALL_EPSILON else -60
    exponent = torch.frexp(largest.nan_to_num(1.0, 1.0)).exponent.clamp(min=low)
    shrink = torch.ldexp(torch.ones_like(largest), -exponent)
    small = x * shrink
    inverse = torch.rsqrt(small.square().mean(over, keepdim=True) + epsilon * shrink * shrink)
    return small * inverse, inverse * shrink


class _NormStep:
    """What both directions share."""

    def __init__(self, step: Step, attrs: Norm) -> None:
        self.step, self.centre = step, float(attrs.zero_centered)
        self.x, self.scale = step.slot("input"), step.slot("scale")
        self.over = (1, 3) if is_over_heads(step.value("scale").dim) else (3,)
        self.dtype = torch_dtype(wider(attrs.compute))

    def weight(self, env: Sequence[Tensor]) -> Tensor:
        scale = env[self.scale].to(self.dtype)
        return scale + self.centre if self.centre else scale


class RmsNormStep(_NormStep):
    """Y, and inv_variance where it is wanted."""

    def __init__(self, step: Step, attrs: RmsNorm) -> None:
        super().__init__(step, attrs)
        self.epsilon = attrs.epsilon
        self.y, self.inverse = step.slot("Y"), step.slot("inv_variance")

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        x = env[self.x].to(self.dtype)
        if not x.numel():
            return
        n, inverse = normalised(x, self.over, self.epsilon)
        if self.y >= 0:
            env[self.y].copy_(n * self.weight(env))
        if self.inverse >= 0:
            env[self.inverse].copy_(inverse)


class RmsNormBackwardStep(_NormStep):
    """DX and Dscale, whichever is wanted.

    Where nothing comes back for a row nothing is asked of x: padding may hold NaN.
    """

    def __init__(self, step: Step, attrs: RmsNormBackward) -> None:
        super().__init__(step, attrs)
        self.grad, self.inverse = step.slot("grad"), step.slot("inv_variance")
        self.dx, self.dscale = step.slot("DX"), step.slot("Dscale")
        self.shared = tuple(axis for axis in range(3) if axis not in self.over)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        x, grad = env[self.x].to(self.dtype), env[self.grad].to(self.dtype)
        if not x.numel():
            if self.dscale >= 0:
                env[self.dscale].zero_()
            return
        is_silent = (grad == 0).all(3, keepdim=True)
        if 1 in self.over:
            is_silent = is_silent.all(1, keepdim=True)
        inverse = env[self.inverse].to(self.dtype).masked_fill(is_silent, 0)
        n = (x * inverse).masked_fill(is_silent, 0)
        if self.dx >= 0:
            g = grad * self.weight(env)
            mean = (g * n).mean(self.over, keepdim=True)
            env[self.dx].copy_(inverse * (g - n * mean))
        if self.dscale >= 0:
            env[self.dscale].copy_((grad * n).sum(self.shared, keepdim=True))


class Chain:
    """The parts of fused nodes, one after another, with unrounded values between.

    Every position is looked at first, so that a wrong one leaves nothing half written.
    """

    def __init__(self, step: Step) -> None:
        self.parts: list[Any] = []
        self.between: list[tuple[tuple[int, ...], torch.dtype]] = []
        # Behind the values comes the scratch memory, and behind that what lies between.
        self.first = slot = len(step.slots) + 1
        for single in singles(step.node):
            attrs = single.attrs
            dtype = wider(attrs.norm.compute, attrs.rope.compute)
            nodes, middle = unfused(single, step.values, dtype)
            slots = {v.name: slot + i for i, v in enumerate(middle)}
            slot += len(middle)
            self.between += ((v.dim, torch_dtype(dtype)) for v in middle)
            values = {**step.values, **{v.name: v for v in middle}}
            for node in nodes:
                part = replace(step, node=node, values=values, slots={**step.slots, **slots})
                self.parts.append(_compiled(part))

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        device = env[0].device
        own = list(env)
        own += [own[0]] * (self.first - len(own))
        own += (torch.empty(dim, dtype=dtype, device=device) for dim, dtype in self.between)
        places = [p.place(own) if isinstance(p, RopeStep) else None for p in self.parts]
        for part, place in zip(self.parts, places, strict=True):
            if place is None:
                part(own, stream)
            else:
                part.run(own, part.tables(own, place.rows), place)

    def faults(self) -> tuple[str, ...]:
        """What the rotations noticed of positions; waits for the device."""
        found = (t for p in self.parts if isinstance(p, RopeStep) for t in p.faults())
        return tuple(dict.fromkeys(found))


def _compiled(step: Step) -> Executable:
    match step.node.attrs:
        case RmsNorm() as attrs:
            return RmsNormStep(step, attrs)
        case RmsNormBackward() as attrs:
            return RmsNormBackwardStep(step, attrs)
        case Rope() | RopeBackward() as attrs:
            return RopeStep(step, attrs)
        case other:
            raise TypeError(f"{other} is no norm")


def compile_norm(step: Step) -> Executable:
    """The executable of a norm, or of one fused with a rotation."""
    return _compiled(step) if isinstance(step.node.attrs, Norm) else Chain(step)
