"""Checks of rope parameters: every message names the parameter, its value, and what fits."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.errors import GraphError

Device = torch.device | str | int | None


def as_number(where: str, name: str, given: object, above: float = 0.0) -> float:
    """Read a finite host number greater than ``above``."""
    number = _finite(given)
    if number is None or number <= above:
        raise GraphError(f"{where}: {name}={given!r:.60}; use a number above {above:g}")
    return number


def as_factor(where: str, name: str, given: object) -> float:
    """Read a finite host number of at least 0."""
    number = _finite(given)
    if number is None or number < 0:
        raise GraphError(f"{where}: {name}={given!r:.60}; use a number of 0 or more")
    return number


def as_count(where: str, name: str, given: object, low: int = 1) -> int:
    """Read a host integer of at least ``low``; a float that is whole counts as one."""
    number = _finite(given)
    if number is None or not number.is_integer() or number < low:
        raise GraphError(f"{where}: {name}={given!r:.60}; use an integer of {low} or more")
    return int(number)


def as_flag(where: str, name: str, given: object) -> bool:
    """Read True or False."""
    if isinstance(given, bool):
        return given
    raise GraphError(f"{where}: {name}={given!r:.60}; use True or False")


def _finite(given: object) -> float | None:
    """The number that ``given`` is, None if it is no finite host number."""
    # numpy's numbers are real ones, though not Python's.
    if isinstance(given, bool) or not isinstance(given, (int, float, Real)):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    # Not math.isfinite: torch.compile can trace a comparison.
    return number if abs(number) < math.inf else None


def as_rotated(where: str, head_dim: object, partial_rotary_factor: object) -> int:
    """r, the channels that are rotated: int(head_dim * partial_rotary_factor), even, 2 or more."""
    channels = as_count(where, "head_dim", head_dim)
    part = as_number(where, "partial_rotary_factor", partial_rotary_factor)
    if part > 1.0:
        raise GraphError(f"{where}: partial_rotary_factor={part:g}; use one up to 1")
    rotated = int(channels * part)
    if rotated < 2 or rotated % 2:
        raise GraphError(
            f"{where}: head_dim={channels} with partial_rotary_factor={part:g} rotates {rotated} "
            "channels, which are no pairs; use values whose product is even, 2 or more"
        )
    return rotated


def as_tensor(where: str, name: str, given: object, what: str) -> Tensor:
    """Read a tensor; ``what`` says of what."""
    if isinstance(given, Tensor):
        return given
    raise GraphError(f"{where}: {name}={given!r:.60} is no tensor; use {what}")


def as_dtype(where: str, given: object) -> torch.dtype:
    """Read the type of inverse frequencies or angles: half precision loses positions."""
    if given is torch.float32 or given is torch.float64:
        return cast(torch.dtype, given)
    raise GraphError(f"{where}: dtype={given!r:.60}; use torch.float32 or torch.float64")


def as_length(where: str, given: object, device: Device) -> tuple[int | Tensor, Device]:
    """Read seq_len, an integer or an integer tensor of one element, and the device to work on.

    A tensor is not read on the host, so what it holds is not checked.
    """
    if not isinstance(given, Tensor):
        return as_count(where, "seq_len", given), device
    if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        raise GraphError(f"{where}: seq_len is {given.dtype}; use an integer tensor")
    if given.numel() != 1:
        raise GraphError(
            f"{where}: seq_len has shape {list(given.shape)}; one length serves the whole call, "
            "for example position_ids.max() + 1"
        )
    if device is not None and torch.device(device).type != given.device.type:
        raise GraphError(
            f"{where}: seq_len is on {given.device}, device={str(device)!r}; use one device"
        )
    return given.reshape(()), given.device


def as_section(where: str, given: object) -> list[int]:
    """Read three widths, each 1 or more."""
    items = list(cast(Any, given)) if isinstance(given, (list, tuple)) else []
    if len(items) != 3:
        raise GraphError(
            f"{where}: mrope_section={given!r:.60}; use three integers: "
            "temporal, height and width, for example [16, 24, 24]"
        )
    return [as_count(where, "mrope_section", n) for n in items]
