"""One cuDNN handle per thread and device; a thread that ends leaves its own to the next one."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ropegraph.engines.cudnn_sdpa.frontend import Frontend

_lock = threading.Lock()
_free: dict[int, list[Any]] = {}


class _Mine(threading.local):
    """The handles of one thread. cuDNN allows a handle in one thread at a time only."""

    def __init__(self) -> None:
        self.by_device: dict[int, Any] = {}
        self.keeper = _Keeper(self.by_device, _free)


class _Keeper:
    """Gives the handles back when the thread is gone.

    Destroying one could break a graph capture that is under way in another thread.
    """

    def __init__(self, by_device: dict[int, Any], free: dict[int, list[Any]]) -> None:
        self.by_device, self.free = by_device, free

    def __del__(self) -> None:
        # No lock: a collection may run in a thread that holds it, and append is atomic.
        for index, handle in self.by_device.items():
            self.free.setdefault(index, []).append(handle)


_mine = _Mine()


def handle_of(fe: Frontend, index: int, stream: int) -> Any:
    """This thread's handle on device ``index``, set to ``stream``."""
    handle = _mine.by_device.get(index)
    if handle is None:
        handle = _mine.by_device[index] = _take(fe, index)
    fe.set_stream(handle, stream)
    return handle


def _take(fe: Frontend, index: int) -> Any:
    with _lock:
        left = _free.get(index)
        if left:
            return left.pop()
    with torch.cuda.device(index):
        return fe.create_handle()
