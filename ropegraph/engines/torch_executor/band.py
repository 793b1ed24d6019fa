"""The diagonal band: which keys a row may see, and which slots of a tile to strike out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

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

    def hide(self, scores: torch.Tensor, row0: int, col0: int) -> None:
        """Write -inf over what the band hides of scores[..., rows from row0, columns from col0].

        Only the columns that an edge of the band crosses are touched.
        """
        n_rows, n_cols = scores.shape[-2:]
        mask = _cached_triangle if scores.is_cpu else _triangle
        if self.high is not None:
            first = max(0, row0 + self.high + 1 - col0)
            if first < n_cols:
                diagonal = row0 + self.high + 1 - col0 - first
                above = mask(n_rows, n_cols - first, diagonal, "above", scores.device)
                scores[..., first:].masked_fill_(above, NEG_INF)
        if self.low is not None:
            end = min(n_cols, row0 + n_rows - 1 + self.low - col0)
            if end > 0:
                below = mask(n_rows, end, row0 + self.low - 1 - col0, "below", scores.device)
                scores[..., :end].masked_fill_(below, NEG_INF)


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


def _triangle(
    rows: int, cols: int, diagonal: int, side: Literal["above", "below"], device: torch.device
) -> torch.Tensor:
    """True on the diagonal column - row = diagonal and on one side of it."""
    ones = torch.ones(rows, cols, dtype=torch.bool, device=device)
    return ones.triu(diagonal) if side == "above" else ones.tril(diagonal)


# The tiles of a call repeat a handful of masks, and so do calls.  Not on a GPU, where a mask made
# on one stream could be read on another before it is written.
_cached_triangle = lru_cache(maxsize=8)(_triangle)
