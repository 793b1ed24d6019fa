"""Do two strided buffers share an element? Pointers and strides decide, data is never read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ropegraph.errors import GraphError

# numpy solves the exact question, which is hard in the worst case; this bounds the search.
_MAX_WORK: Any = 10_000


class _Memory:
    """A buffer's address range for numpy, which never touches it: device memory is fine too."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__array_interface__: dict[str, Any] = {
            "data": (x.data_ptr(), True),
            "shape": tuple(x.shape),
            "strides": tuple(s * size for s in x.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def disjoint(x: Tensor, y: Tensor) -> bool:
    """True if no byte belongs to both buffers. An undecided case counts as shared."""
    if x.numel() == 0 or y.numel() == 0:
        return True
    a, b = np.asarray(_Memory(x)), np.asarray(_Memory(y))
    if not np.may_share_memory(a, b):
        return True
    try:
        return not np.shares_memory(a, b, max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return False


def overlaps(dim: Sequence[int], stride: Sequence[int]) -> bool:
    """True if two indices may reach one element, as in an expanded tensor; False is certain."""
    reach = 0
    for step, extent in sorted(zip(stride, dim, strict=True)):
        if extent > 1:
            if step <= reach:
                return 0 not in dim
            reach += (extent - 1) * step
    return False


def refuse_negative_strides(name: str, buffer: object) -> None:
    """Raise GraphError for a reversed numpy view: torch would end the process over it."""
    strides: Any = getattr(buffer, "strides", None) or ()
    if any(step < 0 for step in strides):
        raise GraphError(f"{name!r}: its buffer has negative strides {strides}; copy it first")
