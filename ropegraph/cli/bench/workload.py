"""What the GPU's rows work on: the heads of a common model, its angles and tables."""

from __future__ import annotations

import torch
from torch import Tensor

H_Q, H_KV, D = 32, 8, 128
SPLIT = (H_Q, H_KV, H_KV)
BF16 = torch.bfloat16


def angles(s: int) -> Tensor:
    """[s, 1, 1, D] fp32 angles of the usual base, both halves filled."""
    rows = torch.arange(s, device="cuda", dtype=torch.float32)
    inv_freq = 10_000.0 ** (-torch.arange(0, D, 2, device="cuda", dtype=torch.float32) / D)
    return torch.outer(rows, inv_freq).repeat(1, 2)[:, None, None, :].contiguous()


def tables(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of angles [s, 1, 1, D] as peers take them, [s, D] bf16."""
    table = freqs[:, 0, 0]
    return table.cos().to(BF16), table.sin().to(BF16)
