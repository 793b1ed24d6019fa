"""Matrix products in which a struck-out slot contributes nothing, even NaN or Inf.

A weight of 0 does not silence a NaN: 0 * NaN is NaN.  Where all operands are finite the plain
product is right, and that is what runs; the rest is for inputs that hold a NaN or an Inf somewhere.
"""

from __future__ import annotations

from math import isfinite

import torch

from ropegraph.engines.torch_executor.exact import wide

INF = float("inf")


def is_finite(*tensors: torch.Tensor) -> bool:
    """True if no element is NaN or Inf.  A false alarm is possible: a sum may overflow."""
    # One read-only pass without a temporary; a NaN or an Inf always survives a sum.
    return all(isfinite(x.sum(dtype=wide(x.dtype)).item()) for x in tensors)


def seen_matmul(weights: torch.Tensor, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """sum over the seen j of weights[:, i, j] * x[:, j, c], as IEEE adds those terms.

    weights, seen: [n, rows, columns], seen is boolean; x: [n, columns, c].
    """
    bad = ~x.isfinite()
    out = torch.bmm(weights.masked_fill(~seen, 0), x.masked_fill(bad, 0))
    columns = bad.any(-1).any(0).nonzero().squeeze(-1)
    if columns.numel() == 0:
        return out
    # An Inf or NaN outweighs every finite term, so counting the terms of each kind is enough.
    x, w, s = x[:, columns], weights[:, :, columns], seen[:, :, columns]
    up, down, zero, any_weight = (
        part.to(x.dtype) for part in (s & (w > 0), s & (w < 0), s & (w == 0), s)
    )
    plus, minus, nan = (part.to(x.dtype) for part in (x == INF, x == -INF, x.isnan()))
    rises = torch.bmm(up, plus) + torch.bmm(down, minus) > 0
    falls = torch.bmm(up, minus) + torch.bmm(down, plus) > 0
    undefined = torch.bmm(any_weight, nan) + torch.bmm(zero, plus + minus) > 0
    out.masked_fill_(rises, INF).masked_fill_(falls, -INF)
    return out.masked_fill_(undefined | (rises & falls), float("nan"))
