"""Seeded random inputs in every layout that callers use, and buffers full of NaN for outputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from ropegraph.ir.graph import span

Layout = Literal["bhsd", "bshd", "packed_qkv", "expanded", "gapped", "odd_size_1"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

# Sizes that no power of two divides, and the sizes at which loops and tiles are empty or single.
ODD_SIZES = (1, 2, 3, 5, 7, 17, 33, 63, 65, 129)


def strides(dim: Sequence[int], layout: Layout = "bhsd") -> tuple[int, ...]:
    """Element strides of a tensor [b, h, s, d] in ``layout``.

    bhsd, bshd: memory in that order; bhsd is row-major for other ranks too.  packed_qkv: one of
    three such tensors side by side in each token.  expanded: one batch entry stored, read by all.
    gapped: unused elements after each head, row and batch entry.  odd_size_1: bhsd, with
    meaningless strides where the extent is 1.
    """
    if layout == "bhsd":
        return tuple(prod(dim[i + 1 :]) for i in range(len(dim)))
    _, h, s, d = dim
    match layout:
        case "bshd":
            return (s * h * d, d, h * d, 1)
        case "packed_qkv":
            return (s * 3 * h * d, d, 3 * h * d, 1)
        case "expanded":
            return (0, s * d, d, 1)
        case "gapped":
            row = d + 8
            head = s * row + 24
            return (h * head + 40, head, row, 1)
        case "odd_size_1":
            full = strides(dim, "bhsd")
            return tuple(7 if n == 1 else stride for n, stride in zip(dim, full, strict=True))


def poisoned(
    dim: Sequence[int],
    dtype: torch.dtype = torch.float32,
    layout: Layout = "bhsd",
    stride: Sequence[int] | None = None,
) -> Tensor:
    """A buffer whose every byte, gaps included, would be noticed: NaN, or the type's minimum."""
    stride = strides(dim, layout) if stride is None else stride
    store = torch.empty(span(dim, stride), dtype=dtype)
    store.fill_(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min)
    return store.as_strided(tuple(dim), tuple(stride))


def normal(
    dim: Sequence[int],
    dtype: torch.dtype = torch.float32,
    layout: Layout = "bhsd",
    seed: int = 0,
) -> Tensor:
    """Standard normal numbers, the same for the same seed and dim in every layout but expanded."""
    values = torch.randn(tuple(dim), generator=torch.Generator().manual_seed(seed))
    return placed(values.to(dtype), layout)


def placed(values: Tensor, layout: Layout) -> Tensor:
    """The same numbers in ``layout``, NaN around them; expanded keeps the first batch entry."""
    buffer = poisoned(values.shape, values.dtype, layout)
    if layout == "expanded":
        buffer[:1].copy_(values[:1])
    else:
        buffer.copy_(values)
    return buffer


def packed(rows: Sequence[Tensor], total: int, starts: Sequence[int] | None = None) -> Tensor:
    """Sequences [h, n_i, d] laid into one NaN buffer [total, h, d] (THD), one after another.

    starts: the first row of each; by default no gaps.
    """
    h, _, d = rows[0].shape
    buffer = poisoned((1, h, total, d), rows[0].dtype, "bshd")[0].transpose(0, 1)
    at = 0
    for i, sequence in enumerate(rows):
        at = at if starts is None else starts[i]
        buffer[at : at + sequence.shape[1]] = sequence.transpose(0, 1)
        at += sequence.shape[1]
    return buffer
