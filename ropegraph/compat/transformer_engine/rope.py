"""Rotation of one tensor: apply_rotary_pos_emb, and fused_rope_forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from ropegraph.api.angle_source import context_parallel
from ropegraph.api.checks import as_flag
from ropegraph.compat.checks import as_tensor, check_floating, optional, wants_gradient
from ropegraph.compat.linear import Linear, port
from ropegraph.compat.recipes import rope
from ropegraph.compat.transformer_engine.formats import (
    DIMS,
    as_format,
    as_table,
    check_rows,
    heads,
    packed,
    tokens,
)
from ropegraph.errors import GraphError


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first d2 channels of every head of ``t``; the others are copied bit for bit.

    t: [s, b, h, d], [b, s, h, d] or [t, h, d], any strides.  freqs: radians [s2, 1, 1, d2], cast to
    fp32, row i for position i; interleaved reads columns t0 t0 t1 t1.
    start_positions: [b], added to the positions.  cu_seqlens: [n + 1], for "thd" alone: where each
    sequence starts, tokens of all ranks counted.  cp_size, cp_rank: this rank holds chunks cp_rank
    and 2 cp_size - 1 - cp_rank of each sequence.
    fused: True computes in fp32 and rounds once; False rounds as TransformerEngine's unfused path
    does, tables and every product to the type of ``t``, bit for bit.
    Returns a new packed tensor of t's format; tokens of no sequence are 0, and so are their
    gradients. The gradient is that of ``t``; fused=False refuses freqs that want one.
    Raises GraphError for anything that does not fit, PositionError (on a CPU; NaN rows elsewhere)
    for positions outside of the table and lengths that 2 cp_size does not divide.
    Source: transformer_engine/pytorch/attention/rope.py.
    """
    where = "apply_rotary_pos_emb"
    is_fused = as_flag(fused, f"{where}: fused")
    freqs = as_tensor(freqs, f"{where}: freqs", "s2, 1, 1, d2")
    check_floating(freqs, f"{where}: freqs")
    if not is_fused and wants_gradient(freqs):
        raise GraphError(
            f"{where}: freqs requires grad, and fused=False has no gradient of it here; use "
            "fused=True, where it is a constant, or freqs.detach(), or record pygraph.rope, whose "
            "backward_graph gives it"
        )
    call = _Call(start_positions, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank)
    return call.run(where, t, freqs.float(), is_unfused=not is_fused)


@overload
def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None = None,
    qkv_format: Any = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor: ...
