"""Attention backward by row blocks, from o and the natural log-sum-exp of the forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ropegraph.engines.torch_executor.band import NEG_INF
from ropegraph.engines.torch_executor.dropout import Dropout
from ropegraph.engines.torch_executor.logits import LOG2_E, Logits, products, scaled_bmm
from ropegraph.engines.torch_executor.masked import INF, is_finite, seen_matmul
from ropegraph.engines.torch_executor.problem import (
    Group,
    Shape,
    Tile,
    by_head,
    groups,
    tile_elems,
    tiles,
)


@dataclass(frozen=True)
class Backward:
    """The tensors of one problem, [b, h, s, d] each, and how its logits are made.

    Gradients that are None are not computed.  d_bias and d_sink are added to, in the compute
    dtype: several problems share them.  d_bias: [1 or b, 1 or h_q, 1 or s_q, 1 or s_kv].
    """

    shape: Shape
    compute: torch.dtype
    logits: Logits
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    d_o: torch.Tensor
    stats: torch.Tensor
    d_q: torch.Tensor | None
    d_k: torch.Tensor | None
    d_v: torch.Tensor | None
    d_bias: torch.Tensor | None = None
    d_sink: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    dropout: Dropout | None = None


@dataclass(frozen=True)
class _Keys:
    """k and v of a group as [batches * heads, s_kv, d], and where their gradients gather."""

    k: torch.Tensor
    v: torch.Tensor
    d_k: torch.Tensor | None
    d_v: torch.Tensor | None


def backward(job: Backward) -> None:
    """Fill d_q, d_k and d_v; add to d_bias and d_sink."""
    shape = job.shape
    careful = not is_finite(job.q, job.k, job.v, job.o, job.d_o) or bool(job.stats.isnan().any())
    if 0 in (shape.b, shape.h_q, shape.s_q):
        for grad in (job.d_k, job.d_v):
            if grad is not None:
                grad.zero_()
    for group in groups(shape, job.logits.band, tile_elems(job.q.device)):
        _backward_group(job, group, careful)


def _backward_group(job: Backward, group: Group, careful: bool) -> None:
    k_heads, v_heads = group.heads(job.k, job.shape), group.heads(job.v, job.shape)
    k = job.k[k_heads].to(job.compute).flatten(0, 1)
    v = job.v[v_heads].to(job.compute).flatten(0, 1)
    keys = _Keys(
        k,
        v,
        None if job.d_k is None else torch.zeros_like(k, memory_format=torch.contiguous_format),
        None if job.d_v is None else torch.zeros_like(v, memory_format=torch.contiguous_format),
    )
    for tile in tiles(group, job.shape, job.logits.band):
        _backward_tile(job, tile, keys, careful)
    if job.d_k is not None and keys.d_k is not None:
        d_k = job.d_k[k_heads]
        d_k.copy_(keys.d_k.mul_(job.logits.scale).view(d_k.shape))
    if job.d_v is not None and keys.d_v is not None:
        d_v = job.d_v[v_heads]
        d_v.copy_(keys.d_v.view(d_v.shape))


def _backward_tile(job: Backward, tile: Tile, keys: _Keys, careful: bool) -> None:
    d_q = None if job.d_q is None else job.d_q[tile.index]
    # Contiguous, or the order of the sum (so its last bits) would follow the layout of d_o.
    d_o = job.d_o[tile.index].to(job.compute).contiguous()
    delta = (job.o[tile.index].to(job.compute).contiguous() * d_o).sum(-1, keepdim=True)
    # exp2(logit - inf) is the zero weight of a row that sees nothing.
    lse = job.stats[tile.index].to(job.compute).contiguous() * LOG2_E
    lse.masked_fill_(lse == NEG_INF, INF)
    if tile.col0 == tile.col1:
        if d_q is not None:
            d_q.zero_()
        return
    n_k, n_v = keys.k.shape[0] // tile.shape[0], keys.v.shape[0] // tile.shape[0]
    k, v = keys.k[:, tile.columns], keys.v[:, tile.columns]
    q = by_head(job.q[tile.index].to(job.compute), n_k)
    logits, pull = job.logits.with_pullback(q, k, tile, careful)
    seen = (logits != NEG_INF) & (lse != INF) if careful else None
    weights = logits.sub_(lse).exp2_()
    if seen is not None:
        weights.masked_fill_(~seen, 0)
        # o is 0 in a row that sees nothing, whatever d_o holds.
        delta.masked_fill_(~seen.any(-1, keepdim=True), 0)
    if job.sink is not None and job.d_sink is not None:
        share = (job.sink[tile.h, None, None] * LOG2_E - lse).exp2_()
        job.d_sink[tile.h].sub_((share * delta).sum((0, 2, 3)))
    d_out = by_head(d_o, n_v)
    d_scores = products(d_out, v, 1.0, tile)
    kept = weights
    if job.dropout is not None:
        dropped, factor = job.dropout.dropped(tile, weights.device), job.dropout.factor
        kept = weights.masked_fill(dropped, 0).mul_(factor)
        d_scores.mul_(factor).masked_fill_(dropped, 0)
    if keys.d_v is not None:
        _add_product(keys.d_v[:, tile.columns], by_head(kept, n_v), d_out, seen)
    d_scores.sub_(delta).mul_(weights)
    if seen is not None:
        d_scores.masked_fill_(~seen, 0)
    if job.d_bias is not None:
        _add_reduced(job.d_bias, d_scores, tile)
    if pull is not None:
        d_scores = pull(d_scores)
        if seen is not None:
            d_scores = d_scores.masked_fill(~seen, 0)
    d_scores = by_head(d_scores, n_k)
    if d_q is not None:
        if seen is None:
            out = scaled_bmm(d_scores, k, job.logits.scale, q.new_empty(q.shape))
        else:
            out = seen_matmul(d_scores, k, seen.view(d_scores.shape)).mul_(job.logits.scale)
        d_q.copy_(out.view(d_q.shape))
    if keys.d_k is not None:
        _add_product(keys.d_k[:, tile.columns], d_scores, q, seen)


def _add_product(
    total: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor | None
) -> None:
    """total += weights^T rows, which also sums over the q heads that share a head of ``total``."""
    if seen is None:
        total.baddbmm_(weights.transpose(1, 2), rows)
    else:
        seen = seen.view(weights.shape).transpose(1, 2)
        total.add_(seen_matmul(weights.transpose(1, 2), rows, seen))


def _add_reduced(total: torch.Tensor, part: torch.Tensor, tile: Tile) -> None:
    """Add a tile's gradient to that of the bias, summed over the axes along which bias repeats."""
    spans = (tile.b, tile.h, tile.rows, tile.columns)
    repeated = [axis for axis in range(4) if total.shape[axis] == 1]
    where = tuple(slice(None) if axis in repeated else spans[axis] for axis in range(4))
    total[where].add_(part.sum(repeated, keepdim=True) if repeated else part)
