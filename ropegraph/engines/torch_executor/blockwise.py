"""Attention forward by row blocks: every feature, any device, no s_q x s_kv matrix in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ropegraph.engines.torch_executor.band import NEG_INF
from ropegraph.engines.torch_executor.dropout import Dropout
from ropegraph.engines.torch_executor.logits import LN_2, LOG2_E, Logits
from ropegraph.engines.torch_executor.masked import is_finite, seen_matmul
from ropegraph.engines.torch_executor.problem import Shape, Tile, by_head, groups, tile_elems, tiles


@dataclass(frozen=True)
class Forward:
    """The tensors of one problem, [b, h, s, d] each, and how its logits are made.

    stats: [b, h_q, s_q, 1] or None.  sink: [h_q] in the compute dtype, or None.
    """

    shape: Shape
    compute: torch.dtype
    logits: Logits
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    stats: torch.Tensor | None
    sink: torch.Tensor | None = None
    dropout: Dropout | None = None


def forward(job: Forward) -> None:
    """Fill job.o and job.stats."""
    careful = not is_finite(job.k, job.v)
    for group in groups(job.shape, job.logits.band, tile_elems(job.q.device)):
        k = job.k[group.heads(job.k, job.shape)].to(job.compute).flatten(0, 1)
        v = job.v[group.heads(job.v, job.shape)].to(job.compute).flatten(0, 1)
        for tile in tiles(group, job.shape, job.logits.band):
            _forward_tile(job, tile, k, v, careful)


def _forward_tile(
    job: Forward, tile: Tile, k: torch.Tensor, v: torch.Tensor, careful: bool
) -> None:
    o = job.o[tile.index]
    stats = None if job.stats is None else job.stats[tile.index]
    sink = None if job.sink is None else job.sink[tile.h, None, None] * LOG2_E
    if tile.col0 == tile.col1:
        o.zero_()
        if stats is not None:
            stats.copy_(sink * LN_2) if sink is not None else stats.fill_(NEG_INF)
        return
    batches = tile.shape[0]
    q = by_head(job.q[tile.index].to(job.compute), k.shape[0] // batches)
    scores = job.logits.of_tile(q, k[:, tile.columns], tile, careful)
    seen = scores != NEG_INF if careful else None
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    # A row that sees nothing has top -inf, and -inf - -inf would be NaN.
    top.masked_fill_(top == NEG_INF, 0)
    weights = scores.sub_(top).exp2_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total.add_((sink - top).exp2_())
    if stats is not None:
        stats.copy_(total.log2().add_(top).mul_(LN_2))
    total.masked_fill_(total == 0, 1)
    if job.dropout is not None:
        weights.masked_fill_(job.dropout.dropped(tile, weights.device), 0)
        weights.mul_(job.dropout.factor)
    weights = by_head(weights, v.shape[0] // batches)
    if seen is None:
        out = torch.bmm(weights, v[:, tile.columns])
    else:
        out = seen_matmul(weights, v[:, tile.columns], seen.view(weights.shape))
    o.copy_(out.view(*tile.shape[:3], -1).div_(total))
