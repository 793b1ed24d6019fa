"""The rotations whose every rounding is promised: those of NeMo's kernel and of Hugging Face.

Each takes the two channels of pairs and (cos1, sin1, cos2, sin2) for

    o1 = x1 cos1 - x2 sin1,  o2 = x2 cos2 + x1 sin2

and gives both in the dtype of x. What negates a sine (inverse, the adjoint) moves no rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor, Tensor, Tensor]


def hugging_face(x1: Tensor, x2: Tensor, tables: Tables, factor: float) -> tuple[Tensor, Tensor]:
    """x * cos + rotate_half(x) * sin in the dtype of x, each product and the sum rounded to it.

    factor: attention_factor, multiplied onto the fp32 tables before they are cast.
    """
    cos1, sin1, cos2, sin2 = ((t if factor == 1.0 else t * factor).to(x1.dtype) for t in tables)
    return x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2


def nemo(x1: Tensor, x2: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """fma(x1, cos1, -(x2 sin1)) and fma(x1, sin2, x2 cos2) in fp32, then rounded to x's dtype."""
    dtype = x1.dtype
    x1, x2 = x1.float(), x2.float()
    cos1, sin1, cos2, sin2 = tables
    return fma(x1, cos1, -(x2 * sin1)).to(dtype), fma(x1, sin2, x2 * cos2).to(dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c for fp32 tensors, rounded once to fp32, on any device and for any shape.

    The product of two fp32 numbers is exact in fp64. The fp64 sum is rounded to odd: where it is
    inexact, the neighbour whose last bit is set is taken, so that the second rounding, to fp32,
    knows on which side of a tie the sum lies.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    # Knuth's two-sum: rest is what ``total`` lacks, exactly.
    part = total - product
    rest = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    is_even = bits % 2 == 0
    is_outward = (rest > 0) == (total > 0)
    odd = torch.where(is_outward, bits + 1, bits - 1).view(torch.float64)
    # An infinite or NaN total has a NaN rest, which is neither.
    is_inexact = (rest > 0) | (rest < 0)
    return torch.where(is_inexact & is_even, odd, total).float()
