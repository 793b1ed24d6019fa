"""Cosines and sines of a rotation, from whatever carries its angles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropegraph.dtypes import DType
from ropegraph.engines.torch_executor.positions import Rows
from ropegraph.ir.ops import Rotation

Tables = tuple[Tensor, Tensor, Tensor, Tensor]


def compute_dtype(attrs: Rotation, x: Tensor) -> torch.dtype:
    """fp64 for fp64 data or where it is asked for, fp32 otherwise and where bits are promised."""
    wide = attrs.compute is DType.DOUBLE or x.dtype is torch.float64
    return torch.float64 if wide and attrs.numerics == "fp32" else torch.float32


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


def cos_sin(
    attrs: Rotation, sources: Sequence[Tensor], rows: Rows | None, count: int, dtype: torch.dtype
) -> Tables:
    """(cos1, sin1, cos2, sin2), each [1 or b, 1, count, r/2], unscaled.

    sources: the tensors at ANGLE_PORTS.  rows: the position of each row; None for 0 to count - 1.
    Index 1 belongs to the first written channel of each pair, 2 to the second; the tensors are the
    same objects unless table_layout is "full".
    """
    match attrs.angles:
        case "inv_freq":
            one = _made(attrs, sources[0], rows, count, dtype)
            return (*one, *one)
        case "freqs":
            first, second = _lanes(attrs, sources[0], rows, count)
            angle = first.to(dtype)
            one = angle.cos(), angle.sin()
            if second is first:
                return (*one, *one)
            angle = second.to(dtype)
            return (*one, angle.cos(), angle.sin())
        case "cos_sin":
            cos, sin = sources
        case "packed":
            cos, sin = sources[0].chunk(2, dim=-1)
    cos1, cos2 = _lanes(attrs, cos, rows, count)
    sin1, sin2 = _lanes(attrs, sin, rows, count)
    one = cos1.to(dtype), sin1.to(dtype)
    return (*one, *one) if cos2 is cos1 else (*one, cos2.to(dtype), sin2.to(dtype))


def _lanes(attrs: Rotation, table: Tensor, rows: Rows | None, count: int) -> tuple[Tensor, Tensor]:
    """What a table [s_max, 1 or b, 1, width] holds for both lanes, each [1 or b, 1, count, r/2]."""
    first, second = columns(attrs, table)
    one = _look_up(first, rows, count)
    return one, one if second is first else _look_up(second, rows, count)


def _look_up(table: Tensor, rows: Rows | None, count: int) -> Tensor:
    if rows is None:
        return table[:count].permute(1, 2, 0, 3)
    index = rows.index
    if table.shape[1] == 1:
        found = table[:, 0, 0].index_select(0, index.reshape(-1))
        return found.reshape(index.shape[0], 1, count, table.shape[3])
    batch = torch.arange(table.shape[1], device=index.device)[:, None]
    return table[index, batch, 0][:, None]


def _made(
    attrs: Rotation, inv_freq: Tensor, rows: Rows | None, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times inv_freq.

    angle_precision="exact": fp64 holds the product of an fp32 number and a position below 2^29
    exactly, so that the result is off by one rounding.
    """
    inv_freq = inv_freq.reshape(-1)
    if rows is None:
        position = torch.arange(count, device=inv_freq.device)[None, None, :, None]
    else:
        position = rows.index[:, None, :, None]
    if attrs.angle_precision == "exact":
        angle = position.double() * inv_freq.double()
        return angle.cos().to(dtype), angle.sin().to(dtype)
    angle = (position.float() * inv_freq).float().to(dtype)
    return angle.cos(), angle.sin()


def scaled(tables: Tables, factor: float) -> Tables:
    """The tables times attention_factor * output_scale; shared tensors stay shared."""
    if factor == 1.0:
        return tables
    cos1, sin1, cos2, sin2 = tables
    one = cos1 * factor, sin1 * factor
    return (*one, *one) if cos2 is cos1 else (*one, cos2 * factor, sin2 * factor)
