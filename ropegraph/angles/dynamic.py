"""Dynamic NTK scaling: a larger rope_theta for sequences longer than the model was trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.angles.checks import Device, as_count, as_dtype, as_length, as_number, as_rotated
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles
from ropegraph.errors import GraphError


def dynamic(
    *,
    head_dim: int,
    factor: float,
    max_position_embeddings: int,
    seq_len: int | Tensor | None = None,
    rope_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """The default frequencies of ``rope_theta * (1 + factor * (L / L_max - 1)) ** (r / (r - 2))``.

    L is seq_len, but at least L_max = max_position_embeddings, which is also what None means: up to
    there these are the default frequencies. Nothing is remembered from call to call, so a short
    sequence after a long one has the short values again.

    seq_len: an integer, or an integer tensor of one element, such as ``position_ids.max() + 1``;
    a tensor is never read on the host, and inv_freq is made on its device.
    Returns inv_freq [r/2] in ``dtype`` (f32 or f64), radians per position; attention_factor 1.
    Raises GraphError if r < 4 or a parameter is not positive.  Source: transformers, ``dynamic``.
    """
    rotated = as_rotated("dynamic", head_dim, partial_rotary_factor)
    if rotated < 4:
        raise GraphError(
            f"dynamic: head_dim={head_dim} rotates {rotated} channels, and the exponent "
            "r / (r - 2) needs 4 or more"
        )
    theta = as_number("dynamic", "rope_theta", rope_theta)
    stretch = as_number("dynamic", "factor", factor)
    l_max = as_count("dynamic", "max_position_embeddings", max_position_embeddings)
    dtype = as_dtype("dynamic", dtype)
    length, device = as_length("dynamic", l_max if seq_len is None else seq_len, device)
    made = stretched(length, rotated, theta, stretch, l_max, device=device, dtype=dtype)
    return RopeAngles(made)


def stretched(
    length: int | Tensor,
    rotated: int,
    theta: float,
    stretch: float,
    l_max: int,
    *,
    device: Device,
    dtype: torch.dtype,
) -> Tensor:
    """[r/2]: what ``dynamic`` gives, from values that were checked."""
    if isinstance(length, Tensor):
        # fp64, as Python's floats are: either kind of seq_len gives the same base.
        growth = (length.to(torch.float64) / l_max).clamp(min=1.0)
    else:
        growth = max(length / l_max, 1.0)
    base = theta * (1.0 + stretch * (growth - 1.0)) ** (rotated / (rotated - 2))
    return 1.0 / positions_per_radian(base, rotated, device=device, dtype=dtype)
