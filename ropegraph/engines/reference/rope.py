"""The rotation in fp64, its adjoint, and the gradient of its angles.

With angles t1 and t2 of the two lanes that a pair writes, and g = output_scale * A:

    y1 = g (x1 cos t1 - x2 sin t1)          dx1 = g (dy1 cos t1 + dy2 sin t2)
    y2 = g (x2 cos t2 + x1 sin t2)          dx2 = g (dy2 cos t2 - dy1 sin t1)

t1 = t2 except for table_layout="full", where the adjoint reads the sine of its partner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropegraph.engines.reference.angles import Lanes, channels, lanes
from ropegraph.engines.reference.buffers import gather, round_once, scatter
from ropegraph.engines.reference.cache import cache_starts, write_rows
from ropegraph.engines.reference.positions import Places, outside, places, refuse
from ropegraph.errors import PositionError
from ropegraph.ir.ops import ANGLE_PORTS, Rope, RopeBackward, RopeFreqsGrad, Rotation
from ropegraph.lowering.engine import Step


def why_not_rope(attrs: Rotation) -> tuple[str, ...]:
    """The rotations whose meaning is not written here."""
    if attrs.numerics != "fp32":
        return (f"numerics={attrs.numerics!r} is about bits; the reference is fp64",)
    return ()


@dataclass(frozen=True)
class RunRope:
    """One rotation, its adjoint or the gradient of its angles, on bound tensors.

    A wrong position raises on a CPU and gives a row of NaN elsewhere, as on every engine.
    """

    step: Step
    attrs: Rope | RopeBackward | RopeFreqsGrad

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        step, attrs = self.step, self.attrs
        target = next(iter(step.node.outputs))
        starts = cache_starts(step, env) if step.has("cache") else None
        if not all(step.value(next(iter(step.node.inputs))).dim):  # nothing is rotated
            if starts is not None:
                write_rows(step, env, starts, env[step.slot("input")].detach())
            else:
                env[step.slot(target)].zero_()
            return
        may_raise = env[step.slot(target)].is_cpu
        try:
            found = places(step, attrs, env)
        except PositionError:
            if may_raise:
                raise
            env[step.slot(target)].fill_(torch.nan)
            return
        wrong = outside(step, attrs, found)
        if wrong and may_raise:
            raise refuse(step, attrs, found, wrong[0])
        ports = ANGLE_PORTS[attrs.angles]
        sources = [env[step.slot(port)].detach().double() for port in ports]
        match attrs:
            case Rope():
                result = self._turn(rotate, "input", env, lanes(attrs, sources, found))
            case RopeBackward():
                result = self._turn(rotate_adjoint, "dY", env, lanes(attrs, sources, found))
            case RopeFreqsGrad():
                x, dy = (merged(gather(step, port, env)).double() for port in ("input", "dY"))
                dead = _rows(found, x.device).expand(x.shape[:3])
                x[dead], dy[dead] = 0.0, 0.0
                x[(dy == 0).all(-1)] = 0.0  # whose gradient is nothing, whatever it holds
                scatter(step, "dfreqs", env, freqs_gradient(attrs, x, dy, sources[0], found))
                return
        result[_rows(found, result.device).expand(result.shape[:3])] = 0.0
        for i, row in wrong:
            result[i, :, row] = torch.nan
        if starts is not None:
            write_rows(step, env, starts, result)
        else:
            scatter(step, target, env, result)

    def _turn(
        self,
        by: Callable[[Rotation, Tensor, Lanes], Tensor],
        source: str,
        env: Sequence[Tensor],
        angles: Lanes,
    ) -> Tensor:
        given = merged(gather(self.step, source, env))
        turned = by(self.attrs, given.double(), angles)
        target = next(iter(self.step.node.outputs))
        result = round_once(turned, env[self.step.slot(target)].dtype)
        if self.attrs.output_scale == 1.0:
            # Taking a NaN to fp64 and back may change its bits: pass-through channels are copied.
            passed = _pass_through(self.attrs, given.shape[-1])
            result[..., passed] = given[..., passed].to(result.dtype)
        return result


def merged(x: Tensor) -> Tensor:
    """[b, h, s, d], heads in two levels as one."""
    return x.flatten(1, 2) if x.dim() == 5 else x


def rotate(attrs: Rotation, x: Tensor, angles: Lanes) -> Tensor:
    """output_scale * R x for x [b, h, s, d] in fp64."""
    x1, x2 = channels(attrs, attrs.interleaved)
    y1, y2 = channels(attrs, attrs.interleaved_output)
    (cos1, sin1), (cos2, sin2) = angles
    y = attrs.output_scale * x
    y[..., y1] = attrs.output_scale * (x[..., x1] * cos1 - x[..., x2] * sin1)
    y[..., y2] = attrs.output_scale * (x[..., x2] * cos2 + x[..., x1] * sin2)
    return y


def rotate_adjoint(attrs: Rotation, dy: Tensor, angles: Lanes) -> Tensor:
    """The transpose of ``rotate`` as a linear map."""
    x1, x2 = channels(attrs, attrs.interleaved)
    y1, y2 = channels(attrs, attrs.interleaved_output)
    (cos1, sin1), (cos2, sin2) = angles
    dx = attrs.output_scale * dy
    dx[..., x1] = attrs.output_scale * (dy[..., y1] * cos1 + dy[..., y2] * sin2)
    dx[..., x2] = attrs.output_scale * (dy[..., y2] * cos2 - dy[..., y1] * sin1)
    return dx


def freqs_gradient(attrs: Rotation, x: Tensor, dy: Tensor, table: Tensor, found: Places) -> Tensor:
    """By autograd through ``rotate``: columns and rows that it does not read get zero."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        angles = table.clone().requires_grad_()
        y = rotate(attrs, x.clone(), lanes(attrs, [angles], found))
        return torch.autograd.grad(y, angles, dy.clone(), materialize_grads=True)[0]


def _rows(found: Places, device: torch.device) -> Tensor:
    """True for the rows of no sequence, [b, 1, s]."""
    dead = torch.tensor([[p is None for p in entry] for entry in found], device=device)
    return dead.bool().reshape(len(found), 1, -1)


def _pass_through(attrs: Rotation, d: int) -> Tensor:
    """The channels outside the rotated segment."""
    channel = torch.arange(d)
    return channel[(channel < attrs.rope_offset) | (channel >= attrs.rope_offset + attrs.rope_dim)]
