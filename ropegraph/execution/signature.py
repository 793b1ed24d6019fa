"""What identifies a set of buffers: where they lie, and what they are like otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

# Descriptors called by map: a third of the time of a loop that asks each buffer.
_address, _stride = Tensor.data_ptr, Tensor.stride
_shape, _dtype, _device, _grad = map(attrgetter, ("shape", "dtype", "device", "requires_grad"))

Forms = tuple[Any, ...]


class Signature(NamedTuple):
    """Addresses, and the forms that forms_of tells."""

    addresses: tuple[int, ...]
    forms: Forms


def addresses_of(buffers: Sequence[Tensor]) -> tuple[int, ...]:
    """Where each buffer starts.  Raises RuntimeError for one without plain memory."""
    return tuple(map(_address, buffers))


def forms_of(buffers: Sequence[Tensor]) -> Forms:
    """All their shapes, then all their strides, and so on."""
    return (
        *map(_shape, buffers),
        *map(_stride, buffers),
        *map(_dtype, buffers),
        *map(_device, buffers),
        *map(_grad, buffers),
    )


def form_check(buffers: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: True only if each has the form of its buffer.

    torch's own compilers ask in this way before they run what they compiled: one call into C++
    where forms_of makes dozens. It may say False of equal forms (in inference mode, say).
    """
    try:
        guards: Any = import_module("torch._C._dynamo.guards")
        check: Callable[..., bool] = guards.TensorGuards(
            *buffers,
            dynamic_dims_sizes=[list(x.shape) for x in buffers],
            dynamic_dims_strides=[list(x.stride()) for x in buffers],
        ).check
        # A torch that understands the call in another way must not be believed.
        return check if check(*buffers) else _slow_check(buffers)
    except (ImportError, AttributeError, TypeError, SystemError, RuntimeError):
        return _slow_check(buffers)


def _slow_check(buffers: Sequence[Tensor]) -> Callable[..., bool]:
    wanted = forms_of(buffers)
    return lambda *others: forms_of(others) == wanted
