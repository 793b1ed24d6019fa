"""Arithmetic that is rounded where, and only where, it is meant to be."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over ``dtype`` are computed in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x y, rounded once to ``dtype``: in fp32 the product of two bf16 numbers is exact."""
    return (x.to(wide(dtype)) * y.to(wide(dtype))).to(dtype)


def fma(x: Tensor, y: Tensor, z: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x y + z, rounded once to ``dtype``, on any device and for any shape.

    For inputs of fp32 and narrower, whose products fp64 holds exactly; in fp64 the product is
    rounded as well. The fp64 sum is rounded to odd, so that the second rounding, to ``dtype``,
    knows on which side of a tie the sum lies.
    """
    exact, z = x.double() * y.double(), z.double()
    total = exact + z
    if dtype == torch.float64:
        return total
    # Knuth's two-sum: rest is what ``total`` lacks, exactly.
    part = total - exact
    rest = (exact - (total - part)) + (z - part)
    single = _to_odd(total, rest, torch.int64)
    if dtype == torch.float32:
        return single.float()
    # torch goes from fp64 to bf16 through fp32, which is one rounding more.
    near = single.float()
    return _to_odd(near, (single - near.double()).float(), torch.int32).to(dtype)


def _to_odd(near: Tensor, rest: Tensor, integer: torch.dtype) -> Tensor:
    """near + rest, where near is that sum rounded to nearest: the neighbour whose last bit is set.

    integer: of the width of near.
    """
    bits = near.view(integer)
    is_outward = (rest > 0) == (near > 0)
    odd = torch.where(is_outward, bits + 1, bits - 1).view(near.dtype)
    # A NaN is neither; the rest of what overflowed means nothing.
    is_inexact = ((rest > 0) | (rest < 0)) & near.isfinite()
    return torch.where(is_inexact & (bits % 2 == 0), odd, near)
