"""The channels that a rotation pairs."""

from __future__ import annotations

from torch import Tensor

from ropegraph.ir.ops import Rotation


def split_pairs(x: Tensor, attrs: Rotation, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second channel of every pair in the rotated segment."""
    begin, r = attrs.rope_offset, attrs.rope_dim
    if interleaved:
        return x[..., begin : begin + r : 2], x[..., begin + 1 : begin + r : 2]
    middle = begin + r // 2
    return x[..., begin:middle], x[..., middle : begin + r]
