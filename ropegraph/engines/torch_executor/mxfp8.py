"""MXFP8 in torch: E4M3 data and E8M0 scales of blocks of 32, to the byte."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
MOST = 448.0  # the largest E4M3 number
NAN = 0x7F  # of either sign
INF = 0x7F800000


def quantize(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """bf16 ``x`` by blocks of 32 along ``axis``: the bytes of the data and of the scales.

    A scale is the largest magnitude of the block (NaN left out) / 448, rounded up to a power of
    two; data is x / scale, rounded to nearest even; what is larger than 448 becomes 448, NaN 0x7f.
    """
    before, n, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    blocks = x.float().reshape(*before, n // BLOCK, BLOCK, *after)
    size = torch.where(blocks.isnan(), 0.0, blocks.abs())
    if not size.numel():
        return torch.empty_like(x, dtype=torch.uint8), size.amin(axis + 1).byte()
    scale = _exponent(size.amax(axis + 1) * (1 / MOST))
    scaled = blocks * _inverse(scale).unsqueeze(axis + 1)
    data = scaled.clamp(-MOST, MOST).to(torch.float8_e4m3fn).view(torch.uint8)
    data = torch.where(scaled.isnan(), NAN, data)
    return data.flatten(axis, axis + 1), scale.to(torch.uint8)


def _exponent(size: Tensor) -> Tensor:
    """The E8M0 byte of fp32 numbers that are not negative, rounded up; 254 for Inf."""
    bits = size.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 the mantissa starts at 2^-127, which is byte 0.
    is_more = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    return torch.where(bits == INF, 254, exponent + is_more)


def _inverse(byte: Tensor) -> Tensor:
    """2^(127 - byte): a power of two, below the normal numbers for 254."""
    bits = torch.where(byte == 254, 0x400000, (254 - byte) << 23)
    return bits.to(torch.int32).view(torch.float32)
