"""cached_attention: write new K and V into caches, attend over them; for decoding."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ropegraph.errors import GraphError
from ropegraph.functional.arguments import (
    angles,
    autocast,
    band,
    norms,
    refuse_turns,
    sinks,
    tensor,
    tensors,
)
from ropegraph.functional.cached import CACHED_ATTENTION
from ropegraph.functional.dispatch import call
from ropegraph.functional.foreign import closed, refuse
from ropegraph.functional.values import check_new_lens, is_readable


@closed
def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    freqs: Tensor | None = None,
    *,
    new_lens: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    position_ids: Tensor | None = None,
    start_positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    fold: str = "auto",
    fold_log2: bool = False,
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
    """Append the rows of k, rotated, and of v to caches; each new row of q sees all up to its own.

    q: [b, h_q, s, d_qk].  k: [b, h_kv, s, d_qk].  v: [b, h_kv, s, d_v]: the new rows, not rotated;
    s = 1 for a decoded token, more for a prefill; any strides, one type.
    k_cache, v_cache: [b, h_kv, s_max, d_qk or d_v] in that type, any strides, changed in place.
    lengths: [b] int32, rows that each sequence has in the caches; unchanged. Row i goes to row
    lengths + i, and that is its position, unless position_ids [b or 1, s] or start_positions [b]
    name another.
    new_lens: [b], how many of the s rows are real, where prompts are padded at their end: results
    of the others are 0; what they leave in the caches is never read, and the next call writes over
    it if ``lengths`` grows by new_lens.
    window: W keys that end with the row's own.  Everything else: as for ``attention``.
    Rotation and both writes take one launch, attention the other; with q_norm and k_norm, norms
    and rotations take one, both writes the next. Nothing is read on the host on a CUDA device, and
    no shape depends on lengths.
    Returns [b, h_q, s, d_v] with memory in the order of q.
    Raises GraphError for what does not fit and where something requires grad; PositionError, on a
    CPU, before anything is written, if rows would lie outside of a cache. On a CUDA device nothing
    of such a sequence is written, and its result attends over what is there.
    """
    if foreign:
        refuse(cached_attention, foreign)
    where = "cached_attention"
    tensors(where, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, lengths=lengths)
    turn = (
        rope_dim, rope_offset, interleaved, interleaved_output, attention_factor, inverse,
        half_width, table_layout, angle_precision, numerics,
    )  # fmt: skip
    if freqs is None and cos is None and cos_sin is None and inv_freq is None:
        refuse_turns(where, position_ids, start_positions, *turn)
    left, right, bottom_right = band(where, is_causal=False, bottom_right=True, window=window)
    q, k, v = autocast((q, k, v))
    if lengths.dtype is not torch.int32:
        raise GraphError(f"{where}: lengths is {lengths.dtype}; use torch.int32 [b]")
    tensor(new_lens, f"{where}: new_lens")
    if new_lens is None:
        new_lens = torch.full_like(lengths, q.shape[2] if q.dim() == 4 else 0)
    elif new_lens.dtype not in (torch.int32, torch.int64):
        raise GraphError(f"{where}: new_lens is {new_lens.dtype}; use torch.int32 [b]")
    elif q.dim() == 4 and is_readable(new_lens):
        check_new_lens(new_lens, q.shape[2])
    new_lens = new_lens.to(torch.int32)
    room = k_cache.shape[2] if k_cache.dim() == 4 else 0
    fits = new_lens.shape == lengths.shape
    len_kv = (lengths + new_lens).clamp(max=room) if fits else lengths
    slots = (
        q, k, v, k_cache, v_cache, lengths, new_lens, len_kv,
        *norms(where, q_norm, k_norm, q, freqs), *angles(freqs, cos, sin, cos_sin, inv_freq),
        tensor(position_ids, "position_ids"), tensor(start_positions, "start_positions"),
        sinks(sink),
    )  # fmt: skip
    attributes: tuple[Any, ...] = (
        *turn, scale, left, right, bottom_right, False, softcap, 0.0, fold, fold_log2,
        torch.are_deterministic_algorithms_enabled(), norm_eps,
    )  # fmt: skip
    return call(CACHED_ATTENTION, slots, attributes)
