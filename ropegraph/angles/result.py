"""What every rope type gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RopeAngles:
    """Inverse frequencies of one rope type, and what goes with them.

    inv_freq: [r/2], f32 or f64, radians per position; r channels of a head are rotated.
    attention_factor: multiplies cos and sin. Give it to rope's ``attention_factor=``, which scales
    the rotated channels only. As an ``output_scale`` it is wrong where r < D, for that scales the
    whole row.
    axes: int64 [r/2], which row of the positions each frequency takes; None: there is one row.
    axis_count: how many rows those positions have.
    """

    inv_freq: Tensor
    attention_factor: float = 1.0
    axes: Tensor | None = None
    axis_count: int = 1
