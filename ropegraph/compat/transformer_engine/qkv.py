"""Rotation of packed QKV: apply_fused_qkv_rotary_pos_emb, and the extension's two functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropegraph.api.angle_source import context_parallel
from ropegraph.api.checks import as_count, as_flag, as_list
from ropegraph.compat.checks import as_tensor, check_floating, optional
from ropegraph.compat.linear import Linear, port
from ropegraph.compat.recipes import qkv_rope
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

Parts = tuple[Tensor, Tensor, Tensor]


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Parts:
    """Split packed QKV and rotate the first d2 channels of every head of Q and K.

    qkv: [s, b, g, (n + 2) d] or [b, s, g, (n + 2) d], any strides: g groups of n heads of Q, one of
    K and one of V.  qkv_split_arg_list: [n d, d, d].  q_freqs, k_freqs: radians [s2, 1, 1, d2],
    cast to fp32, both d2 wide.  start_positions: [b]; its gradient is right too, which
    TransformerEngine's is not.
    Returns new packed tensors q [.., n g, d] (head g n + i is head i of group g), k and v
    [.., g, d]; the gradient of all three is one packed tensor. Tables have none.
    Raises GraphError for thd and for start_positions with cp_size > 1, as TransformerEngine does,
    and for whatever does not fit; PositionError (on a CPU) for positions outside of a table.
    """
    where = "apply_fused_qkv_rotary_pos_emb"
    if optional(cu_seqlens, f"{where}: cu_seqlens", "n + 1") is not None:
        raise GraphError(
            f"{where}: cu_seqlens has no meaning for {tensor_format}; leave it out, or rotate "
            "packed sequences with apply_rotary_pos_emb(..., tensor_format='thd')"
        )
    for name, table in (("q_freqs", q_freqs), ("k_freqs", k_freqs)):
        check_floating(as_tensor(table, f"{where}: {name}", "s2, 1, 1, d2"), f"{where}: {name}")
    q_table = q_freqs.float()
    k_table = q_table if k_freqs is q_freqs else k_freqs.float()
    call = _Call(qkv_split_arg_list, tensor_format, interleaved, cp_size, cp_rank, start_positions)
    return call.forward(where, qkv, q_table, k_table)


def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: list[int],
    qkv_format: Any = "sbhd",
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Parts:
    """tex.fused_qkv_rope_forward: apply_fused_qkv_rotary_pos_emb in the order of the extension.

    freqs must be fp32.  Differentiable, which the extension is not.
    Raises GraphError for the older signature with num_q_heads, which says nothing of the layout.
    """
    where = "fused_qkv_rope_forward"
    given: Any = qkv_split_arg_list
    if isinstance(given, bool):
        raise GraphError(
            f"{where}: the signature (qkv, freqs_q, freqs_k, num_q_heads, transpose_output_memory, "
            "...) does not say how qkv is packed; use (qkv, q_freqs, k_freqs, start_positions, "
            "qkv_split_arg_list, qkv_format, interleaved, cp_size, cp_rank), or pygraph.qkv_rope"
        )
    call = _Call(qkv_split_arg_list, qkv_format, interleaved, cp_size, cp_rank, start_positions)
    return call.forward(where, qkv_input, q_freqs, k_freqs)


def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    qkv_format: Any = "sbhd",
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
    start_positions: Tensor | None = None,
) -> Tensor:
    """tex.fused_qkv_rope_backward: the packed gradient from those of q, k and v, any strides.

    start_positions: what the forward had; TransformerEngine cannot be told.
    """
    where = "fused_qkv_rope_backward"
    call = _Call(qkv_split_arg_list, qkv_format, interleaved, cp_size, cp_rank, start_positions)
    layout = call.layout(where)
    given = {"q_grad_out": q_grad_out, "k_grad_out": k_grad_out, "v_grad_out": v_grad_out}
    grads = [as_tensor(t, f"{where}: {name}", DIMS[layout]) for name, t in given.items()]
    split = call.split(where, None)
    shape = (*grads[1].shape[:3], sum(split))
    linear, tables = call.linear(where, shape, split, q_freqs, k_freqs)
    for (name, t), p in zip(given.items(), linear.outputs, strict=True):
        if tuple(heads(t, layout).shape) != p.dim:
            wanted = list(tokens(torch.empty(p.dim, device="meta"), layout).shape)
            raise GraphError(
                f"{where}: {name} is {list(t.shape)}; with k_grad_out {list(grads[1].shape)} and "
                f"qkv_split_arg_list={list(split)} use {wanted}"
            )
    (made,) = linear.adjoint([heads(t, layout) for t in grads], tables)
    return _batch_first(made, layout)


def _batch_first(qkv: Tensor, layout: str) -> Tensor:
    """[b, s, g, w] from the format, or the format from that: a view either way."""
    return qkv.transpose(0, 1) if layout == "sbhd" else qkv


@dataclass(frozen=True)
class _Call:
    """What forward and backward share."""

    qkv_split_arg_list: Any
    qkv_format: Any
    interleaved: Any
    cp_size: Any
    cp_rank: Any
    start_positions: Any

    def forward(self, where: str, qkv: Any, q_freqs: Any, k_freqs: Any) -> Parts:
        layout = self.layout(where)
        qkv = as_tensor(qkv, f"{where}: qkv", DIMS[layout].replace("h, d", "g, (n + 2) d"))
        split = self.split(where, qkv.shape[3])
        linear, tables = self.linear(where, tuple(qkv.shape), split, q_freqs, k_freqs)
        q, k, v = linear([_batch_first(qkv, layout)], tables)
        return tokens(q, layout), tokens(k, layout), tokens(v, layout)

    def layout(self, where: str) -> str:
        found = as_format(self.qkv_format, f"{where}: format")
        if found == "thd":
            raise GraphError(
                f"{where}: thd is not served, as in TransformerEngine; use sbhd or bshd, or rotate "
                "q and k with apply_rotary_pos_emb(..., tensor_format='thd')"
            )
        return found

    def split(self, where: str, width: int | None) -> tuple[int, int, int]:
        """[n d, d, d], which add up to the width of a group."""
        argument = f"{where}: qkv_split_arg_list"
        given = as_list(self.qkv_split_arg_list, argument)
        split = tuple(as_count(n, argument, 1) for n in given)
        if len(split) != 3 or split[1] != split[2] or split[0] % split[1]:
            raise GraphError(
                f"{argument}={given}; use [n d, d, d]: n heads of q, one of k, one of v"
            )
        if width not in (None, sum(split)):
            raise GraphError(
                f"{argument}={given} adds up to {sum(split)}, but a group of qkv is {width} wide"
            )
        return split

    def linear(
        self, where: str, shape: tuple[int, ...], split: tuple[int, int, int], q_freqs: Any,
        k_freqs: Any,
    ) -> tuple[Linear, dict[str, Tensor]]:  # fmt: skip
        layout = self.layout(where)
        size, rank = context_parallel(where, self.cp_size, self.cp_rank)
        starts = optional(self.start_positions, f"{where}: start_positions", "b")
        if starts is not None and size > 1:
            raise GraphError(
                f"{where}: start_positions with cp_size={size} is not served, as in "
                "TransformerEngine; pygraph.qkv_rope takes both, and so does apply_rotary_pos_emb"
            )
        s = shape[DIMS[layout].split(", ").index("s")]
        tables = {"freqs": as_table(q_freqs, f"{where}: q_freqs", split[1])}
        check_rows(tables["freqs"], f"{where}: q_freqs", s, size)
        if k_freqs is not q_freqs:
            tables["k_freqs"] = as_table(k_freqs, f"{where}: k_freqs", split[1])
            check_rows(tables["k_freqs"], f"{where}: k_freqs", s, size)
        if starts is not None:
            tables["start_positions"] = starts
        d, groups = split[1], shape[2]
        ratio = split[0] // d
        out = {
            part: packed((*shape[:2], n * groups, d), layout)
            for part, n in (("q", ratio), ("k", 1), ("v", 1))
        }
        attributes = (
            ("split", split),
            ("by_groups", True),
            ("rope_dim", tables["freqs"].shape[3]),
            ("rope_offset", 0),
            ("interleaved", as_flag(self.interleaved, f"{where}: interleaved")),
            ("table_layout", "full"),
            ("cp_size", size),
            ("cp_rank", rank),
        )
        whole = _batch_first(torch.empty(shape, device="meta"), layout)
        ports = tuple(port(part, t) for part, t in out.items())
        return Linear(qkv_rope, (port("qkv", whole),), ports, tuple(tables), attributes), tables
