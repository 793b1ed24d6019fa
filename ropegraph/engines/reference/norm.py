"""rmsnorm and its gradients in fp64.

With r = sqrt(mean(x^2) + epsilon), n = x / r and g = dy w:

    y = n w          dx = (g - n mean(g n)) / r          dw = sum of dy n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropegraph.engines.reference.buffers import gather, scatter
from ropegraph.ir.norm import is_over_heads
from ropegraph.ir.ops import Norm, RmsNorm, RmsNormBackward
from ropegraph.lowering.engine import Step


@dataclass(frozen=True)
class RunNorm:
    """Y and inv_variance."""

    step: Step
    attrs: RmsNorm

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        x = gather(self.step, "input", env).double()
        if not x.numel():
            return
        mean = x.square().mean(_axes(self.step), keepdim=True)
        inverse = (mean + self.attrs.epsilon) ** -0.5
        if self.step.has("Y"):
            scatter(self.step, "Y", env, x * inverse * _weight(self.step, self.attrs, env))
        if self.step.has("inv_variance"):
            scatter(self.step, "inv_variance", env, inverse)


@dataclass(frozen=True)
class RunNormBackward:
    """DX and Dscale."""

    step: Step
    attrs: RmsNormBackward

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        step, axes = self.step, _axes(self.step)
        x, grad, inverse = (
            gather(step, port, env).double() for port in ("input", "grad", "inv_variance")
        )
        # Where nothing comes back for a row nothing is asked of x: padding may hold NaN.
        is_silent = (grad == 0).all(3, keepdim=True)
        is_silent = is_silent.all(1, keepdim=True) if 1 in axes else is_silent
        x, inverse = x.masked_fill(is_silent, 0), inverse.masked_fill(is_silent, 0)
        n, g = x * inverse, grad * _weight(step, self.attrs, env)
        if step.has("DX") and x.numel():
            scatter(step, "DX", env, inverse * (g - n * (g * n).mean(axes, keepdim=True)))
        if step.has("Dscale"):
            shared = tuple(axis for axis in range(3) if axis not in axes)
            scatter(step, "Dscale", env, (grad * n).sum(shared, keepdim=True))


def _axes(step: Step) -> tuple[int, ...]:
    return (1, 3) if is_over_heads(step.value("scale").dim) else (3,)


def _weight(step: Step, attrs: Norm, env: Sequence[Tensor]) -> Tensor:
    scale = gather(step, "scale", env).double()
    return scale + 1 if attrs.zero_centered else scale
