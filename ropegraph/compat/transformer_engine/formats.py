"""The memory formats sbhd, bshd and thd: each is a view of [b, h, s, d]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropegraph.compat.checks import as_tensor
from ropegraph.errors import GraphError

# Dims by format. The keys are what TransformerEngine calls them, and so are the enum's members.
DIMS = {"sbhd": "s, b, h, d", "bshd": "b, s, h, d", "thd": "t, h, d"}
QKVFormat = {name: name for name in DIMS}


def as_format(given: Any, where: str) -> str:
    """Read a format: its name, or a member of NVTE_QKV_Format."""
    name = str(getattr(given, "name", given)).removeprefix("NVTE_").lower()
    if name not in DIMS:
        raise GraphError(f"{where}={given!r:.60}; use one of {', '.join(map(repr, DIMS))}")
    return name


def heads(x: Tensor, layout: str) -> Tensor:
    """The data as [b, h, s, d]: a view."""
    if layout == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2)


def tokens(x: Tensor, layout: str) -> Tensor:
    """The opposite of heads()."""
    if layout == "thd":
        return x.squeeze(0).transpose(0, 1)
    return x.permute(2, 0, 1, 3) if layout == "sbhd" else x.transpose(1, 2)


def packed(shape: tuple[int, ...], layout: str, is_transposed: bool = False) -> Tensor:
    """A new tensor of a format as [b, h, s, d], for its strides alone: it has no memory.

    is_transposed: [s, b, h, d] whose memory is in the order b, s, h, d.
    """
    if is_transposed:
        s, b, *rest = shape
        return heads(torch.empty(b, s, *rest, device="meta").transpose(0, 1), layout)
    return heads(torch.empty(shape, device="meta"), layout)


def as_table(given: Any, where: str, width: int) -> Tensor:
    """Read a table of angles for data ``width`` channels wide."""
    freqs = as_tensor(given, where, "s, 1, 1, d2")
    if freqs.shape[1:3] != (1, 1):
        raise GraphError(f"{where} {list(freqs.shape)} is no table of angles; use [s, 1, 1, d2]")
    if freqs.dtype is not torch.float32:
        raise GraphError(f"{where} is {freqs.dtype}; angles need torch.float32")
    if not 0 < freqs.shape[3] <= width:
        raise GraphError(
            f"{where} {list(freqs.shape)} has {freqs.shape[3]} columns for {width} channels; "
            f"use an even number from 2 to {width - width % 2}"
        )
    return freqs


def check_rows(freqs: Tensor, where: str, rows: int, cp_size: int) -> None:
    """Raise GraphError if a table is shorter than the whole sequence, start_positions or not."""
    if freqs.shape[0] < rows * cp_size:
        ranks = f" on cp_size={cp_size} ranks" if cp_size > 1 else ""
        raise GraphError(
            f"{where} {list(freqs.shape)} has {freqs.shape[0]} rows for {rows} tokens{ranks}; use "
            f"a table of at least {rows * cp_size} rows"
        )
