"""Arguments in torch's habits, read into what a graph takes. Called at every step: kept cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.angles.result import RopeAngles
from ropegraph.api.checks import as_count, as_flag
from ropegraph.errors import GraphError

Pair = tuple[Any, Any]


def angles(
    freqs: Any, cos: Any, sin: Any, cos_sin: Any, inv_freq: Any
) -> tuple[Tensor | None, ...]:
    """What carries the angles: tables with their four axes, everything else as it is."""
    return (
        table(freqs, "freqs"), table(cos, "cos"), table(sin, "sin"), table(cos_sin, "cos_sin"),
        tensor(inv_freq, "inv_freq"),
    )  # fmt: skip


def table(given: Any, name: str) -> Tensor | None:
    """A table [s, r], or [b, s, r] as in Hugging Face, as [s, 1 or b, 1, r]; others as they are."""
    found = tensor(given, name)
    if found is None or found.dim() not in (2, 3):
        return found
    return found[:, None, None, :] if found.dim() == 2 else found.transpose(0, 1)[:, :, None, :]


def tensor(given: Any, name: str) -> Tensor | None:
    """The tensor, or None.  Raises GraphError for anything else."""
    if given is None or isinstance(given, Tensor):
        return given
    hint = "use a tensor"
    if isinstance(given, RopeAngles):
        hint = (
            "give inv_freq=angles.inv_freq and attention_factor=angles.attention_factor, or the "
            "table that ropegraph.angles.freqs makes of it"
        )
    raise GraphError(f"{name} is {type(given).__name__}, no tensor; {hint}")


def tensors(where: str, **given: Any) -> None:
    """Raise GraphError unless each of these is a tensor with strides."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise GraphError(f"{where}: {name} is {type(x).__name__}, no tensor; use a tensor")
        if x.layout is not torch.strided or x.is_nested:
            what = "nested" if x.is_nested else str(x.layout)
            raise GraphError(
                f"{where}: {name} is {what}; use a dense tensor, with seq_lens or cu_seqlens for "
                "sequences of their own lengths"
            )


def flags(where: str, **given: Any) -> None:
    """Raise GraphError unless each of these is True or False."""
    for name, value in given.items():
        if value is not True and value is not False:
            as_flag(value, f"{where}: {name}")


def pair(where: str, given: Any) -> tuple[Any, Any, bool]:
    """One tensor for Q and K, or one for each: (Q's, K's, whether K has its own)."""
    if isinstance(given, (tuple, list)):
        q, k = two(where, cast("Sequence[Any]", given))
        return tensor(q, f"{where} of q"), tensor(k, f"{where} of k"), True
    return tensor(given, where), None, False


def two(where: str, given: Sequence[Any]) -> Pair:
    """Read a pair.  Raises GraphError unless it is one."""
    if len(given) != 2:
        raise GraphError(f"{where} has {len(given)} entries; use two, either of them None")
    return given[0], given[1]


def band(where: str, is_causal: bool, bottom_right: bool, window: Any) -> tuple[Any, Any, bool]:
    """(left bound, right bound, bottom right) of the diagonal band.

    window: W keys that end with the diagonal, with a causal mask; or (left, right) keys beside it.
    """
    right = 0 if is_causal or bottom_right else None
    if is_causal and bottom_right:
        raise GraphError(
            f"{where}: is_causal is the top left corner and causal_bottom_right the other; give one"
        )
    if window is None:
        return None, right, bottom_right
    if isinstance(window, (tuple, list)):
        before, after = two(f"{where}: window", cast("Sequence[Any]", window))
        if after is not None:
            after = as_count(after, f"{where}: window (right)")
            right = after if right is None else min(right, after)
        left = None if before is None else as_count(before, f"{where}: window (left)") + 1
        return left, right, bottom_right
    if right is None:
        raise GraphError(
            f"{where}: window={window!r:.40} counts keys up to the diagonal, which needs "
            "is_causal=True or causal_bottom_right=True; or give window=(left, right)"
        )
    return as_count(window, f"{where}: window", 1), right, bottom_right


def autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The operands of attention in the type of autocast, as for torch's own attention."""
    if not _has_autocast(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in tensors)


