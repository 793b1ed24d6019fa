"""fused_mla_kv_rope_mxfp8: key and value of multi-latent attention, quantized to MXFP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropegraph.api.checks import as_count
from ropegraph.api.mla_ops import Mxfp8
from ropegraph.api.plans import Recording, form_of, run
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor as Handle
from ropegraph.compat.checks import as_tensor, shape_of, wants_gradient
from ropegraph.errors import GraphError

NOPE, ROPE, VALUE = 128, 64, 128
_ELSE = "pygraph.mla_kv_rope takes other sizes"


@dataclass(frozen=True)
class MXFP8Tensor:
    """The buffers of TransformerEngine's MXFP8Tensor, all uint8, by the names of its metadata.

    rowwise_data: E4M3, [s, b h d].  rowwise_scale_inv: E8M0, [s b h, d / 32].
    columnwise_data: E4M3, [s, b h d].  columnwise_scale_inv: E8M0, [s / 32, b h d].
    """

    rowwise_data: Tensor
    rowwise_scale_inv: Tensor
    columnwise_data: Tensor
    columnwise_scale_inv: Tensor


def fused_mla_kv_rope_mxfp8(
    kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, v_head_dim: int = VALUE
) -> tuple[MXFP8Tensor, MXFP8Tensor]:
    """Split kv, rotate k_rope, append it to the key of every head, quantize: (key, value).

    kv: [s, b, h, 256] bf16: 128 channels of the key without rotation, 128 of the value.
    k_rope: [s, b, 64] or [s, b, 1, 64] bf16, any strides.  cos, sin: [max_s, 64] or
    [max_s, 1, 1, 64], both bf16 or both fp32; row t for token t.
    The bytes are those of TransformerEngine: pairs read, halves written, its roundings, blocks of
    32 channels and of 32 tokens. Any device, not sm_100 alone; nothing is quantized by a quantizer
    of the caller's, so there is none to pass.
    Raises GraphError for other sizes and types, an odd number of heads, and s no multiple of 32;
    and for inputs that require grad, as there is no gradient.  Source: fused_rope.h.
    """
    where = "fused_mla_kv_rope_mxfp8"
    kv = as_tensor(kv, f"{where}: kv", "s, b, h, 256")
    s, b, h, width = kv.shape
    if width != NOPE + VALUE or as_count(v_head_dim, f"{where}: v_head_dim") != VALUE:
        raise GraphError(
            f"{where}: kv {list(kv.shape)} with v_head_dim={v_head_dim}; a head is {NOPE} channels "
            f"of the key and {VALUE} of the value; {_ELSE}"
        )
    if h % 2 or s % 32:
        raise GraphError(
            f"{where}: kv {list(kv.shape)} has {h} heads and {s} tokens; use an even number of "
            f"heads and a multiple of 32 tokens, such as {s + -s % 32}; {_ELSE} (heads)"
        )
    shared = _rows(where, k_rope, s, b)
    for name, t in (("kv", kv), ("k_rope", shared)):
        if t.dtype is not torch.bfloat16:
            raise GraphError(f"{where}: {name} is {t.dtype}; use torch.bfloat16")
    if wants_gradient(kv, shared):
        raise GraphError(
            f"{where}: kv or k_rope requires grad, but MXFP8 has no gradient; call it under "
            "torch.no_grad(), or record pygraph.mla_kv_rope without quantize, which has one"
        )
    given = {
        "kv": kv.permute(1, 2, 0, 3),
        "k_rope": shared.transpose(0, 1).unsqueeze(1),
        "cos": _table(f"{where}: cos", cos, s),
        "sin": _table(f"{where}: sin", sin, s),
    }
    out = {
        **_buffers("key", s, b, h, NOPE + ROPE, kv.device),
        **_buffers("value", s, b, h, VALUE, kv.device),
    }
    views = {name: view for name, (_, view) in out.items()}
    forms = tuple((name, form_of(t)) for name, t in given.items())
    strides = tuple((name, view.stride()) for name, view in views.items())
    run(Recording(mla_kv_rope_mxfp8, forms, strides), given, views)
    made = [buffer for buffer, _ in out.values()]
    return MXFP8Tensor(*made[:4]), MXFP8Tensor(*made[4:])


def mla_kv_rope_mxfp8(graph: pygraph, tensors: dict[str, Handle]) -> dict[str, Handle]:
    """kv, k_rope, cos, sin -> the eight buffers, as bytes."""
    kv, k_rope, cos, sin = (tensors[name] for name in ("kv", "k_rope", "cos", "sin"))
    made: list[Mxfp8] = graph.mla_kv_rope(kv, k_rope, cos, sin, quantize="mxfp8")
    return {
        f"{side}_{form}": t.set_data_type(torch.uint8)
        for side, parts in zip(("key", "value"), made, strict=True)
        for form, t in parts._asdict().items()
    }


def _rows(where: str, given: Any, s: int, b: int) -> Tensor:
    """k_rope as [s, b, 64]: a view."""
    shape = shape_of(given)
    if shape == (s, b, 1, ROPE):
        return given.squeeze(2)
    if shape != (s, b, ROPE):
        raise GraphError(
            f"{where}: k_rope is {list(shape) or given!r:.60}; all heads of a token share one row, "
            f"so use {[s, b, ROPE]} or {[s, b, 1, ROPE]}; {_ELSE}"
        )
    return given


def _table(where: str, given: Any, s: int) -> Tensor:
    """A table of cosines or sines as [max_s, 1, 1, 64]: a view."""
    shape = shape_of(given)
    if shape[1:] not in ((ROPE,), (1, 1, ROPE)) or shape[0] < s:
        raise GraphError(
            f"{where} is {list(shape) or given!r:.60}; use at least {s} rows, [max_s, {ROPE}] or "
            f"[max_s, 1, 1, {ROPE}]; {_ELSE}"
        )
    return given.reshape(shape[0], 1, 1, ROPE)


def _buffers(
    side: str, s: int, b: int, h: int, d: int, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """The four buffers of one output: as TransformerEngine shapes them, and as [b, h, s, d]."""
    shapes = {
        "row": ((s, b * h * d), (s, d)),
        "row_scale": ((s * b * h, d // 32), (s, d // 32)),
        "column": ((s, b * h * d), (s, d)),
        "column_scale": ((s // 32, b * h * d), (s // 32, d)),
    }
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for form, (shape, (rows, columns)) in shapes.items():
        buffer = torch.empty(shape, dtype=torch.uint8, device=device)
        made[f"{side}_{form}"] = buffer, buffer.view(rows, b, h, columns).permute(1, 2, 0, 3)
    return made
