"""The default rope type: frequencies in a geometric series."""

from __future__ import annotations

import torch

from ropegraph.angles.checks import Device, as_dtype, as_number, as_rotated
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles


def default(
    *,
    head_dim: int,
    rope_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """``rope_theta ** (-2i / r)`` for pair i, r = int(head_dim * partial_rotary_factor).

    The exponents run over the rotated width r, not over the head: a partial rotation is a full one
    of a narrower head (``proportional`` is the other convention).
    Returns inv_freq [r/2] in ``dtype`` (f32 or f64), radians per position; attention_factor 1.
    Raises GraphError if r is odd or rope_theta is not positive.  Source: arXiv:2104.09864, 3.2.2.
    """
    rotated = as_rotated("default", head_dim, partial_rotary_factor)
    theta = as_number("default", "rope_theta", rope_theta)
    dtype = as_dtype("default", dtype)
    return RopeAngles(1.0 / positions_per_radian(theta, rotated, device=device, dtype=dtype))
