"""attention: rotate Q and K, attend; differentiable."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ropegraph.api.checks import as_count
from ropegraph.errors import GraphError
from ropegraph.functional.arguments import (
    angles,
    autocast,
    band,
    broadcast,
    flags,
    lengths,
    norms,
    pair,
    refuse_turns,
    seed,
    sinks,
    tensors,
    tokens,
)
from ropegraph.functional.attend import ATTENTION
from ropegraph.functional.dispatch import call
from ropegraph.functional.foreign import closed, refuse
from ropegraph.functional.norm_turn import NORM_ROPE
from ropegraph.functional.norms import EPSILON
from ropegraph.functional.values import check_bounds, is_readable


@closed
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    freqs: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_bottom_right: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    seq_lens: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    bias: Tensor | None = None,
    alibi: bool = False,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    position_ids: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    start_positions: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    fold: str = "auto",
    fold_log2: bool = False,
    recompute_rope: bool = False,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cos_sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    rope_dim: int = 0,
    rope_offset: int | None = None,
    interleaved: bool = False,
    interleaved_output: bool | None = None,
    attention_factor: float = 1.0,
    inverse: bool = False,
    half_width: bool = False,
    table_layout: str | None = None,
    angle_precision: str = "float32",
    numerics: str = "fp32",
    **foreign: NoReturn,
) -> Tensor:
    """Rotate q and k by their positions, then softmax(scale q.k) v, as one graph.

    q: [b, h_q, s_q, d_qk].  k: [b, h_kv, s_kv, d_qk].  v: [b, h_kv, s_kv, d_v]; any strides, one of
    fp16, bf16, fp32 and fp64. Neither q nor k is rotated yet, and neither is changed.
    freqs, or cos and sin, cos_sin, inv_freq, and the arguments from rope_dim on: as for ``rope``;
    without angles nothing is rotated.
    scale: None is 1 / sqrt(d_qk).  is_causal: the top left corner.  causal_bottom_right: the last
    query sees every key.  window: W keys that end with the diagonal, with one of those two; or
    (left, right) keys beside the diagonal, None for all.
    seq_lens: [b], or one for q and one for k: rows after them are not read, and 0 in the result.
    cu_seqlens: [n + 1] int32 or int64, n sequences packed along s of [1, h, t, d], which see
    themselves alone and start at position 0; rows of none are 0.  max_seqlen: of the longest, t if
    left out.
    bias: added to the logits, broadcasts to [b, h_q, s_q, s_kv].  alibi, softcap: as sdpa.
    sink: [h_q], one more logit a head.  dropout_p: seeded by torch's generator of the device.
    enable_gqa: allows fewer heads of k and v, as in torch.
    position_ids, start_positions: [b or 1, s] and [b], for both, or (of q, of k), either None.
    q_norm, k_norm: [d_qk] each, both or neither: before the rotation each head of q and of k
    becomes x / sqrt(mean(x^2) + norm_eps) * weight, in f32 (f64), in the launch that rotates, and
    rounded once, after the rotation. f32 or the type of q.
    fold, fold_log2: as pygraph.  recompute_rope: rotates again in the backward, and keeps q and k,
    which the caller mostly has anyway, not their rotations.
    Returns [b, h_q, s_q, d_v] of the type of q, with memory in the order of q. Under autocast q, k
    and v are cast. Gradients, once: q, k, v, q_norm, k_norm, bias, sink, and, without norms,
    freqs (by torch alone).
    Raises GraphError for what does not fit, for another tensor that requires grad, and where a
    second derivative is asked for.
    """
    if foreign:
        refuse(attention, foreign)
    where = "attention"
    tensors(where, q=q, k=k, v=v)
    flags(
        where, is_causal=is_causal, causal_bottom_right=causal_bottom_right,
        enable_gqa=enable_gqa, recompute_rope=recompute_rope,
    )  # fmt: skip
    if not enable_gqa and q.dim() == 4 and k.dim() == 4 and q.shape[1] != k.shape[1]:
        raise GraphError(
            f"{where}: q has {q.shape[1]} heads and k {k.shape[1]}; enable_gqa=True allows that"
        )
    turn = (
        rope_dim, rope_offset, interleaved, interleaved_output, attention_factor, inverse,
        half_width, table_layout, angle_precision, numerics,
    )  # fmt: skip
    if freqs is None and cos is None and cos_sin is None and inv_freq is None:
        refuse_turns(where, position_ids, start_positions, *turn)
    left, right, bottom_right = band(where, is_causal, causal_bottom_right, window)
    q_ids, k_ids, has_ids = pair("attention: position_ids", position_ids)
    q_starts, k_starts, has_starts = pair("attention: start_positions", start_positions)
    q, k, v = autocast((q, k, v))
    weights = norms(where, q_norm, k_norm, q, freqs)
    tables = angles(freqs, cos, sin, cos_sin, inv_freq)
    len_q, len_kv = lengths(where, seq_lens, cu_seqlens)
    if cu_seqlens is None and max_seqlen is not None:
        raise GraphError(
            f"{where}: max_seqlen={max_seqlen} speaks of cu_seqlens, which is not given"
        )
    if cu_seqlens is not None:
        if max_seqlen is not None:
            max_seqlen = as_count(max_seqlen, f"{where}: max_seqlen", 1)
        if position_ids is not None:
            raise GraphError(
                f"{where}: cu_seqlens restarts positions with every sequence; leave position_ids "
                "out"
            )
        if is_readable(cu_seqlens):
            check_bounds(where, cu_seqlens, q.shape[2] if q.dim() == 4 else 0, max_seqlen)
        if freqs is not None and freqs.requires_grad and torch.is_grad_enabled():
            raise GraphError(
                f"{where}: freqs requires grad, which it has not with cu_seqlens; detach it, or "
                "rotate by rope(q, freqs, cu_seqlens=cu_seqlens) first"
            )
        q, k, v = tokens(where, q), tokens(where, k), tokens(where, v)
        if weights[0] is not None:
            own_k = (k_ids, k_starts) if has_ids or has_starts else (q_ids, q_starts)
            own_q, last = (q_ids, q_starts), (*turn, norm_eps)
            q = call(NORM_ROPE, (q, weights[0], *tables, *own_q, cu_seqlens), (*last, "q_norm"))
            k = call(NORM_ROPE, (k, weights[1], *tables, *own_k, cu_seqlens), (*last, "k_norm"))
            weights, tables, norm_eps = (None, None), (None,) * len(tables), EPSILON
            q_ids = q_starts = k_ids = k_starts = None
    slots = (
        q, k, v, *weights, *tables, q_ids, q_starts, k_ids, k_starts, cu_seqlens,
        len_q, len_kv, broadcast(bias), sinks(sink), seed(dropout_p, q.device),
    )  # fmt: skip
    attributes: tuple[Any, ...] = (
        *turn, scale, left, right, bottom_right, alibi, softcap, dropout_p, fold, fold_log2,
        torch.are_deterministic_algorithms_enabled(), norm_eps,
        recompute_rope, has_ids or has_starts, max_seqlen,
    )  # fmt: skip
    return call(ATTENTION, slots, attributes)
