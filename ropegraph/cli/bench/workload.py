"""What the GPU's rows work on: the heads of a common model, its angles and tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

H_Q, H_KV, D = 32, 8, 128
SPLIT = (H_Q, H_KV, H_KV)
BF16 = torch.bfloat16


def heads(
    dim: Sequence[int], order: str = "bshd", device: str = "cuda", dtype: torch.dtype = BF16
) -> Tensor:
    """Random [b, h, s, d] in memory of this order."""
    sizes = dict(zip("bhsd", dim, strict=True))
    made = torch.randn([sizes[axis] for axis in order], device=device, dtype=dtype)
    return made.permute([order.index(axis) for axis in "bhsd"])


def strides(dim: Sequence[int], order: str = "bshd") -> tuple[int, ...]:
    """Those of heads() of this order."""
    return heads(dim, order, "meta").stride()


def separate_heads(b: int, s: int, device: str = "cuda") -> dict[str, Tensor]:
    """q, k and v as [b, h, s, d] views, each of a tensor [b, s, h, d] of its own."""
    return {n: heads((b, h, s, D), device=device) for n, h in zip("qkv", SPLIT, strict=True)}


def packed_views(b: int, s: int, device: str = "cuda") -> dict[str, Tensor]:
    """The same as views of one tensor [b, s, h_q + 2 h_kv, d]."""
    qkv = heads((b, sum(SPLIT), s, D), device=device)
    return dict(zip("qkv", torch.split(qkv, list(SPLIT), dim=1), strict=True))


def angles(s: int, device: str = "cuda") -> Tensor:
    """[s, 1, 1, D] fp32 angles of the usual base, both halves filled."""
    rows = torch.arange(s, device=device, dtype=torch.float32)
    inv_freq = 10_000.0 ** (-torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    return torch.outer(rows, inv_freq).repeat(1, 2)[:, None, None, :].contiguous()


def half_angles(s: int, device: str = "cuda") -> Tensor:
    """The half of them that is read, [s, 1, 1, D / 2]."""
    return angles(s, device)[..., : D // 2].contiguous()


def tables(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of angles [s, 1, 1, D] as peers take them, [s, D] bf16."""
    table = freqs[:, 0, 0]
    return table.cos().to(BF16), table.sin().to(BF16)
