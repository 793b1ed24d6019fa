"""Checks of tensors that all compat functions share; every message says what would work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropegraph.errors import GraphError


def as_tensor(given: Any, where: str, dims: str) -> Tensor:
    """Read a tensor with as many dims as ``dims`` names: "s, b, h, d"."""
    if not isinstance(given, Tensor):
        raise GraphError(f"{where}={given!r:.60} is no torch tensor; use [{dims}]")
    if given.dim() != len(dims.split(",")):
        raise GraphError(f"{where} {list(given.shape)} has {given.dim()} dims; use [{dims}]")
    return given


def check_floating(t: Tensor, where: str, bits: int = 16) -> None:
    """Raise GraphError for a tensor that only a cast would make real numbers of so many bits."""
    if not t.is_floating_point() or 8 * t.dtype.itemsize < bits:
        raise GraphError(f"{where} is {t.dtype}; use a floating type of {bits} bits or more")


def optional(given: Any, where: str, dims: str) -> Tensor | None:
    """Read a tensor, or None; an empty one stands for None where C++ has no None."""
    if given is None or (isinstance(given, Tensor) and not given.numel()):
        return None
    return as_tensor(given, where, dims)


def shape_of(given: Any) -> tuple[int, ...]:
    """The shape of a tensor; of anything else ()."""
    return tuple(given.shape) if isinstance(given, Tensor) else ()


def wants_gradient(*tensors: Tensor) -> bool:
    """True if autograd would follow an operation on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
