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

    q by groups is [b, groups, h_q / groups, s, d] where no strides could merge its heads. A packed
    tensor [b, s, channels] has its heads side by side.
    Raises GraphError naming ``where``, what was given and what would fit.
    """
    split = attrs.split
    b, s, heads, width = _four(where, split, packed)
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


def _four(where: str, split: Sequence[int], packed: Sequence[int]) -> Dim:
    """The dims of qkv with its heads as an axis."""
    if len(packed) == 3 and sum(split):
        width, heads = packed[2], sum(split)
        if heads == width > 1 or width % heads:
            what = "adds up to all channels" if heads == width else f"adds up to {heads}"
            raise GraphError(
                f"{where}: split={list(split)} of qkv {list(packed)} {what}; "
                f"give numbers of heads, whose sum divides {width}"
            )
        return (*packed[:2], heads, width // heads)
    if len(packed) != 4:
        raise GraphError(
            f"{where}: qkv {list(packed)} has {len(packed)} dims; use [b, s, h_q + h_k + h_v, d], "
            "[b, s, (h_q + h_k + h_v) d] or, by groups, [b, s, groups, widths of q, k and v "
            f"together]; split={list(split)}"
        )
    return tuple(packed)


def packed_dim(where: str, attrs: JoinQkv, dims: Mapping[str, Dim]) -> Dim:
    """The dims of the joined tensor.  Raises GraphError if a part does not fit into it."""
    for part, wanted in parts_of(where, attrs, attrs.dim).items():
        if dims.get(part, wanted) != wanted:
            raise GraphError(f"{where}: {part} is {list(dims[part])}; use {list(wanted)}")
    return attrs.dim


def view_of(attrs: Packed, part: str, dim: Dim, stride: Dim, where: str = "") -> View:
    """Where a part lies in a packed tensor of these dims and strides.

    Raises GraphError as parts_of does; a recorded node has been checked and needs no ``where``.
    """
    found = parts_of(where, attrs, dim)[part]
    s_b, s_s, s_d = stride[0], stride[1], stride[-1]
    s_h = stride[2] if len(dim) == 4 else found[-1] * s_d
    before = sum(attrs.split[: PARTS.index(part)])
    if not attrs.by_groups:
        return View(before * s_h, found, (s_b, s_h, s_s, s_d))
    next_head = attrs.split[1] * s_d
    if len(found) == 5:
        return View(0, found, (s_b, s_h, next_head, s_s, s_d))
    is_one_group = part == "q" and dim[2] == 1
    return View(before * s_d, found, (s_b, next_head if is_one_group else s_h, s_s, s_d))
