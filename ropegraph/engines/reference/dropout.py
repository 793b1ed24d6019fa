"""Which attention weights dropout keeps: the generator of the torch executor, counted plainly.

The one thing the two engines share is ``philox`` itself, for the mask is part of the meaning:
weight (b, h, i, j) draws word j % 4 of the block counted (j // 4, i, b * h_q + h, low offset) under
the key (low seed, high seed xor high offset), and is kept where word >= p * 2^32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.dropout import philox

WORD = 2**32


def drop_factors(p: float, seed: int, offset: int, dim: tuple[int, int, int, int]) -> Tensor:
    """What each weight [b, h_q, s_q, s_kv] is multiplied by: 0, or 1 / (1 - p) if it is kept."""
    b, h_q, s_q, s_kv = dim
    rows = torch.arange(b * h_q * s_q)
    counter = (
        torch.arange(-(-s_kv // 4)).reshape(1, -1),
        (rows % s_q if s_q else rows).reshape(-1, 1),
        (rows // s_q if s_q else rows).reshape(-1, 1),
        torch.tensor(offset % WORD),
    )
    key = (seed % WORD, (seed // WORD % WORD) ^ (offset // WORD % WORD))
    words = torch.stack(philox(counter, key), dim=2).flatten(1)[:, :s_kv].reshape(dim)
    return (words >= round(p * WORD)).double() / (1.0 - p)
