"""Lengths and bounds that are at hand, on a CPU, read before anything runs: errors by argument.

On a CUDA device nobody waits for them; kernels leave out what is wrong, and verify reports it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from ropegraph.errors import GraphError, PositionError
from ropegraph.functional.eager import has_modes, has_transforms


def is_readable(x: Tensor) -> bool:
    """True for values that are there, and that nobody has to wait for."""
    is_plain = type(x) is Tensor and not torch.compiler.is_compiling()
    return is_plain and x.device.type == "cpu" and not (has_modes() or has_transforms())


def check_new_lens(new_lens: Tensor, rows: int) -> None:
    """Raise PositionError for a number of rows that is none, before a cache is written."""
    for i, n in enumerate(cast("list[int]", new_lens.flatten().tolist())):
        if not 0 <= n <= rows:
            raise PositionError(
                f"cached_attention: new_lens of sequence {i} is {n}; it must lie in 0..{rows}, the "
                "new rows there are"
            )


def check_bounds(where: str, cu_seqlens: Tensor, rows: int, longest: int | None) -> None:
    """Raise GraphError for bounds of packed sequences that are no running sum of their lengths.

    rows: of the packed tensor.  longest: max_seqlen, None if it is not stated.
    """
    bounds = cast("list[int]", cu_seqlens.tolist())
    if bounds[0] != 0:
        raise GraphError(
            f"{where}: cu_seqlens begins with {bounds[0]}, and must with 0; of lengths it is "
            "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        )
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise PositionError(
                f"{where}: cu_seqlens decreases from {start} to {end}; give the running sum of the "
                "lengths"
            )
        if longest is not None and end - start > longest:
            raise PositionError(
                f"{where}: max_seqlen={longest}, but sequence {i} has {end - start} rows"
            )
    if bounds[-1] > rows:
        raise PositionError(
            f"{where}: cu_seqlens ends with {bounds[-1]}, but there are {rows} rows"
        )