def _has_autocast(x: Tensor) -> bool:
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def norms(where: str, q_norm: Any, k_norm: Any, data: Tensor, freqs: Tensor | None) -> Pair:
    """The weights of both norms.

    Raises GraphError for one of the two, and where freqs would need a gradient beside them.
    data: Q. Under autocast, which chose its type, a weight of a third type is cast to it.
    """
    if q_norm is None and k_norm is None:
        return None, None
    if q_norm is None or k_norm is None:
        given, missing = ("k_norm", "q_norm") if q_norm is None else ("q_norm", "k_norm")
        raise GraphError(f"{where}: {given} is given but {missing} is not; give both, or neither")
    if freqs is not None and freqs.requires_grad and torch.is_grad_enabled():
        raise GraphError(
            f"{where}: freqs requires grad, which it has not beside q_norm and k_norm: their "
            "normalised Q and K are kept nowhere; detach it, or normalise q and k before the call"
        )
    weights = tensor(q_norm, "q_norm"), tensor(k_norm, "k_norm")
    if not _has_autocast(data):
        return weights
    keep = (torch.float32, data.dtype)
    q, k = (x if x is None or x.dtype in keep else x.to(data.dtype) for x in weights)
    return q, k


def seed(dropout_p: Any, device: torch.device) -> Tensor | None:
    """What a dropout mask is made from, drawn by torch's generator: replays repeat it."""
    if isinstance(dropout_p, Tensor):
        raise GraphError("dropout_p is a tensor; it is fixed at build, so give a host number")
    if not dropout_p:
        return None
    return torch.randint(2**62, (1,), device=device, dtype=torch.int64)


def lengths(where: str, seq_lens: Any, cu_seqlens: Any) -> Pair:
    """(of q, of k) from seq_lens, or of the sequences that cu_seqlens bounds."""
    cu_seqlens = tensor(cu_seqlens, f"{where}: cu_seqlens")
    if cu_seqlens is not None:
        if seq_lens is not None:
            raise GraphError(f"{where}: seq_lens and cu_seqlens both bound sequences; give one")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise GraphError(f"{where}: cu_seqlens is {list(cu_seqlens.shape)}; use [n + 1]")
        own = cu_seqlens[1:] - cu_seqlens[:-1]
        return own, own
    if isinstance(seq_lens, (tuple, list)):
        q, k = two(f"{where}: seq_lens", cast("Sequence[Any]", seq_lens))
        if q is None or k is None:
            raise GraphError(
                f"{where}: seq_lens={'(None, ...)' if q is None else '(..., None)'}; give both, "
                "the lengths of q and those of k: torch.full_like(lens, s) where all rows are real"
            )
        return tensor(q, f"{where}: seq_lens of q"), tensor(k, f"{where}: seq_lens of k")
    both = tensor(seq_lens, f"{where}: seq_lens")
    return both, both


def tokens(where: str, x: Tensor) -> Tensor:
    """[1, h, t, d] with memory in the order t, h, d: ``x`` itself, if it has."""
    if x.dim() != 4 or x.shape[0] != 1:
        raise GraphError(f"{where}: with cu_seqlens data is [1, h, t, d], not {list(x.shape)}")
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sinks(given: Any) -> Tensor | None:
    """[h] as [1, h, 1, 1], in at least fp32, as logits are."""
    found = tensor(given, "sink")
    if found is None:
        return None
    if found.dtype in (torch.float16, torch.bfloat16):
        found = found.float()
    return found[None, :, None, None] if found.dim() == 1 else found


def broadcast(given: Any) -> Tensor | None:
    """A bias of fewer axes as one of four, the first of length 1."""
    bias = tensor(given, "bias")
    if bias is None or bias.dim() >= 4:
        return bias
    return bias[(None,) * (4 - bias.dim())]


# What says how to rotate, kind.ROTATION at the end, with the values at which it says nothing.
_TURNS: dict[str, Any] = {
    "position_ids": None, "start_positions": None, "rope_dim": 0, "rope_offset": None,
    "interleaved": False, "interleaved_output": None, "attention_factor": 1.0, "inverse": False,
    "half_width": False, "table_layout": None, "angle_precision": "float32", "numerics": "fp32",
}  # fmt: skip


def refuse_turns(where: str, *given: Any) -> None:
    """Raise GraphError for an argument about a rotation where no angles are given.

    given: position_ids, start_positions, and the attributes of a rotation in their order.
    """
    for (name, default), value in zip(_TURNS.items(), given, strict=True):
        if value is not default and (default is None or value != default):
            raise GraphError(
                f"{where}: {name}= is given but no angles, so nothing would be rotated; give "
                "freqs=, cos= and sin=, cos_sin= or inv_freq=, or leave it out"
            )
