"""The logits of one tile, in the order of the contract.

scale * q.k, score_mod, + bias, + ALiBi, diagonal band.  Padding is not here: a problem holds only
the keys that are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, log2

import torch

from ropegraph.engines.torch_executor.band import NEG_INF, Band
from ropegraph.engines.torch_executor.problem import Tile, by_head
from ropegraph.engines.torch_executor.score_program import ScoreMod

Pull = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Logits:
    """What turns q and k into logits, for one problem.

    scale: times ln 2 already where the graph's softmax input is log2.
    bias: expanded to [b, h_q, s_q, s_kv], any dtype.  slopes: [h_q], in the compute dtype.
    """

    scale: float | torch.Tensor
    band: Band
    score_mod: ScoreMod | None = None
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None

    def of_tile(self, q: torch.Tensor, k: torch.Tensor, tile: Tile, careful: bool) -> torch.Tensor:
        """Logits of the tile's shape.  q: [n, rows, d]; k: [n, columns, d]; struck out is -inf.

        careful: q, k or more may hold NaN or Inf, which no struck-out slot may pass on.
        """
        scores = self._products(q, k, tile)
        if self.score_mod is not None:
            scores = self.score_mod.apply(scores, tile)
        return self._finish(scores, tile, careful)

    def with_pullback(
        self, q: torch.Tensor, k: torch.Tensor, tile: Tile, careful: bool
    ) -> tuple[torch.Tensor, Pull | None]:
        """As ``of_tile``, and the map from a gradient of the logits to one of scale * q.k."""
        scores = self._products(q, k, tile)
        pull = None
        if self.score_mod is not None:
            scores, pull = self.score_mod.apply_with_pullback(scores, tile)
        return self._finish(scores, tile, careful), pull

    def _products(self, q: torch.Tensor, k: torch.Tensor, tile: Tile) -> torch.Tensor:
        scores = q.new_empty(tile.shape)
        products = by_head(scores, k.shape[0] // tile.shape[0])
        scaled_bmm(q, k.transpose(1, 2), self.scale, out=products)
        return scores

    def _finish(self, scores: torch.Tensor, tile: Tile, careful: bool) -> torch.Tensor:
        if self.bias is not None:
            bias = self.bias[tile.b, tile.h, tile.rows, tile.columns]
            scores.add_(bias)
            if careful:  # NaN + -inf is NaN
                scores.masked_fill_(bias == NEG_INF, NEG_INF)
        if self.slopes is not None:
            column = torch.arange(tile.col0, tile.col1, device=scores.device)
            row = torch.arange(tile.row0, tile.row1, device=scores.device)
            distance = (column - row.unsqueeze(1)).to(scores.dtype)
            scores.addcmul_(self.slopes[tile.h, None, None], distance)
        self.band.hide(scores, tile.row0, tile.col0)
        return scores


def scaled_bmm(
    a: torch.Tensor, b: torch.Tensor, scale: float | torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """scale * (a @ b) into ``out``; the scale stays on its device if it is a tensor."""
    if isinstance(scale, torch.Tensor):
        return torch.bmm(a, b, out=out).mul_(scale)
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """One slope a head: 2^(-8i/n) for i = 1..n, n = 2^floor(log2 heads), then 2^(-4(2i-1)/n)."""
    if heads == 0:
        return ()
    n = 2 ** floor(log2(heads))
    first = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    rest = [2.0 ** (-4.0 * (2 * i - 1) / n) for i in range(1, heads - n + 1)]
    return tuple(first + rest)
