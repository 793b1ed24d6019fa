"""torch's fused attention for CPUs, used only where it is exactly the same thing.

It knows one scale, no mask or the top-left causal one, d_qk == d_v, k and v with the heads of q,
and rows whose channels are adjacent.  Outside of that it reads out of bounds, returns NaN or wrong
numbers, or stops the process (a zero size): it checks almost nothing itself.
f16 and bf16 are widened first: it would round the weights, and in the backward every partial sum.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ropegraph.engines.torch_executor.band import Band
from ropegraph.engines.torch_executor.masked import is_finite
from ropegraph.engines.torch_executor.problem import Shape

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def fits(shape: Shape) -> bool:
    """True if torch's kernel can serve these sizes: it divides by some of them."""
    sizes = (shape.b, shape.h_q, shape.h_k, shape.h_v, shape.s_q, shape.s_kv)
    return 0 not in sizes and shape.h_k == shape.h_v


def is_causal(band: Band) -> bool | None:
    """The flag that gives this band; None if neither does."""
    if band.is_open:
        return False
    return True if band == Band(None, 0) else None


@lru_cache(maxsize=64)
def takes_scale(scale: float, causal: bool, dtype: torch.dtype) -> bool:
    """False where the kernel would multiply the -inf of a struck-out slot by 0 or less."""
    # The kernel holds the scale in the compute dtype: 1e-50 is 0 there.
    smallest = torch.finfo(dtype).tiny
    return smallest < abs(scale) < float("inf") and (scale > 0 or not causal)


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor | None,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
) -> bool:
    """Fill o and stats; False if a struck-out slot may have leaked NaN or Inf into them."""
    heads = k.shape[1]
    out, lse = _forward(
        _rows(q, heads, dtype), _shared(k, q, dtype), _shared(v, q, dtype), 0.0, causal, scale=scale
    )
    if causal and not is_finite(out):
        return False
    if heads == q.shape[1]:
        o.copy_(out)
        if stats is not None:
            stats.copy_(lse.unsqueeze(-1))
    else:
        batches = (q.shape[0], heads)
        o.unflatten(1, (heads, -1)).copy_(out.unflatten(0, batches))
        if stats is not None:
            stats.unflatten(1, (heads, -1)).copy_(lse.unsqueeze(-1).unflatten(0, batches))
    return True


def flash_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    stats: torch.Tensor,
    grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    scale: float,
    causal: bool,
    dtype: torch.dtype,
) -> bool:
    """Fill grads (dQ, dK, dV); False if NaN or Inf, or a row that sees nothing, was met."""
    heads = k.shape[1]
    lse = stats.to(dtype)
    if heads != q.shape[1]:
        lse = lse.reshape(q.shape[0] * heads, -1, lse.shape[2], 1)
    found = _backward(
        _rows(d_o, heads, dtype),
        _rows(q, heads, dtype),
        _shared(k, q, dtype),
        _shared(v, q, dtype),
        _rows(o, heads, dtype),
        lse.squeeze(-1),
        0.0,
        causal,
        scale=scale,
    )
    if not is_finite(*found):
        return False
    for port, (grad, made) in enumerate(zip(grads, found, strict=True)):
        if grad is None:
            continue
        if heads != q.shape[1]:
            made = made.unflatten(0, (q.shape[0], heads))
            grad = grad.unflatten(1, (heads, -1))
            if port > 0:
                made = made.sum(2, keepdim=True)
        grad.copy_(made)
    return True


def _rows(x: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[b, h, s, d] as [b * heads, h / heads, s, d] in ``dtype``, fit for a matrix product."""
    x = x.to(dtype)
    # The row stride goes to BLAS as it is: 0 or overlapping rows would not do.
    if x.stride(3) != 1 or x.stride(2) < x.shape[3]:
        x = x.contiguous()
    if heads == x.shape[1]:
        return x
    return x.reshape(x.shape[0] * heads, -1, x.shape[2], x.shape[3])


def _shared(x: torch.Tensor, q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """k or v as ``_rows`` gives q, each head repeated over its group by a stride of 0."""
    heads = x.shape[1]
    x = _rows(x, heads, dtype)
    if heads == q.shape[1]:
        return x
    x = x.reshape(-1, 1, x.shape[2], x.shape[3])
    return x.expand(-1, q.shape[1] // heads, -1, -1)
