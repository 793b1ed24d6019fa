"""Cosines and sines of a rotation, from whatever carries its angles."""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.dtypes import DType
from ropegraph.ir.ops import Rotation

Tables = tuple[Tensor, Tensor, Tensor, Tensor]


def compute_dtype(attrs: Rotation, x: Tensor) -> torch.dtype:
    """fp64 for fp64 data or where it is asked for, fp32 otherwise."""
    wide = attrs.compute is DType.DOUBLE or x.dtype is torch.float64
    return torch.float64 if wide else torch.float32


def columns(attrs: Rotation, table: Tensor) -> tuple[Tensor, Tensor]:
    """The columns that the first and the second channel of each pair read: views of the table."""
    if attrs.half_width:
        return table, table
    half = attrs.rope_dim // 2
    if attrs.table_layout == "first_half":
        first = table[..., :half]
        return first, first
    if attrs.table_layout == "pairs":
        first = table[..., 0::2]
        return first, first
    # full: each written lane has its own column, in the order in which lanes are written.
    if attrs.interleaved_output:
        return table[..., 0::2], table[..., 1::2]
    return table[..., :half], table[..., half:]


def cos_sin(attrs: Rotation, freqs: Tensor, rows: int, dtype: torch.dtype) -> Tables:
    """(cos1, sin1, cos2, sin2), each [1 or b, 1, rows, r/2], unscaled, for rows 0 to rows - 1.

    Index 1 belongs to the first written channel of each pair, 2 to the second; the tensors are the
    same objects unless table_layout is "full".
    """
    first, second = columns(attrs, freqs[:rows].permute(1, 2, 0, 3))
    angle = first.to(dtype)
    cos1, sin1 = angle.cos(), angle.sin()
    if second is first:
        return cos1, sin1, cos1, sin1
    angle = second.to(dtype)
    return cos1, sin1, angle.cos(), angle.sin()


def scaled(tables: Tables, factor: float) -> Tables:
    """The tables times attention_factor * output_scale; shared tensors stay shared."""
    if factor == 1.0:
        return tables
    cos1, sin1, cos2, sin2 = tables
    one = cos1 * factor, sin1 * factor
    return (*one, *one) if cos2 is cos1 else (*one, cos2 * factor, sin2 * factor)
