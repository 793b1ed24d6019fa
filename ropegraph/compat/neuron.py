"""The rotary kernels of AWS Neuron's NKI library.

    from nkilib.core.embeddings.rope import RoPE  ->  from ropegraph.compat.neuron import RoPE
    from nkilib.core.embeddings.rope_hf import rope_hf  ->  ... import rope_hf
    attention_tkg with inv_freqs and rope_pos_ids  ->  ... import rope

All compute in fp32 and round once. What the kernels assert of shapes is an error here as well;
limits of on-chip memory are not. Cores that share a sequence (lnc_shard) do not exist here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropegraph.api.angle_source import PRECISIONS
from ropegraph.api.checks import as_choice, as_flag, as_number
from ropegraph.compat.checks import as_tensor, wants_gradient
from ropegraph.compat.linear import Linear, port
from ropegraph.compat.recipes import rope as one_rope
from ropegraph.compat.recipes import rope_pair
from ropegraph.errors import GraphError

TILE = 128  # tokens that rope_hf takes at a time


def RoPE(  # noqa: N802 - the library's name
    x_in: Tensor,
    cos: Tensor,
    sin: Tensor,
    lnc_shard: bool = False,
    contiguous_layout: bool = True,
    relayout_in_sbuf: bool = False,
) -> Tensor:
    """Rotate x_in [d_head, B, n_heads, S], d_head 64 or 128, by cos and sin [d_head / 2, B, S].

    contiguous_layout: d_head is two halves; False: it is pairs (e0, o0, e1, o1, ...) in memory, and
    so is the result; the rotation is the same.  relayout_in_sbuf: a hint, accepted.
    Returns a new contiguous tensor, differentiable in x_in.
    Raises GraphError for lnc_shard=True and for shapes and types that do not fit.
    """
    where = "RoPE"
    x = as_tensor(x_in, f"{where}: x_in", "d_head, B, n_heads, S")
    d, b, n, s = x.shape
    if as_flag(lnc_shard, f"{where}: lnc_shard"):
        raise GraphError(
            f"{where}: lnc_shard=True shares S among the cores of one Neuron device; use False, "
            "which rotates all of it"
        )
    as_flag(relayout_in_sbuf, f"{where}: relayout_in_sbuf")
    if d not in (64, 128):
        raise GraphError(
            f"{where}: x_in {list(x.shape)} has d_head={d}; use 64 or 128, or pygraph.rope, which "
            "takes any even width"
        )
    if not b * n * s:
        raise GraphError(f"{where}: x_in {list(x.shape)} is empty; B, n_heads and S are at least 1")
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(as_tensor(table, f"{where}: {name}", "d_head / 2, B, S").shape) != (d // 2, b, s):
            raise GraphError(
                f"{where}: {name} is {list(table.shape)}; use {[d // 2, b, s]} for x_in "
                f"{list(x.shape)}"
            )
    if cos.dtype is not sin.dtype:
        raise GraphError(f"{where}: cos is {cos.dtype} but sin is {sin.dtype}; use one type")
    form = torch.empty(x.shape, device="meta").permute(1, 2, 3, 0)
    linear = Linear(
        one_rope,
        (port("x", form),),
        (port("y", form),),
        ("cos", "sin"),
        (
            ("half_width", True),
            ("interleaved", not as_flag(contiguous_layout, f"{where}: contiguous_layout")),
        ),
    )
    tables = {"cos": cos, "sin": sin}
    tables = {name: t.permute(2, 1, 0).unsqueeze(2) for name, t in tables.items()}
    return linear([x.permute(1, 2, 3, 0)], tables)[0].permute(3, 0, 1, 2)


def rope_hf(
    q: Tensor,
    k: Tensor,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rope_cache: Tensor | None = None,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, [B, heads, S, D] each, in one launch; S is a multiple of 128.

    cos, sin: [S', D] or [B, S', D], S' at least S, every column read by its own channel; or
    rope_cache: [.., 2 D] with the cosines first.  q_out, k_out: buffers to write, both or neither;
    without them new tensors, packed.  backward: the adjoint, for gradients of the results.
    Returns (q_out, k_out), differentiable in q and k.
    Raises GraphError for both or neither of cos, sin and rope_cache, and for what does not fit.
    """
    where = "rope_hf"
    _check_data(where, q, k)
    d = q.shape[3]
    tables = _tables(where, q, cos, sin, rope_cache)
    forms = [torch.empty(x.shape, device="meta") for x in (q, k)]
    linear = Linear(
        rope_pair,
        tuple(map(port, ("q", "k"), forms)),
        tuple(map(port, ("q_rot", "k_rot"), forms)),
        tuple(tables),
        (("rope_dim", d), ("table_layout", "full")),
    )
    is_adjoint = as_flag(backward, f"{where}: backward")
    if q_out is None and k_out is None:
        made_q, made_k = (linear.adjoint if is_adjoint else linear)([q, k], tables)
        return made_q, made_k
    if q_out is None or k_out is None:
        raise GraphError(f"{where}: one of q_out and k_out is given; give both or neither")
    for name, x, out in (("q", q, q_out), ("k", k, k_out)):
        if not isinstance(out, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"{where}: {name}_out={out!r:.60} is no torch tensor")
        if out.shape != x.shape or out.dtype is not x.dtype:
            raise GraphError(
                f"{where}: {name}_out is {out.dtype} {list(out.shape)}; use {x.dtype} "
                f"{list(x.shape)}, or leave it out and give the tables as cos= and sin="
            )
    if not wants_gradient(q, k, q_out, k_out):
        linear.run([q, k], list(tables.values()), [q_out, k_out], is_adjoint=is_adjoint)
        return q_out, k_out
    made = (linear.adjoint if is_adjoint else linear)([q, k], tables)
    return q_out.copy_(made[0]), k_out.copy_(made[1])


