"""LongRoPE: a divisor for each frequency, one list for short sequences and one for long ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.angles.checks import (
    Device,
    as_count,
    as_dtype,
    as_factor,
    as_length,
    as_number,
    as_rotated,
)
from ropegraph.angles.powers import positions_per_radian
from ropegraph.angles.result import RopeAngles
from ropegraph.angles.yarn import stretch_of
from ropegraph.errors import GraphError


def longrope(
    *,
    head_dim: int,
    short_factor: Sequence[float] | Tensor,
    long_factor: Sequence[float] | Tensor,
    original_max_position_embeddings: int,
    seq_len: int | Tensor | None = None,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    rope_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """The default frequencies divided by long_factor if seq_len is more than
    original_max_position_embeddings, else (or with None) by short_factor.

    short_factor, long_factor: r/2 positive numbers each. seq_len: an integer, or an integer tensor
    of one element; a tensor is never read on the host, and inv_freq is made on its device. Lists
    are copied to that device, and the copy waits for it: where that matters, as in a CUDA graph,
    give both factors as tensors that are there already, in ``dtype``.
    factor: None is max_position_embeddings / original_max_position_embeddings.
    Returns inv_freq [r/2] in ``dtype`` (f32 or f64), radians per position, and attention_factor: as
    given, else sqrt(1 + ln(factor) / ln(original_max_position_embeddings)), 1 for a factor up to 1.
    Raises GraphError if a list is not r/2 long or a number is not positive.
    Source: arXiv:2402.13753; transformers, ``longrope``.
    """
    rotated = as_rotated("longrope", head_dim, partial_rotary_factor)
    theta = as_number("longrope", "rope_theta", rope_theta)
    name = "original_max_position_embeddings"
    original = as_count("longrope", name, original_max_position_embeddings, low=2)
    dtype = as_dtype("longrope", dtype)
    length, device = as_length("longrope", 1 if seq_len is None else seq_len, device)
    if attention_factor is None:
        stretch = stretch_of("longrope", factor, max_position_embeddings, original)
        growth = max(math.log(stretch), 0.0) / math.log(original)
        attention = math.sqrt(1.0 + growth)
    else:
        attention = as_factor("longrope", "attention_factor", attention_factor)
    scale = positions_per_radian(theta, rotated, device=device, dtype=dtype)
    short = _divisors("short_factor", short_factor, scale)
    long = _divisors("long_factor", long_factor, scale)
    if isinstance(length, Tensor):
        divisors = torch.where(length > original, long, short)
    else:
        divisors = long if length > original else short
    return RopeAngles(1.0 / (divisors * scale), attention)


def _divisors(name: str, given: object, like: Tensor) -> Tensor:
    """[r/2] divisors of the type and on the device of ``like``."""
    pairs = like.shape[0]
    if isinstance(given, Tensor):
        if given.shape != like.shape or given.dtype is not like.dtype:
            raise GraphError(
                f"longrope: {name} is {given.dtype} {list(given.shape)}; "
                f"use {like.dtype} [{pairs}], or a list"
            )
        if given.device != like.device:
            raise GraphError(f"longrope: {name} is on {given.device}, not on {like.device}")
        return given
    if not isinstance(given, (list, tuple)):
        raise GraphError(f"longrope: {name}={given!r:.60}; use a list of {pairs} numbers")
    items = list(cast(Any, given))
    if len(items) != pairs:
        raise GraphError(
            f"longrope: {name} has {len(items)} entries; use {pairs}, one for each pair of the "
            f"{2 * pairs} rotated channels"
        )
    numbers = [as_number("longrope", f"{name}[{i}]", x) for i, x in enumerate(items)]
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)
