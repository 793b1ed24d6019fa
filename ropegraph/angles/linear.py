"""Position interpolation: every frequency divided by one factor."""

from __future__ import annotations

import torch

from ropegraph.angles.checks import Device, as_dtype, as_number, as_rotated
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles


def linear(
    *,
    head_dim: int,
    factor: float,
    rope_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """The default frequencies divided by ``factor``, which stretches the context by it.

    Returns inv_freq [r/2] in ``dtype`` (f32 or f64), radians per position; attention_factor 1.
    Raises GraphError if factor or rope_theta is not positive.  Source: arXiv:2306.15595, eq. 4.
    """
    rotated = as_rotated("linear", head_dim, partial_rotary_factor)
    theta = as_number("linear", "rope_theta", rope_theta)
    stretch = as_number("linear", "factor", factor)
    dtype = as_dtype("linear", dtype)
    inv_freq = 1.0 / positions_per_radian(theta, rotated, device=device, dtype=dtype)
    return RopeAngles(inv_freq / stretch)
