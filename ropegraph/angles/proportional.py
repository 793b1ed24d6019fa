"""Proportional rope: exponents over the whole head, the slow pairs not turned at all."""

from __future__ import annotations

import torch

from ropegraph.angles.checks import Device, as_dtype, as_factor, as_number, as_rotated
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles
from ropegraph.errors import GraphError


def proportional(
    *,
    head_dim: int,
    rope_theta: float,
    partial_rotary_factor: float = 1.0,
    factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """``rope_theta ** (-2i / head_dim) / factor`` for the first int(partial_rotary_factor *
    head_dim // 2) pairs, 0 for the others.

    The rotation is head_dim wide, partners are head_dim/2 apart, and a pair of frequency 0 stays
    as it is. The other types make a partial rotation of a narrower width instead.
    Returns inv_freq [head_dim/2] in ``dtype`` (f32 or f64), radians per position;
    attention_factor 1.
    Raises GraphError if head_dim is odd or partial_rotary_factor is not within [0, 1].
    Source: transformers, ``proportional``.
    """
    channels = as_rotated("proportional", head_dim, 1.0)
    part = as_factor("proportional", "partial_rotary_factor", partial_rotary_factor)
    if part > 1.0:
        raise GraphError(f"proportional: partial_rotary_factor={part:g}; use one up to 1")
    theta = as_number("proportional", "rope_theta", rope_theta)
    stretch = as_number("proportional", "factor", factor)
    dtype = as_dtype("proportional", dtype)
    turned = int(part * channels // 2)
    scale = positions_per_radian(theta, 2 * turned, over=channels, device=device, dtype=dtype)
    inv_freq = torch.nn.functional.pad(1.0 / scale, (0, channels // 2 - turned))
    return RopeAngles(inv_freq / stretch)
