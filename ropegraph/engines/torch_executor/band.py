"""The diagonal band: which keys a row may see, and which slots of a tile to strike out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ropegraph.ir.ops import Attention

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Band:
    """Row i sees column j when low <= j - i <= high; None leaves that side open."""

    low: int | None = None
    high: int | None = None

    @property
    def is_open(self) -> bool:
        return self.low is None and self.high is None

    def columns(self, row0: int, row1: int, s_kv: int) -> tuple[int, int]:
        """The smallest [col0, col1) that holds every key which rows [row0, row1) see."""
        col0 = 0 if self.low is None else min(max(0, row0 + self.low), s_kv)
        col1 = s_kv if self.high is None else min(max(0, row1 + self.high), s_kv)
        return col0, max(col0, col1)

    def rows(self, s_q: int, s_kv: int) -> tuple[int, int]:
        """The [row0, row1) outside of which no row sees any key."""
        row0 = 0 if self.high is None else min(max(0, -self.high), s_q)
        row1 = s_q if self.low is None else min(max(0, s_kv - self.low), s_q)
        return row0, max(row0, row1)

    def hide(self, scores: torch.Tensor, row0: int, col0: int, value: float = NEG_INF) -> None:
        """Write ``value`` over what the band hides of scores[..., rows from row0, cols from col0].

        Only the columns that the diagonal edge crosses are touched.
        """
        n_rows, n_cols = scores.shape[-2:]
        if self.high is not None:
            first = max(0, row0 + self.high + 1 - col0)
            if first < n_cols:
                offset = row0 + self.high + 1 - col0 - first
                mask = _upper(n_rows, n_cols - first, offset, scores.device)
                scores[..., first:].masked_fill_(mask, value)
        if self.low is not None:
            end = min(n_cols, row0 + n_rows - 1 + self.low - col0)
            if end > 0:
                mask = _lower(n_rows, end, row0 + self.low - 1 - col0, scores.device)
                scores[..., :end].masked_fill_(mask, value)


def band_of(attrs: Attention, s_q: int, s_kv: int) -> Band:
    """The band of one sequence of these lengths; bottom_right puts the corner at their ends."""
    shift = s_kv - s_q if attrs.bottom_right else 0
    low = None if attrs.left_bound is None else shift - attrs.left_bound + 1
    high = None if attrs.right_bound is None else shift + attrs.right_bound
    # A side that hides nothing is open: the fast paths ask for exactly that.
    if low is not None and low <= 1 - s_q:
        low = None
    if high is not None and high >= s_kv - 1:
        high = None
    return Band(low, high)


# Tiles of one call repeat a handful of masks, and so do calls: keep the last few.
@lru_cache(maxsize=32)
def _upper(rows: int, cols: int, diagonal: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, cols, dtype=torch.bool, device=device).triu(diagonal)


@lru_cache(maxsize=32)
def _lower(rows: int, cols: int, diagonal: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, cols, dtype=torch.bool, device=device).tril(diagonal)
