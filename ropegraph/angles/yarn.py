"""YaRN: fast frequencies stay, slow ones are interpolated, and cos and sin grow a little."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ropegraph.angles.checks import (
    Device,
    as_count,
    as_dtype,
    as_factor,
    as_flag,
    as_number,
    as_rotated,
)
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles
from ropegraph.errors import GraphError


def yarn(
    *,
    head_dim: int,
    original_max_position_embeddings: int,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
    rope_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """Default frequencies for pairs that turn more than beta_fast times in the original context,
    divided by factor for those that turn less than beta_slow times, a linear blend between.

    factor: None is max_position_embeddings / original_max_position_embeddings.
    beta_fast, beta_slow: turns; None is 32 and 1. truncate: the blend starts and ends at whole
    pairs.
    Returns inv_freq [r/2] in ``dtype`` (f32 or f64), radians per position, and attention_factor: as
    given, else m(mscale) / m(mscale_all_dim) if both are given and not 0, else m(1), where
    m(x) = 0.1 x ln(factor) + 1, and 1 for a factor up to 1. It is apart from inv_freq because it
    belongs to the rotated channels alone: give it to rope's ``attention_factor=``, never to
    ``output_scale=`` where r < D.
    Raises GraphError if a parameter is not positive, rope_theta is not above 1, or the blend would
    end before it starts.  Source: arXiv:2309.00071, 3.2 and 3.4.
    """
    rotated = as_rotated("yarn", head_dim, partial_rotary_factor)
    theta = as_number("yarn", "rope_theta", rope_theta, above=1.0)
    name = "original_max_position_embeddings"
    original = as_count("yarn", name, original_max_position_embeddings)
    stretch = stretch_of("yarn", factor, max_position_embeddings, original)
    dtype = as_dtype("yarn", dtype)
    fast = as_number("yarn", "beta_fast", 32.0 if beta_fast is None else beta_fast)
    slow = as_number("yarn", "beta_slow", 1.0 if beta_slow is None else beta_slow)
    whole = as_flag("yarn", "truncate", truncate)

    def pair_turning(times: float) -> float:
        """The pair, as a fraction, that turns so many times in the original context."""
        return rotated * math.log(original / (2.0 * math.pi * times)) / (2.0 * math.log(theta))

    if fast < slow:
        raise GraphError(f"yarn: beta_fast={fast:g} is less than beta_slow={slow:g}; swap them")
    low, high = pair_turning(fast), pair_turning(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low > high:
        raise GraphError(
            f"yarn: {name}={original} with rope_theta={theta:g} puts the blend from pair {low:g} "
            f"to {high:g} of {rotated // 2}; it must end where it starts or later"
        )
    scale = positions_per_radian(theta, rotated, device=device, dtype=dtype)
    keep = 1.0 - _ramp(low, high, scale)
    inv_freq = (1.0 / (stretch * scale)) * (1.0 - keep) + (1.0 / scale) * keep
    return RopeAngles(inv_freq, _attention(stretch, attention_factor, mscale, mscale_all_dim))


def stretch_of(
    where: str, factor: float | None, max_position_embeddings: int | None, original: int
) -> float:
    """How many times longer the context is: factor, or the ratio of the two lengths."""
    if factor is not None:
        return as_number(where, "factor", factor)
    if max_position_embeddings is None:
        raise GraphError(
            f"{where}: neither factor nor max_position_embeddings is given; give one, for their "
            "ratio to original_max_position_embeddings is what stretches"
        )
    return as_count(where, "max_position_embeddings", max_position_embeddings) / original


def _ramp(low: float, high: float, like: Tensor) -> Tensor:
    """[r/2]: 0 up to pair ``low``, 1 from pair ``high``, linear between; a step if they agree."""
    pairs = torch.arange(like.shape[0], dtype=like.dtype, device=like.device)
    return ((pairs - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)


def _attention(
    stretch: float,
    attention_factor: float | None,
    mscale: float | None,
    mscale_all_dim: float | None,
) -> float:
    if attention_factor is not None:
        return as_factor("yarn", "attention_factor", attention_factor)

    def m(weight: float) -> float:
        return 0.1 * weight * math.log(stretch) + 1.0 if stretch > 1.0 else 1.0

    own = as_factor("yarn", "mscale", mscale or 0.0)
    all_dim = as_factor("yarn", "mscale_all_dim", mscale_all_dim or 0.0)
    return m(own) / m(all_dim) if own and all_dim else m(1.0)
