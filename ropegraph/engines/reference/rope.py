"""The rotation in fp64, its adjoint, and the gradient of its angles.

With columns a and b of the table for the two lanes that a pair writes, and g = output_scale * A:

    y1 = g (x1 cos t[a] - x2 sin t[a])          dx1 = g (dy1 cos t[a] + dy2 sin t[b])
    y2 = g (x2 cos t[b] + x1 sin t[b])          dx2 = g (dy2 cos t[b] - dy1 sin t[a])

a = b except for table_layout="full", where the adjoint reads the sine of the partner's column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropegraph.engines.reference.buffers import gather, round_once, scatter
from ropegraph.ir.ops import Rope, RopeBackward, RopeFreqsGrad, Rotation
from ropegraph.lowering.engine import Step


def why_not_rope(attrs: Rotation) -> tuple[str, ...]:
    """The rotations whose meaning is not written here."""
    broken: list[str] = []
    if attrs.angles != "freqs":
        broken.append(f"angles come from {attrs.angles}; the reference reads freqs")
    if attrs.numerics != "fp32":
        broken.append(f"numerics={attrs.numerics!r} is about bits; the reference is fp64")
    if attrs.cp_size != 1:
        broken.append(f"cp_size={attrs.cp_size}; the reference holds whole sequences")
    return tuple(broken)


@dataclass(frozen=True)
class RunRope:
    """One rotation, its adjoint or the gradient of its angles, on bound tensors."""

    step: Step
    attrs: Rope | RopeBackward | RopeFreqsGrad

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        step, attrs = self.step, self.attrs
        table = env[step.slot("freqs")].detach().double()
        match attrs:
            case Rope():
                self._turn(rotate, "input", "output", table, env)
            case RopeBackward():
                self._turn(rotate_adjoint, "dY", "dX", table, env)
            case RopeFreqsGrad():
                x, dy = (gather(step, port, env).double() for port in ("input", "dY"))
                scatter(step, "dfreqs", env, freqs_gradient(attrs, x, dy, table))

    def _turn(
        self,
        by: Callable[[Rotation, Tensor, Tensor], Tensor],
        source: str,
        target: str,
        table: Tensor,
        env: Sequence[Tensor],
    ) -> None:
        given = gather(self.step, source, env)
        turned = by(self.attrs, given.double(), table)
        result = round_once(turned, env[self.step.slot(target)].dtype)
        if self.attrs.output_scale == 1.0:
            # Taking a NaN to fp64 and back may change its bits: pass-through channels are copied.
            passed = _pass_through(self.attrs, given.shape[-1])
            result[..., passed] = given[..., passed].to(result.dtype)
        scatter(self.step, target, env, result)


def rotate(attrs: Rotation, x: Tensor, table: Tensor) -> Tensor:
    """output_scale * R x for x [b, h, s, d] and table [s_max, 1 or b, 1, width], both fp64."""
    (x1, x2), (y1, y2) = _lanes(attrs, attrs.interleaved), _lanes(attrs, attrs.interleaved_output)
    (cos1, sin1), (cos2, sin2) = _cos_sin(attrs, x.shape[2], table)
    y = attrs.output_scale * x
    y[..., y1] = attrs.output_scale * (x[..., x1] * cos1 - x[..., x2] * sin1)
    y[..., y2] = attrs.output_scale * (x[..., x2] * cos2 + x[..., x1] * sin2)
    return y


def rotate_adjoint(attrs: Rotation, dy: Tensor, table: Tensor) -> Tensor:
    """The transpose of ``rotate`` as a linear map."""
    (x1, x2), (y1, y2) = _lanes(attrs, attrs.interleaved), _lanes(attrs, attrs.interleaved_output)
    (cos1, sin1), (cos2, sin2) = _cos_sin(attrs, dy.shape[2], table)
    dx = attrs.output_scale * dy
    dx[..., x1] = attrs.output_scale * (dy[..., y1] * cos1 + dy[..., y2] * sin2)
    dx[..., x2] = attrs.output_scale * (dy[..., y2] * cos2 - dy[..., y1] * sin1)
    return dx


def freqs_gradient(attrs: Rotation, x: Tensor, dy: Tensor, table: Tensor) -> Tensor:
    """By autograd through ``rotate``: columns and rows that it does not read get zero."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        angles = table.clone().requires_grad_()
        y = rotate(attrs, x.clone(), angles)
        return torch.autograd.grad(y, angles, dy.clone(), materialize_grads=True)[0]


def _lanes(attrs: Rotation, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The channels that hold the first and the second element of every pair."""
    half = attrs.rope_dim // 2
    pair = torch.arange(half)
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
    return attrs.rope_offset + first, attrs.rope_offset + second


def _pass_through(attrs: Rotation, d: int) -> Tensor:
    """The channels outside the rotated segment."""
    channel = torch.arange(d)
    return channel[(channel < attrs.rope_offset) | (channel >= attrs.rope_offset + attrs.rope_dim)]


def _cos_sin(
    attrs: Rotation, s: int, table: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A cos and A sin, [1 or b, 1, s, r/2], for the first and the second lane that pairs write."""
    angles = table[:s].permute(1, 2, 0, 3)
    if attrs.inverse:
        angles = -angles
    first, second = (angles[..., columns] for columns in _columns(attrs))
    a = attrs.attention_factor
    return (a * first.cos(), a * first.sin()), (a * second.cos(), a * second.sin())


def _columns(attrs: Rotation) -> tuple[Tensor, Tensor]:
    """The table columns that the first and the second lane of every pair read."""
    pair = torch.arange(attrs.rope_dim // 2)
    if attrs.half_width or attrs.table_layout == "first_half":
        return pair, pair
    if attrs.table_layout == "pairs":
        return 2 * pair, 2 * pair
    first, second = _lanes(attrs, attrs.interleaved_output)
    return first - attrs.rope_offset, second - attrs.rope_offset
