"""Which keys a query sees, and ALiBi's slopes: index arithmetic on whole matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropegraph.ir.ops import Attention


def kept(
    attrs: Attention, len_q: Sequence[int], len_kv: Sequence[int], s_q: int, s_kv: int
) -> Tensor:
    """True where query i may see key j: [b, 1, s_q, s_kv], from the lengths and the band."""
    rows, keys = (torch.tensor(n, dtype=torch.int64).reshape(-1, 1, 1, 1) for n in (len_q, len_kv))
    i = torch.arange(s_q).reshape(1, 1, -1, 1)
    j = torch.arange(s_kv).reshape(1, 1, 1, -1)
    keep = (i < rows) & (j < keys)
    diagonal = i + keys - rows if attrs.bottom_right else i
    if attrs.right_bound is not None:
        keep = keep & (j <= diagonal + attrs.right_bound)
    if attrs.left_bound is not None:
        keep = keep & (j > diagonal - attrs.left_bound)
    return keep


def alibi(h_q: int, s_q: int, s_kv: int) -> Tensor:
    """slope_h * (j - i): [1, h_q, s_q, s_kv] in fp64."""
    slopes = torch.tensor(alibi_slopes(h_q), dtype=torch.float64).reshape(1, -1, 1, 1)
    distance = torch.arange(s_kv).reshape(1, -1) - torch.arange(s_q).reshape(-1, 1)
    return slopes * distance


def alibi_slopes(h_q: int) -> list[float]:
    """2^(-8i/n) for i = 1..n, n the largest power of two up to h_q, then 2^(-4(2i-1)/n)."""
    if h_q == 0:
        return []
    n = 1 << (h_q.bit_length() - 1)
    return [2.0 ** (-8 * i / n) for i in range(1, n + 1)] + [
        2.0 ** (-4 * (2 * i - 1) / n) for i in range(1, h_q - n + 1)
    ]
