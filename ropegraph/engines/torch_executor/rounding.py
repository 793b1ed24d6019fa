"""The rotations whose every rounding is promised: those of NeMo's kernel and of Hugging Face.

Each takes the two channels of pairs and (cos1, sin1, cos2, sin2) for

    o1 = x1 cos1 - x2 sin1,  o2 = x2 cos2 + x1 sin2

and gives both in the dtype of x. What negates a sine (inverse, the adjoint) moves no rounding.
"""

from __future__ import annotations

from torch import Tensor

from ropegraph.engines.torch_executor.exact import fma

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
