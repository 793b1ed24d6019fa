"""Llama 3's scaling: long waves are interpolated, short ones stay, a smooth blend between."""

from __future__ import annotations

import math

import torch

from ropegraph.angles.checks import Device, as_count, as_dtype, as_number, as_rotated
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles
from ropegraph.errors import GraphError


def llama3(
    *,
    head_dim: int,
    rope_theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
    partial_rotary_factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """Default frequencies, divided by factor where fewer than low_freq_factor waves fit into
    original_max_position_embeddings, as they are where more than high_freq_factor fit.

    Between the two the number of waves blends linearly.
    Returns inv_freq [r/2] in ``dtype`` (f32 or f64), radians per position; attention_factor 1.
    Raises GraphError if a parameter is not positive or high_freq_factor is not above
    low_freq_factor.  Source: transformers, ``llama3``.
    """
    rotated = as_rotated("llama3", head_dim, partial_rotary_factor)
    theta = as_number("llama3", "rope_theta", rope_theta)
    stretch = as_number("llama3", "factor", factor)
    low = as_number("llama3", "low_freq_factor", low_freq_factor)
    high = as_number("llama3", "high_freq_factor", high_freq_factor)
    if high <= low:
        raise GraphError(
            f"llama3: high_freq_factor={high:g} is not above low_freq_factor={low:g}; "
            "use, for example, 4 and 1"
        )
    name = "original_max_position_embeddings"
    original = as_count("llama3", name, original_max_position_embeddings)
    dtype = as_dtype("llama3", dtype)
    inv_freq = 1.0 / positions_per_radian(theta, rotated, device=device, dtype=dtype)
    waves = original / (2.0 * math.pi / inv_freq)
    keep = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return RopeAngles((1.0 - keep) * inv_freq / stretch + keep * inv_freq)
