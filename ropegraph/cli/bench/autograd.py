"""Training steps through autograd, by ropegraph.functional: time and memory on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import device_us, host_us
from ropegraph.functional import attention, qkv_attention

H_Q, H_KV, D = 32, 8, 128
SPLIT = (H_Q, H_KV, H_KV)
Step = Callable[[], object]


def rows(angles: Callable[[int], Tensor]) -> list[Row]:
    """Steps from separate heads and from packed QKV.  angles: a table for so many positions."""
    found: list[Row] = []
    for b, s, target in ((1, 512, 150.0), (1, 2048, 430.0), (2, 8192, 7550.0)):
        freqs, size = angles(s), f"b{b} s{s}"
        for name, step in _steps(b, s, freqs).items():
            us = host_us(lambda _, step=step: _waited(step)) if s < 8192 else device_us(step)
            work = f"training step by autograd, {name}, {size}"
            found.append(Row(work, us, us, target, "us"))
            if s == 8192:
                found.append(
                    Row(f"memory of that step, {name}, {size}", us, _mib(step), None, "MiB")
                )
    return found


def _steps(b: int, s: int, freqs: Tensor) -> dict[str, Step]:
    def normal(h: int) -> Tensor:
        return torch.randn(b, s, h, D, device="cuda", dtype=torch.bfloat16)

    q, k, v = (normal(h).transpose(1, 2).requires_grad_() for h in SPLIT)
    packed = normal(sum(SPLIT)).requires_grad_()
    do = normal(H_Q).transpose(1, 2)

    def heads() -> object:
        o = attention(q, k, v, freqs, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(o, (q, k, v), do)

    def whole() -> object:
        o = qkv_attention(packed, freqs, split=SPLIT, is_causal=True)
        return torch.autograd.grad(o, packed, do)

    def again() -> object:
        o = qkv_attention(packed, freqs, split=SPLIT, is_causal=True, recompute_rope=True)
        return torch.autograd.grad(o, packed, do)

    return {"separate heads": heads, "packed": whole, "packed, rotated again": again}


def _waited(step: Step) -> None:
    step()
    torch.cuda.synchronize()


def _mib(step: Step) -> float:
    """The peak of one step over what was allocated before it."""
    _waited(step)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _waited(step)
    return (torch.cuda.max_memory_allocated() - before) / 2**20
