"""2-D axial rope of vision towers: half of the pairs turn by the row, half by the column."""

from __future__ import annotations

import torch

from ropegraph.angles.checks import Device, as_dtype, as_number, as_rotated
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles
from ropegraph.errors import GraphError


def axial(
    *,
    head_dim: int,
    rope_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """``rope_theta ** (-2i / (r/2))`` for r/4 pairs that turn by the height, then again for r/4
    that turn by the width; r = int(head_dim * partial_rotary_factor).

    transformers keeps one copy, [r/4], and joins the two parts later; here inv_freq has r/2 entries
    like that of every other type, and positions have two rows, height and width.
    Returns inv_freq [r/2] in ``dtype`` (f32 or f64), radians per position; attention_factor 1.
    Raises GraphError if r is no multiple of 4.  Source: transformers, ``axial`` (Qwen2-VL's tower).
    """
    rotated = as_rotated("axial", head_dim, partial_rotary_factor)
    if rotated % 4:
        raise GraphError(
            f"axial: head_dim={head_dim} rotates {rotated} channels; height and width need pairs "
            "each, so use a multiple of 4"
        )
    theta = as_number("axial", "rope_theta", rope_theta)
    dtype = as_dtype("axial", dtype)
    one = 1.0 / positions_per_radian(theta, rotated // 2, device=device, dtype=dtype)
    by_height = torch.zeros(rotated // 4, dtype=torch.int64, device=one.device)
    axes = torch.cat((by_height, torch.ones_like(by_height)))
    return RopeAngles(torch.cat((one, one)), axes=axes, axis_count=2)
