"""Packed QKV: the shape rules of its parts, and where in the packed tensor each part lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ropegraph.errors import GraphError
from ropegraph.ir.ops import JoinQkv, SplitQkv

Dim = tuple[int, ...]
Packed = SplitQkv | JoinQkv
PARTS = ("q", "k", "v")


class View(NamedTuple):
    """A tensor inside another: elements from its first, dims, strides in elements."""

    start: int
    dim: tuple[int, ...]
    stride: tuple[int, ...]


def parts_of(where: str, attrs: Packed, packed: Sequence[int]) -> dict[str, Dim]:
    """The dims of q, k and v, each [b, h, s, d].  packed: the dims of qkv.

    q by groups is [b, groups, h_q / groups, s, d] where no strides could merge its heads.
    Raises GraphError naming ``where``, what was given and what would fit.
    """
    if len(packed) != 4:
        raise GraphError(
            f"{where}: qkv {list(packed)} has {len(packed)} dims; use [b, s, h_q + h_k + h_v, d] "
            "or, by groups, [b, s, groups, widths of q, k and v together]"
        )
    b, s, heads, width = packed
    split = attrs.split
    if not attrs.by_groups:
        if sum(split) != heads or min(split) < 0:
            raise GraphError(
                f"{where}: split={list(split)} of the {heads} heads of qkv {list(packed)}; "
                f"use numbers of heads that add up to {heads}"
            )
        return {part: (b, h, s, width) for part, h in zip(PARTS, split, strict=True)}
    q, k, v = split
    if sum(split) != width or min(split) < 1 or k != v or q % k:
        raise GraphError(
            f"{where}: split={list(split)} of groups {width} wide in qkv {list(packed)}; use "
            f"[n d, d, d] with (n + 2) d = {width}: n heads of q, one of k and one of v"
        )
    ratio = q // k
    two_levels = ratio > 1 and heads > 1
    of_q = (b, heads, ratio, s, k) if two_levels else (b, heads * ratio, s, k)
    return {"q": of_q, "k": (b, heads, s, k), "v": (b, heads, s, k)}


def packed_dim(where: str, attrs: JoinQkv, dims: Mapping[str, Dim]) -> Dim:
    """The dims of the joined tensor.  Raises GraphError if a part does not fit into it."""
    for part, wanted in parts_of(where, attrs, attrs.dim).items():
        if dims.get(part, wanted) != wanted:
            raise GraphError(f"{where}: {part} is {list(dims[part])}; use {list(wanted)}")
    return attrs.dim


def view_of(attrs: Packed, part: str, dim: Dim, stride: Dim) -> View:
    """Where a part lies in a packed tensor of these dims and strides."""
    s_b, s_s, s_h, s_d = stride
    found = parts_of("", attrs, dim)[part]
    before = sum(attrs.split[: PARTS.index(part)])
    if not attrs.by_groups:
        return View(before * s_h, found, (s_b, s_h, s_s, s_d))
    next_head = attrs.split[1] * s_d
    if len(found) == 5:
        return View(0, found, (s_b, s_h, next_head, s_s, s_d))
    is_one_group = part == "q" and dim[2] == 1
    return View(before * s_d, found, (s_b, next_head if is_one_group else s_h, s_s, s_d))
