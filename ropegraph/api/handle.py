"""Handles and streams. Without a GPU they are inert, so that one script runs everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ropegraph.api.checks import as_count
from ropegraph.compile import device_of
from ropegraph.engines.cudnn_sdpa.facts import version_name
from ropegraph.errors import GraphError


@dataclass
class Handle:
    """A place to run: a device, and a stream or None for torch's current one."""

    device: torch.device
    stream: int | None = None
    is_open: bool = True

    def require_open(self) -> None:
        if not self.is_open:
            raise GraphError("this handle was destroyed; make another with create_handle()")


def as_handle(given: object, argument: str = "handle") -> Handle:
    """Read a handle that is open."""
    if not isinstance(given, Handle):
        raise GraphError(f"{argument}={given!r:.60}; use what create_handle() returns")
    given.require_open()
    return given


def create_handle() -> Handle:
    """A handle for the current CUDA device, or for the CPU where there is none."""
    if torch.cuda.is_available():
        return Handle(torch.device("cuda", torch.cuda.current_device()))
    return Handle(torch.device("cpu"))


def destroy_handle(handle: Handle) -> None:
    """Close a handle; executing with it raises from then on."""
    as_handle(handle).is_open = False


def set_stream(handle: Handle, stream: int) -> None:
    """Run what uses ``handle`` on a CUDA stream, given by its address."""
    as_handle(handle).stream = as_count(stream, "stream")


def get_stream(handle: Handle) -> int:
    """The stream of a handle; torch's current one unless set_stream was called. 0 on a CPU."""
    as_handle(handle)
    if handle.stream is not None:
        return handle.stream
    if handle.device.type == "cuda":
        return torch.cuda.current_stream(handle.device).cuda_stream
    return 0


def backend_version() -> int:
    """The version of the cuDNN backend as 91900 for 9.19.0; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return torch.backends.cudnn.version() or 0


def backend_version_string() -> str:
    """backend_version() as text: "9.19.0"."""
    return version_name(backend_version())


@dataclass(frozen=True)
class DeviceProperties:
    """What planning needs to know of a device: its type and compute capability (0 on a CPU)."""

    type: str
    sm_version: int


def create_device_properties(device: torch.device | str | int | None = None) -> DeviceProperties:
    """The properties of a device, by default of the one that create_handle() would take."""
    try:
        where = create_handle().device if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise GraphError(f"create_device_properties: device={device!r:.60}: {error}") from error
    found = device_of(where)
    return DeviceProperties(found.type, found.sm)
