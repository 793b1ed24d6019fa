"""Raw angles, cosines and sines, in the layout that rope reads."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ropegraph.angles.checks import as_dtype, as_factor, as_tensor
from ropegraph.angles.result import RopeAngles
from ropegraph.errors import GraphError

_POSITION_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
_TABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def freqs(
    inv_freq: RopeAngles | Tensor,
    positions: Tensor,
    *,
    width: Literal["full", "half"] = "full",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Angles in radians: the product of every position and inverse frequency.

    inv_freq: what a rope type gave, or its [r/2] tensor, f32 or f64.
    positions: [s] or [b, s], for a RopeAngles of several axes [axes, s] or [axes, b, s]; int32,
    int64, or f32 and f64 for fractions. Negative ones are fine.
    width: "full", [s, 1 or b, 1, r], the halves of the last axis equal, which rope reads with
    table_layout "first_half" or, in halves, "full"; "half", [s, 1 or b, 1, r/2], for half_width.
    dtype: f32 or f64, of the result. The product is elementwise, never a matrix product, and is
    made in the wider of dtype and that of inv_freq, then rounded once: neither autocast, nor TF32,
    nor torch's default type changes a bit. f32 holds positions up to 2^24 exactly. With an f64
    inv_freq an f32 angle is the true one, rounded.
    Raises GraphError for other shapes and types.
    """
    angles = inv_freq if isinstance(inv_freq, RopeAngles) else RopeAngles(inv_freq)
    dtype = as_dtype("freqs", dtype)
    if width not in ("full", "half"):
        raise GraphError(f"freqs: width={width!r:.60}; use 'full' or 'half'")
    table = as_tensor("freqs", "inv_freq", angles.inv_freq, "what a rope type gave, or its [r/2]")
    if table.dtype not in (torch.float32, torch.float64) or table.dim() != 1:
        raise GraphError(
            f"freqs: inv_freq is {table.dtype} {list(table.shape)}; use f32 or f64 [r/2], "
            "for fewer bits lose positions"
        )
    wide = torch.float64 if torch.float64 in (dtype, table.dtype) else torch.float32
    as_tensor("freqs", "positions", positions, "torch.arange(s), [s] or [b, s]")
    product = _columns(angles, positions).to(wide) * table.to(wide)
    half = product.to(dtype).unsqueeze(2)
    return half if width == "half" else torch.cat((half, half), dim=-1)


def cos_sin(
    angles: Tensor, dtype: torch.dtype = torch.float32, *, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``angles``, as rope's ``cos=`` and ``sin=``.

    angles: radians of any shape, f32 or f64, as ``freqs`` makes them. attention_factor: multiplies
    both before the one rounding to ``dtype`` (f16, bf16, f32, f64). It is then in the tables: leave
    rope's own ``attention_factor`` at 1.
    Returns two tensors of the shape of ``angles``.  Raises GraphError for other types.
    """
    as_tensor("cos_sin", "angles", angles, "what freqs() gave")
    if angles.dtype not in (torch.float32, torch.float64):
        raise GraphError(f"cos_sin: angles are {angles.dtype}; use torch.float32 or torch.float64")
    if dtype not in _TABLE_DTYPES:
        raise GraphError(f"cos_sin: dtype={dtype!r:.60}; use a floating type of 16 bits or more")
    factor = as_factor("cos_sin", "attention_factor", attention_factor)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def _columns(angles: RopeAngles, positions: Tensor) -> Tensor:
    """[s, 1 or b, 1 or r/2]: what each inverse frequency is multiplied by."""
    table = angles.inv_freq
    if positions.dtype not in _POSITION_DTYPES:
        raise GraphError(
            f"freqs: positions are {positions.dtype}; use int32 or int64, f32 or f64 for fractions"
        )
    if positions.device != table.device:
        raise GraphError(
            f"freqs: positions are on {positions.device}, inv_freq on {table.device}; "
            "use one device"
        )
    shape = list(positions.shape)
    if angles.axes is None:
        if len(shape) not in (1, 2):
            raise GraphError(f"freqs: positions {shape}; use [s] or [b, s]")
        rows = positions.unsqueeze(0) if len(shape) == 1 else positions
        return rows.t().contiguous().unsqueeze(2)
    n = angles.axis_count
    if len(shape) not in (2, 3) or shape[0] != n:
        raise GraphError(f"freqs: positions {shape} for {n} axes; use [{n}, s] or [{n}, b, s]")
    rows = positions.unsqueeze(1) if len(shape) == 2 else positions
    return rows.permute(2, 1, 0).index_select(2, angles.axes)
