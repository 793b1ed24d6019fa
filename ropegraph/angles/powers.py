"""The powers of rope_theta that all rope types start from."""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.angles.checks import Device


def positions_per_radian(
    rope_theta: float | Tensor,
    rotated: int,
    *,
    over: int | None = None,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[rotated/2]: ``rope_theta ** (2i / over)``, the inverse of the inverse frequency.

    over: the width that the exponents run over; None means ``rotated``. rope_theta: a number, or a
    tensor of one element on the device. Every step is in ``dtype``, in the order in which
    transformers takes it, so fp32 results agree with it bit for bit on the same device.
    """
    exponents = torch.arange(0, rotated, 2, dtype=dtype, device=device) / (over or rotated)
    base = rope_theta.to(dtype) if isinstance(rope_theta, Tensor) else rope_theta
    return torch.pow(base, exponents)
