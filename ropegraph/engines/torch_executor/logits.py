"""The logits of one tile, in the order of the contract, in units of ln 2.

scale * q.k, score_mod, + bias, + ALiBi, diagonal band.  Padding is not here: a problem holds only
the keys that are real.  In units of ln 2 a weight is exp2(logit), which takes torch on a CPU a
quarter of the time of exp, and a twentieth where weights underflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import e, floor, log, log2

import torch

from ropegraph.engines.torch_executor.band import NEG_INF, Band
from ropegraph.engines.torch_executor.problem import Tile
from ropegraph.engines.torch_executor.score_program import ScoreMod

LOG2_E = log2(e)
LN_2 = log(2.0)

Pull = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Logits:
    """What turns q and k into logits, for one problem.

    scale: times ln 2 already where the graph's softmax input is log2.
    bias: expanded to [b, h_q, s_q, s_kv], any dtype.  slopes: of ALiBi, one a q head.
    """

    scale: float | torch.Tensor
    band: Band
    score_mod: ScoreMod | None = None
    bias: torch.Tensor | None = None
    slopes: tuple[float, ...] = ()

    def of_tile(self, q: torch.Tensor, k: torch.Tensor, tile: Tile, careful: bool) -> torch.Tensor:
        """log2 of the weights before they are normalized, in the tile's shape; struck out is -inf.

        q: [n, rows, d]; k: [n, columns, d].
        careful: q, k or more may hold NaN or Inf, which no struck-out slot may pass on.
        """
        if self.score_mod is None:
            scores = products(q, k, self.scale * LOG2_E, tile)
        else:
            scores = self.score_mod.apply(products(q, k, self.scale, tile), tile).mul_(LOG2_E)
        return self._finish(scores, tile, careful)

    def with_pullback(
        self, q: torch.Tensor, k: torch.Tensor, tile: Tile, careful: bool
    ) -> tuple[torch.Tensor, Pull | None]:
        """As ``of_tile``, and the map from a gradient of natural logits to one of scale * q.k."""
        if self.score_mod is None:
            return self.of_tile(q, k, tile, careful), None
        scores, pull = self.score_mod.apply_with_pullback(products(q, k, self.scale, tile), tile)
        return self._finish(scores.mul_(LOG2_E), tile, careful), pull

    def _finish(self, scores: torch.Tensor, tile: Tile, careful: bool) -> torch.Tensor:
        if self.bias is not None:
            bias = self.bias[tile.b, tile.h, tile.rows, tile.columns]
            scores.add_(bias, alpha=LOG2_E)
            if careful:  # NaN + -inf is NaN
                scores.masked_fill_(bias == NEG_INF, NEG_INF)
        if self.slopes:
            # Positions below 2^24 are exact in fp32.
            column = torch.arange(tile.col0, tile.col1, dtype=scores.dtype, device=scores.device)
            row = torch.arange(tile.row0, tile.row1, dtype=scores.dtype, device=scores.device)
            distance = column - row.unsqueeze(1)
            for head, slope in enumerate(self.slopes[tile.h]):
                scores[:, head].add_(distance, alpha=slope * LOG2_E)
        self.band.hide(scores, tile.row0, tile.col0)
        return scores


def products(
    rows: torch.Tensor, keys: torch.Tensor, scale: float | torch.Tensor, tile: Tile
) -> torch.Tensor:
    """scale * rows keys^T in the tile's shape.  rows: [n, i, d]; keys: [n, j, d]."""
    out = rows.new_empty(rows.shape[0], rows.shape[1], keys.shape[1])
    return scaled_bmm(rows, keys.transpose(1, 2), scale, out).view(tile.shape)


def scaled_bmm(
    a: torch.Tensor, b: torch.Tensor, scale: float | torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """scale * (a @ b) into ``out``; the scale stays on its device if it is a tensor."""
    if isinstance(scale, torch.Tensor):
        return torch.bmm(a, b, out=out).mul_(scale)
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


@lru_cache(maxsize=16)
def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope a head: 2^(-8i/n) for i = 1..n, n = 2^floor(log2 heads), then 2^(-4(2i-1)/n)."""
    if heads == 0:
        return ()
    n = 2 ** floor(log2(heads))
    first = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    rest = [2.0 ** (-4.0 * (2 * i - 1) / n) for i in range(1, heads - n + 1)]
    return tuple(first + rest)
