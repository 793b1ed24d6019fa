"""qkv_attention: rotary attention on packed QKV; differentiable, gradients packed as well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ropegraph.errors import GraphError
from ropegraph.functional.arguments import (
    angles,
    autocast,
    band,
    broadcast,
    flags,
    lengths,
    norms,
    refuse_turns,
    seed,
    sinks,
    tensor,
    tensors,
)
from ropegraph.functional.dispatch import call
from ropegraph.functional.foreign import closed, refuse
from ropegraph.functional.packed import QKV_ATTENTION, read_split


@closed
def qkv_attention(
    qkv: Tensor,
    freqs: Tensor | None = None,
    *,
    split: Iterable[int],
    by_groups: bool | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    causal_bottom_right: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    seq_lens: Tensor | tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    alibi: bool = False,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    position_ids: Tensor | None = None,
    start_positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    fold: str = "auto",
    fold_log2: bool = False,
    recompute_rope: bool = False,
    in_place: bool = False,
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
    """Rotate the Q and K of a packed tensor and attend; V is read where it lies, never copied.

    qkv: [b, s, (h_q + h_k + h_v) d] or [b, s, h_q + h_k + h_v, d] with split=(h_q, h_k, h_v), or by
    groups [b, s, groups, (n + 2) d] with split=(n d, d, d): each group has n heads of Q, one of K
    and one of V. by_groups says which where both fit. Any strides; unchanged.
    in_place: the rotated Q and K are written over qkv, and nothing of their size is kept; qkv must
    be no leaf that requires grad, and nobody may read it afterwards. torch.compile, which plans
    memory itself, leaves it as it is.
    Everything else: as for ``attention``.
    Returns [b, h_q, s, d] with memory in the order of qkv: out.transpose(1, 2).flatten(2) copies
    nothing. Gradients: qkv (one packed tensor, which the kernels write directly), q_norm, k_norm,
    bias, sink, and, without norms, freqs (by torch alone).
    Raises GraphError as ``attention`` does, and if split does not fit.
    """
    if foreign:
        refuse(qkv_attention, foreign)
    where = "qkv_attention"
    tensors(where, qkv=qkv)
    flags(
        where, is_causal=is_causal, causal_bottom_right=causal_bottom_right,
        recompute_rope=recompute_rope, in_place=in_place, by_groups=by_groups,
    )  # fmt: skip
    if in_place and recompute_rope:
        raise GraphError(f"{where}: in_place keeps no rotations to recompute; give one of the two")
    has_norms = not (q_norm is None and k_norm is None)
    if in_place and has_norms:
        raise GraphError(
            f"{where}: in_place writes over the q and k that the gradients of q_norm and k_norm "
            "read; leave in_place out"
        )
    has_angles = not (freqs is None and cos is None and cos_sin is None and inv_freq is None)
    turn = (
        rope_dim, rope_offset, interleaved, interleaved_output, attention_factor, inverse,
        half_width, table_layout, angle_precision, numerics,
    )  # fmt: skip
    if not has_angles:
        refuse_turns(where, position_ids, start_positions, *turn)
    left, right, bottom_right = band(where, is_causal, causal_bottom_right, window)
    (qkv,) = autocast((qkv,))
    split, by_groups = read_split(where, split, by_groups, qkv.shape)
    if (
        by_groups
        and qkv.shape[2] > 1
        and len(set(split)) > 1
        and (in_place or has_norms or not has_angles)
    ):
        what = "in_place=True" if in_place else "q_norm and k_norm" if has_norms else "no angles"
        raise GraphError(
            f"{where}: {what} with qkv {list(qkv.shape)} by groups: the heads of Q lie in two "
            "levels until they are rotated into a tensor of their own; use split by heads"
        )
    if in_place and has_angles and torch.is_grad_enabled():
        _refuse_in_place(where, qkv, freqs)
    len_q, len_kv = lengths(where, seq_lens, None)
    slots = (
        qkv, *norms(where, q_norm, k_norm, qkv, freqs),
        *angles(freqs, cos, sin, cos_sin, inv_freq),
        tensor(position_ids, "position_ids"), tensor(start_positions, "start_positions"),
        len_q, len_kv, broadcast(bias), sinks(sink), seed(dropout_p, qkv.device),
    )  # fmt: skip
    attributes: tuple[Any, ...] = (
        split, by_groups, *turn, scale, left, right, bottom_right, alibi, softcap, dropout_p,
        fold, fold_log2, torch.are_deterministic_algorithms_enabled(), norm_eps,
        recompute_rope, in_place,
    )  # fmt: skip
    return call(QKV_ATTENTION, slots, attributes)


def _refuse_in_place(where: str, qkv: Tensor, freqs: Tensor | None) -> None:
    """Raise GraphError where autograd could not follow, before anything is written."""
    if qkv.requires_grad and qkv._is_view():
        raise GraphError(
            f"{where}: in_place with a qkv {list(qkv.shape)} that is a view of another tensor, "
            "which autograd cannot follow (a Linear with a bias returns one for [b, s, channels]); "
            "leave in_place out, or use a Linear without bias"
        )
    if freqs is not None and freqs.requires_grad:
        raise GraphError(
            f"{where}: freqs requires grad, for which the unrotated Q and K are needed, but "
            "in_place writes over them; leave in_place out"
        )
