"""The little of CuPy that launches need, with types: CuPy ships none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, cast

from ropegraph.errors import UnsupportedError


class Function(Protocol):
    """cupy.cuda.Function.  ptr: its CUfunction."""

    ptr: int


class RawKernel(Protocol):
    """cupy.RawKernel, as RawModule.get_function returns it."""

    kernel: Function


class RawModule(Protocol):
    """cupy.RawModule."""

    def get_function(self, name: str) -> RawKernel: ...


class Driver(Protocol):
    """cupy.cuda.driver: thin calls of the CUDA driver that raise on an error."""

    CUDADriverError: type[Exception]

    def ctxGetCurrent(self) -> int: ...  # noqa: N802

    def ctxSetCurrent(self, ctx: int) -> None: ...  # noqa: N802

    def launchKernel(  # noqa: N802
        self, f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared_bytes: int, stream: int, params: int, extra: int, /,
    ) -> None: ...  # fmt: skip


class Cupy(Protocol):
    """The module."""

    cuda: Any

    def RawModule(  # noqa: N802
        self, *, code: str, options: Sequence[str], backend: str
    ) -> RawModule: ...


def import_cupy() -> Cupy:
    """CuPy itself, imported here and nowhere else.

    Raises UnsupportedError if it is not installed: the node then goes to the next engine.
    """
    try:
        return cast(Cupy, import_module("cupy"))
    except ImportError as error:
        raise UnsupportedError(
            f"CuPy cannot be imported ({error}); pip install 'ropegraph[cuda13]', or cuda12",
            {"cuda.rope": ("CuPy cannot be imported",)},
        ) from error


def device_guard(cupy: Cupy, index: int) -> AbstractContextManager[object]:
    """A context in which GPU ``index`` is the current one."""
    return cupy.cuda.Device(index)
