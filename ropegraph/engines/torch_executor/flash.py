"""torch's fused attention for CPUs, used only where it is exactly the same thing.

It knows one scale, no mask or the top-left causal one, d_qk == d_v, k and v with the heads of q,
and rows whose channels are adjacent.  Outside of that it reads out of bounds, returns NaN or wrong
numbers, or stops the process (a zero size): it checks almost nothing itself.
f16 and bf16 are widened first: it would round the weights, and in the backward every partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isnan

import torch

from ropegraph.engines.torch_executor.band import NEG_INF, Band
from ropegraph.engines.torch_executor.problem import Shape
from ropegraph.ir.graph import Value
from ropegraph.lowering.engine import Step

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Scale = float | torch.Tensor


@dataclass(frozen=True)
class Flash:
    """The kernel with its settings.  Its methods answer False where they wrote nothing.

    They decline tensors that are not on the CPU, scales that it gets wrong, and results with a NaN
    where a struck-out slot may have leaked it.
    rough: the ports whose tensors it cannot read as they are.  groups: h_k where that is not h_q.
    """

    causal: bool
    dtype: torch.dtype
    rough: frozenset[str]
    groups: int | None

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
        if not q.is_cpu or not _takes(scale, self.causal, self.dtype):
            return False
        if self.rough:
            q, k, v = (self._smooth(p, x) for p, x in (("q", q), ("k", k), ("v", v)))
        if self.groups is not None:
            q, k, v = _grouped(q, self.groups), _shared(k, q), _shared(v, q)
        out, lse = _forward(q, k, v, 0.0, self.causal, scale=scale)
        if self.causal and isnan(out.amax().item()):
            return False
        _store(out, o)
        if stats is not None:
            _store(lse.unsqueeze(-1), stats)
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
        if not q.is_cpu or not _takes(scale, self.causal, self.dtype):
            return False
        # A row that sees nothing: the kernel would take exp(x + inf).
        if stats.amin().item() == NEG_INF:
            return False
        if self.rough:
            q, k, v = (self._smooth(p, x) for p, x in (("q", q), ("k", k), ("v", v)))
            o, d_o, stats = self._smooth("o", o), d_o.to(self.dtype), stats.to(self.dtype)
        if self.groups is not None:
            h_k = self.groups
            k, v = _shared(k, q), _shared(v, q)
            q, o, d_o, stats = (_grouped(x, h_k) for x in (q, o, d_o, stats))
        found = _backward(d_o, q, k, v, o, stats.squeeze(-1), 0.0, self.causal, scale=scale)
        # dQ tells for all three: a NaN in k or v reaches it through the struck-out slots of its
        # block, and one in q, o, d_o or stats through its own row.
        if self.causal and isnan(found[0].amax().item()):
            return False
        if d_q is not None:
            _store(found[0], d_q)
        for made, grad in ((found[1], d_k), (found[2], d_v)):
            if grad is not None:
                # Each q head has made a gradient of its own for the head of k or v it shares.
                grad.copy_(made if self.groups is None else made.sum(1).view(grad.shape))
        return True

    def _smooth(self, port: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).contiguous() if port in self.rough else x


def flash_for(
    shape: Shape, d_qk: int, d_v: int, band: Band, dtype: torch.dtype, rough: frozenset[str]
) -> Flash | None:
    """torch's kernel for a problem of these sizes and nothing but this band; None if it cannot."""
    sizes = (shape.b, shape.h_q, shape.h_k, shape.s_q, shape.s_kv, d_qk)
    if 0 in sizes or shape.h_k != shape.h_v or d_qk != d_v:
        return None
    if not band.is_open and band != Band(None, 0):
        return None
    groups = None if shape.h_k == shape.h_q else shape.h_k
    return Flash(not band.is_open, dtype, rough, groups)


def rough_ports(step: Step, dtype: torch.dtype) -> frozenset[str]:
    """The ports that need a copy first: of another dtype, or rows that BLAS cannot step along."""
    ports = [port for port in ("q", "k", "v", "o") if step.has(port)]
    return frozenset(port for port in ports if not _is_smooth(step.value(port), dtype))


def _is_smooth(value: Value, dtype: torch.dtype) -> bool:
    _, _, s, d = value.dim
    adjacent = d <= 1 or value.stride[3] == 1
    # The row stride goes to BLAS as it is: 0 or overlapping rows would not do.
    apart = s <= 1 or value.stride[2] >= d
    return adjacent and apart and value.dtype.torch_name == str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def _takes(scale: Scale, causal: bool, dtype: torch.dtype) -> bool:
    """False where the kernel would multiply the -inf of a struck-out slot by 0 or less."""
    if isinstance(scale, torch.Tensor):
        return False
    # The kernel holds the scale in the compute dtype: 1e-50 is 0 there.
    smallest = torch.finfo(dtype).tiny
    return smallest < abs(scale) < float("inf") and (scale > 0 or not causal)


def _grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[b, h, s, d] as [b * heads, h / heads, s, d]: the q heads that share one head of k."""
    return x.reshape(x.shape[0] * heads, x.shape[1] // heads, x.shape[2], x.shape[3])


def _shared(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """k or v to match ``_grouped(q)``: each head repeated over its group by a stride of 0."""
    each = x.reshape(x.shape[0] * x.shape[1], 1, x.shape[2], x.shape[3])
    return each.expand(-1, q.shape[1] // x.shape[1], -1, -1)


def _store(made: torch.Tensor, out: torch.Tensor) -> None:
    """Copy [b, h, s, d], or what ``_grouped`` made of it, into [b, h, s, d]."""
    if made.shape != out.shape:
        b, _, s, d = out.shape
        grouped = (b, made.shape[0] // b, made.shape[1], s, d)
        made, out = made.view(grouped), out.view(grouped)
    out.copy_(made)
