"""Memory for results, by the shortest way torch has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ropegraph.api.plans import Form


def _by_inductor() -> Any:
    """What code compiled by torch allocates with on the current CUDA device; None if unknown.

    Through the dispatcher the same takes three times as long: with four results that is as much as
    a launch.
    """
    try:
        return getattr(import_module("torch._C._dynamo.guards"), "_empty_strided_cuda", None)
    except ImportError:
        return None


_empty_cuda: Any = _by_inductor()


def empty(form: Form) -> Tensor:
    """An uninitialised tensor of a form."""
    dim, stride, dtype, device = form
    if (
        _empty_cuda is not None
        and device.type == "cuda"
        and device.index == torch.cuda.current_device()
    ):
        return _empty_cuda(dim, stride, dtype)
    return torch.empty_strided(dim, stride, dtype=dtype, device=device)


def laid_out(x: Tensor, form: Form) -> Tensor:
    """A copy of a tensor in memory of its own, of that form."""
    return empty(form).copy_(x)
