"""Captured launches: when the same buffers come again, one CUDA graph replaces all launches.

The first call with a set of buffers launches directly, the second captures, later ones replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ropegraph.execution.signature import Forms, Signature, addresses_of, form_check

# Sets of buffers that take turns: the layers of a model share one plan, and an allocator hands out
# the same few places again. A capture of two launches is small.
KEPT = 128

Addresses = tuple[int, ...]
Run = Callable[[list[Any], int], None]


def current_stream(index: int) -> int:
    """torch's current CUDA stream on a device, asked for as torch's own compilers do: 0.2 us."""
    raw: Any = getattr(torch, "_C").__dict__.get("_cuda_getCurrentRawStream")  # noqa: B009
    return torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index)


class _Shortcut(NamedTuple):
    """What was captured for a caller's pack, and how to know that pack again.

    written: which of its buffers change.  graph: kept itself, not its address alone: it must live
    as long as it may launch.
    """

    keys: tuple[Any, ...]
    has_form: Callable[..., bool]
    written: list[int]
    graph: Any
    stream: int
    device_index: int
    launch: Any


class Shortcuts:
    """The shortest way from packs, as one thread gives them, to what was captured for them."""

    def __init__(self) -> None:
        self._known: dict[Addresses, _Shortcut] = {}

    def __call__(self, pack: Mapping[Any, Any]) -> bool:
        """Launch for a known pack on its stream, if nobody captures meanwhile; else False."""
        try:
            buffers = tuple(pack.values())
            found = self._known.get(addresses_of(buffers))
            if (
                found is None
                or tuple(pack) != found.keys
                or not found.has_form(*buffers)
                or current_stream(found.device_index) != found.stream
                or torch.cuda.is_current_stream_capturing()
            ):
                return False
        except (AttributeError, RuntimeError, TypeError):
            return False  # not a pack of plain tensors: the checks of bind say what it is
        found.launch(found.graph.graphExec, found.stream)
        increment_version([buffers[i] for i in found.written])
        return True

    def add(self, pack: Mapping[Any, Any], replays: Replays) -> None:
        """Know the pack for which ``replays`` has just launched a capture, if it has."""
        if replays.launched is None or not all(type(x) is torch.Tensor for x in pack.values()):
            return
        graph, bound = replays.launched
        keys, buffers = tuple(pack), tuple(pack.values())
        try:
            addresses = addresses_of(buffers)
            # Packs that take turns mostly have one form: a check of it takes as long as a launch.
            newest = next(reversed(self._known.values()), None)
            is_alike = newest and newest.keys == keys and newest.has_form(*buffers)
            has_form = newest.has_form if newest and is_alike else form_check(buffers)
        except RuntimeError:
            return  # an entry that the graph ignores has no plain memory
        changed = {bound[i] for i in replays.written}
        written = [i for i, address in enumerate(addresses) if address in changed]
        stream, index = replays.stream, replays.device.index or 0
        found = _Shortcut(keys, has_form, written, graph, stream, index, replays.launch)
        _keep(self._known, addresses, found)


class Replays:
    """The captures of one plan for one thread and one stream.

    written: which of the addresses in a signature are those of buffers that change.
    """

    def __init__(
        self, run: Run, device: torch.device, stream: int, written: Collection[int]
    ) -> None:
        self.run, self.device, self.stream, self.written = run, device, stream, written
        self._known: dict[Addresses, tuple[Forms, Any]] = {}
        self.launch: Any = None
        # The capture that the last call replayed, if it did, and the addresses it was made for.
        self.launched: tuple[Any, Addresses] | None = None

    def __call__(self, env: list[Any], signature: Signature) -> None:
        """Launch the steps on ``env``, whose buffers ``signature`` identifies."""
        self.launched = None
        addresses, forms = signature
        seen, graph = self._known.get(addresses, (None, None))
        is_known = seen == forms
        # A caller who captures wants our launches in a graph of his own.
        if not is_known or torch.cuda.is_current_stream_capturing():
            self.run(env, self.stream)
            if not is_known:
                _keep(self._known, addresses, (forms, None))
            return
        graph = graph or self._capture(env)
        _keep(self._known, addresses, (forms, graph))
        self.launch(graph.graphExec, self.stream)
        self.launched = graph, addresses

    def _capture(self, env: list[Any]) -> Any:
        """Record the launches of all steps, without running them."""
        cupy: Any = import_module("cupy")
        # Graph.launch of a stream object costs twice the call that it makes.
        self.launch = cupy.cuda.runtime.graphLaunch
        with cupy.cuda.Device(self.device.index):
            side = cupy.cuda.Stream(non_blocking=True)
            # Other threads may allocate or synchronize meanwhile; that is no business of ours.
            side.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
            try:
                self.run(env, side.ptr)
            finally:
                graph = side.end_capture()
        return graph


def _keep(known: dict[Addresses, Any], addresses: Addresses, value: Any) -> None:
    """Keep a value as the newest of at most KEPT."""
    known.pop(addresses, None)
    known[addresses] = value
    if len(known) > KEPT:
        del known[next(iter(known))]