def rope(
    x: Tensor,
    inv_freqs: Tensor,
    pos_ids: Tensor,
    output_scale: float = 1.0,
    angle_precision: str = "float32",
) -> Tensor:
    """The rotation within attention_tkg, for decode: angles made from positions in the launch.

    x: [B, heads, S, d], d a multiple of 64, any strides.  inv_freqs: fp32 [d / 2, 1] or [d / 2],
    radians a position, scaling included.  pos_ids: [B, S], int32 or int64.
    output_scale: d ** -0.5 for Q where attention_tkg rotates (fuse_rope), and 1 for K.
    angle_precision: "float32" rounds position * inv_freq once to fp32, as the kernel does; "exact"
    does not. Cosine and sine are right up to position 2^24, beyond the 2^17 where the kernel's
    reduction stops.
    Returns a new packed tensor, differentiable in x.  Raises GraphError for what does not fit.
    """
    where = "rope"
    x = as_tensor(x, f"{where}: x", "B, heads, S, d")
    b, _, s, d = x.shape
    if d % 64 or not d:
        raise GraphError(
            f"{where}: x {list(x.shape)} has d={d}; use a multiple of 64, or pygraph.rope, which "
            "takes any even width"
        )
    shape = tuple(getattr(inv_freqs, "shape", ()))
    if shape not in ((d // 2,), (d // 2, 1)) or inv_freqs.dtype is not torch.float32:
        raise GraphError(
            f"{where}: inv_freqs is {getattr(inv_freqs, 'dtype', inv_freqs)!r:.60} {list(shape)}; "
            f"use torch.float32 [{d // 2}, 1]"
        )
    if tuple(as_tensor(pos_ids, f"{where}: pos_ids", "B, S").shape) != (b, s):
        raise GraphError(f"{where}: pos_ids is {list(pos_ids.shape)}; use [{b}, {s}]")
    precision = as_choice(angle_precision, f"{where}: angle_precision", PRECISIONS)
    form = torch.empty(x.shape, device="meta")
    linear = Linear(
        one_rope,
        (port("x", form),),
        (port("y", form),),
        ("inv_freq", "position_ids"),
        (
            ("output_scale", as_number(output_scale, f"{where}: output_scale")),
            ("angle_precision", precision),
        ),
    )
    tables = {"inv_freq": inv_freqs.reshape(d // 2), "position_ids": pos_ids}
    return linear([x], tables)[0]


def _check_data(where: str, q: Any, k: Any) -> None:
    for name, x in (("q", q), ("k", k)):
        as_tensor(x, f"{where}: {name}", "B, heads, S, D")
    if q.shape[3] != k.shape[3] or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise GraphError(
            f"{where}: q {list(q.shape)} and k {list(k.shape)} differ in B, S or D; only the "
            "number of heads may differ"
        )
    if q.shape[2] % TILE:
        raise GraphError(
            f"{where}: S={q.shape[2]} of q {list(q.shape)} is no multiple of {TILE}; pad to "
            f"{q.shape[2] + -q.shape[2] % TILE}, or record pygraph.rope, which takes any length"
        )


def _tables(
    where: str, q: Tensor, cos: Tensor | None, sin: Tensor | None, rope_cache: Tensor | None
) -> dict[str, Tensor]:
    """The tables as [S', 1 or B, 1, width], by rope's keywords."""
    if rope_cache is not None and (cos is not None or sin is not None):
        raise GraphError(f"{where}: rope_cache and cos, sin both hold the tables; give one of them")
    d = q.shape[3]
    if rope_cache is not None:
        return {"cos_sin": _table(f"{where}: rope_cache", rope_cache, q, 2 * d)}
    if cos is None or sin is None:
        raise GraphError(f"{where}: no tables; give cos= and sin=, or rope_cache=")
    given = {"cos": cos, "sin": sin}
    found = {name: _table(f"{where}: {name}", t, q, d) for name, t in given.items()}
    if cos.shape != sin.shape:
        raise GraphError(
            f"{where}: cos {list(cos.shape)} and sin {list(sin.shape)} differ; use one shape"
        )
    return found


def _table(where: str, table: Tensor, q: Tensor, width: int) -> Tensor:
    b, _, s, _ = q.shape
    shape: list[int] = list(getattr(table, "shape", ()))
    is_own = len(shape) == 3 and shape[0] == b
    if not (is_own or len(shape) == 2) or shape[-1] != width or shape[-2] < s:
        raise GraphError(
            f"{where} is {shape}; use [S', {width}] or [{b}, S', {width}] with S' at least {s} for "
            f"q {list(q.shape)}"
        )
    rows = table.transpose(0, 1) if is_own else table.unsqueeze(1)
    return rows.unsqueeze(2)
