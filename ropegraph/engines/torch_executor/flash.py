"""torch's fused attention for CPUs, used only where it is exactly the same thing.

It knows one scale, no mask or the top-left causal one, d_qk == d_v, k and v with the heads of q,
and rows whose channels are adjacent.  Outside of that it reads out of bounds, returns NaN or wrong
numbers, or stops the process (a zero size): it checks almost nothing itself.
f16 and bf16 are widened first: it would round the weights, and in the backward every partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ropegraph.engines.torch_executor.band import Band
from ropegraph.engines.torch_executor.masked import is_finite
from ropegraph.engines.torch_executor.problem import Shape

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Scale = float | torch.Tensor


def flash_for(shape: Shape, d_qk: int, d_v: int, band: Band, dtype: torch.dtype) -> Flash | None:
    """torch's kernel for a problem of these sizes and nothing but this band; None if it cannot."""
    sizes = (shape.b, shape.h_q, shape.h_k, shape.s_q, shape.s_kv, d_qk)
    if 0 in sizes or shape.h_k != shape.h_v or d_qk != d_v:
        return None
    if band.is_open:
        return Flash(causal=False, dtype=dtype)
    return Flash(causal=True, dtype=dtype) if band == Band(None, 0) else None


@dataclass(frozen=True)
class Flash:
    """The kernel with its two settings.  Its methods answer False where they wrote nothing.

    They decline tensors that are not on the CPU, scales that it gets wrong, and results that hold
    a NaN or an Inf: a struck-out slot may have leaked it.
    """

    causal: bool
    dtype: torch.dtype

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        stats: torch.Tensor | None,
        scale: Scale,
    ) -> bool:
        """Fill o and stats."""
        if not q.is_cpu or isinstance(scale, torch.Tensor):
            return False
        if not _takes(scale, self.causal, self.dtype):
            return False
        heads, dtype = k.shape[1], self.dtype
        out, lse = _forward(
            _rows(q, heads, dtype),
            _shared(k, q, dtype),
            _shared(v, q, dtype),
            0.0,
            self.causal,
            scale=scale,
        )
        if self.causal and not is_finite(out):
            return False
        _store(out, o, heads)
        if stats is not None:
            _store(lse.unsqueeze(-1), stats, heads)
        return True

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        d_o: torch.Tensor,
        stats: torch.Tensor,
        scale: Scale,
        d_q: torch.Tensor | None,
        d_k: torch.Tensor | None,
        d_v: torch.Tensor | None,
    ) -> bool:
        """Fill d_q, d_k and d_v."""
        if not q.is_cpu or isinstance(scale, torch.Tensor):
            return False
        if not _takes(scale, self.causal, self.dtype):
            return False
        heads, dtype = k.shape[1], self.dtype
        found = _backward(
            _rows(d_o, heads, dtype),
            _rows(q, heads, dtype),
            _shared(k, q, dtype),
            _shared(v, q, dtype),
            _rows(o, heads, dtype),
            _rows(stats, heads, dtype).squeeze(-1),
            0.0,
            self.causal,
            scale=scale,
        )
        # Stats of -inf, rows that see nothing, end here too: exp(x + inf) is Inf.
        if not is_finite(*found):
            return False
        if d_q is not None:
            _store(found[0], d_q, heads)
        for made, grad in ((found[1], d_k), (found[2], d_v)):
            if grad is not None:
                grad.copy_(_sum_groups(made, q, heads))
        return True


@lru_cache(maxsize=64)
def _takes(scale: float, causal: bool, dtype: torch.dtype) -> bool:
    """False where the kernel would multiply the -inf of a struck-out slot by 0 or less."""
    # The kernel holds the scale in the compute dtype: 1e-50 is 0 there.
    smallest = torch.finfo(dtype).tiny
    return smallest < abs(scale) < float("inf") and (scale > 0 or not causal)


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


def _store(made: torch.Tensor, out: torch.Tensor, heads: int) -> None:
    """Copy [b * heads, h / heads, s, d] (or [b, h, s, d]) into [b, h, s, d]."""
    if heads != out.shape[1]:
        b, h, s, d = out.shape
        grouped = (b, heads, h // heads, s, d)
        made, out = made.view(grouped), out.view(grouped)
    out.copy_(made)


def _sum_groups(made: torch.Tensor, q: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of one head of k or v from those of the q heads that share it."""
    if heads == q.shape[1]:
        return made
    return made.sum(1).view(q.shape[0], heads, made.shape[2], made.shape[3])