@overload
def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    transpose_output_memory: bool,
    cp_size: int = 1,
    cp_rank: int = 0,
    cu_seqlens: Tensor | None = None,
    start_positions: Tensor | None = None,
) -> Tensor: ...
def fused_rope_forward(input: Tensor, freqs: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    """tex.fused_rope_forward: apply_rotary_pos_emb with fused=True, in the order of the extension.

    qkv_format: "sbhd", "bshd", "thd", QKVFormat["sbhd"] or a member of NVTE_QKV_Format.
    A bool as third argument selects the older signature, without a format: three dims are thd,
    four are sbhd. transpose_output_memory=True returns [s, b, h, d] over memory in the order
    b, s, h, d; an empty cu_seqlens or start_positions stands for none.
    freqs must be fp32 here.  Differentiable, which the extension is not.
    """
    where = "fused_rope_forward"
    return _read(where, args, kwargs, input).run(where, input, freqs)


@overload
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None = None,
    qkv_format: Any = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor: ...
@overload
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    transpose_output_memory: bool,
    cp_size: int = 1,
    cp_rank: int = 0,
    cu_seqlens: Tensor | None = None,
    start_positions: Tensor | None = None,
) -> Tensor: ...
def fused_rope_backward(output_grads: Tensor, freqs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """tex.fused_rope_backward: the gradient of the input, with the arguments of the forward."""
    where = "fused_rope_backward"
    call = _read(where, args, kwargs, output_grads)
    return call.run(where, output_grads, freqs, is_backward=True)


@dataclass(frozen=True)
class _Call:
    """The arguments of a rotation, in TransformerEngine's order."""

    start_positions: Any = None
    qkv_format: Any = "sbhd"
    interleaved: Any = False
    cu_seqlens: Any = None
    cp_size: Any = 1
    cp_rank: Any = 0
    transpose_output_memory: Any = False

    def run(
        self, where: str, x: Tensor, freqs: Tensor,
        is_backward: bool = False, is_unfused: bool = False,
    ) -> Tensor:  # fmt: skip
        layout = as_format(self.qkv_format, f"{where}: format")
        x = as_tensor(x, f"{where}: {'output_grads' if is_backward else 't'}", DIMS[layout])
        freqs = as_table(freqs, f"{where}: freqs", x.shape[-1])
        size, rank = context_parallel(where, self.cp_size, self.cp_rank)
        tables = {"freqs": freqs} | self._positions(where, layout)
        if layout != "thd":
            check_rows(freqs, f"{where}: freqs", x.shape[DIMS[layout].split(", ").index("s")], size)
        is_transposed = as_flag(self.transpose_output_memory, f"{where}: transpose_output_memory")
        if is_transposed and layout != "sbhd":
            raise GraphError(
                f"{where}: transpose_output_memory=True speaks of [s, b, h, d], but the data is "
                f"{layout}; use False"
            )
        if is_unfused:
            tables = {"cos": freqs.cos(), "sin": freqs.sin()} | tables
            del tables["freqs"]
        form = packed(tuple(x.shape), layout, is_transposed)
        linear = Linear(
            rope,
            (port("x", form),),
            (port("y", form),),
            tuple(tables),
            (
                ("rope_dim", freqs.shape[3]),
                ("rope_offset", 0),
                ("interleaved", as_flag(self.interleaved, f"{where}: interleaved")),
                ("table_layout", "full"),
                ("numerics", "hf" if is_unfused else "fp32"),
                ("cp_size", size),
                ("cp_rank", rank),
            ),
        )
        turn = linear.adjoint if is_backward else linear
        return tokens(turn([heads(x, layout)], tables)[0], layout)

    def _positions(self, where: str, layout: str) -> dict[str, Tensor]:
        """start_positions and cu_seqlens, where they are given."""
        starts = optional(self.start_positions, f"{where}: start_positions", "b")
        cu_seqlens = optional(self.cu_seqlens, f"{where}: cu_seqlens", "n + 1")
        if layout == "thd" and cu_seqlens is None:
            raise GraphError(
                f"{where}: thd needs cu_seqlens=, [n + 1]: where each of n sequences starts, and "
                "the end"
            )
        if layout != "thd" and cu_seqlens is not None:
            raise GraphError(
                f"{where}: cu_seqlens {list(cu_seqlens.shape)} packs sequences, but the format is "
                f"{layout}; use 'thd', or leave cu_seqlens out"
            )
        given = {"start_positions": starts, "cu_seqlens": cu_seqlens}
        return {name: t for name, t in given.items() if t is not None}


def _read(where: str, args: tuple[Any, ...], kwargs: dict[str, Any], x: Any) -> _Call:
    """The arguments behind freqs, in either of the two orders."""
    try:
        if "transpose_output_memory" in kwargs or (args and isinstance(args[0], bool)):
            return _older(x, *args, **kwargs)
        return _newer(*args, **kwargs)
    except TypeError as error:
        raise GraphError(
            f"{where}: {error}; use (x, freqs, start_positions, qkv_format, interleaved, "
            "cu_seqlens, cp_size, cp_rank), or with a bool in third place (x, freqs, "
            "transpose_output_memory, cp_size, cp_rank, cu_seqlens, start_positions)"
        ) from None


def _newer(
    start_positions: Any = None,
    qkv_format: Any = "sbhd",
    interleaved: Any = False,
    cu_seqlens: Any = None,
    cp_size: Any = 1,
    cp_rank: Any = 0,
) -> _Call:
    return _Call(start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank)


def _older(
    x: Any,
    transpose_output_memory: Any,
    cp_size: Any = 1,
    cp_rank: Any = 0,
    cu_seqlens: Any = None,
    start_positions: Any = None,
) -> _Call:
    layout = "thd" if isinstance(x, torch.Tensor) and x.dim() == 3 else "sbhd"
    return _Call(
        start_positions=start_positions,
        qkv_format=layout,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
        transpose_output_memory=transpose_output_memory,
    )
