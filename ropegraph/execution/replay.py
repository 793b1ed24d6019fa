"""Captured launches: when the same buffers come again, one CUDA graph replaces all launches.

The first call with a set of buffers launches directly, the second captures, later ones replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ropegraph.execution.signature import Signature, addresses_of, form_check

# A training loop alternates between few sets of buffers; a capture of two launches is small.
KEPT = 8

Run = Callable[[list[Any], int], None]


def current_stream(index: int) -> int:
    """torch's current CUDA stream on a device, asked for as torch's own compilers do: 0.2 us."""
    raw: Any = getattr(torch, "_C").__dict__.get("_cuda_getCurrentRawStream")  # noqa: B009
    return torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index)


class Latest:
    """The shortest way from a caller's pack to its capture: keys and buffers as they were last."""

    def __init__(
        self,
        pack: Mapping[Any, Any],
        written: Collection[int],
        replays: Replays,
        graph: Any,
        before: Latest | None,
    ) -> None:
        buffers = tuple(pack.values())
        self.keys = tuple(pack)
        self.addresses = addresses_of(buffers)
        self.written = [i for i, address in enumerate(self.addresses) if address in written]
        # Packs that take turns mostly have one form: a check of it takes as long as a launch.
        is_alike = before is not None and before.keys == self.keys and before.has_form(*buffers)
        self.has_form = before.has_form if before and is_alike else form_check(buffers)
        # The graph itself is kept, not its address alone: it must live as long as it may launch.
        self.graph = graph
        self.stream, self.index = replays.stream, replays.device.index or 0
        self.launch = replays.launch

    def __call__(self, pack: Mapping[Any, Any]) -> bool:
        """Launch for the same pack on the same stream, if nobody captures meanwhile; else False."""
        buffers = tuple(pack.values())
        try:
            if (
                tuple(pack) != self.keys
                or addresses_of(buffers) != self.addresses
                or not self.has_form(*buffers)
                or current_stream(self.index) != self.stream
                or torch.cuda.is_current_stream_capturing()
            ):
                return False
        except (RuntimeError, TypeError):
            return False  # not a pack of plain tensors: the checks of bind say what it is
        self.launch(self.graph.graphExec, self.stream)
        increment_version([buffers[i] for i in self.written])
        return True


class Replays:
    """The captures of one plan for one thread and one stream, the latest used first.

    written: which of the addresses in a signature are those of buffers that change.
    """

    def __init__(
        self, run: Run, device: torch.device, stream: int, written: Collection[int]
    ) -> None:
        self.run, self.device, self.stream, self.written = run, device, stream, written
        self.known: list[tuple[Signature, Any]] = []
        self.launch: Any = None
        self.launched: tuple[Signature, Any] | None = None  # by the last call, if it replayed

    def __call__(self, env: list[Any], signature: Signature) -> None:
        """Launch the steps on ``env``, whose buffers ``signature`` identifies."""
        self.launched = None
        place = next((i for i, (seen, _) in enumerate(self.known) if seen == signature), -1)
        # A caller who captures wants our launches in a graph of his own.
        if place < 0 or torch.cuda.is_current_stream_capturing():
            self.run(env, self.stream)
            if place < 0:
                self.known.insert(0, (signature, None))
                del self.known[KEPT:]
            return
        graph = self.known[place][1]
        if place or graph is None:
            graph = graph or self._capture(env)
            del self.known[place]
            self.known.insert(0, (signature, graph))
        self.launch(graph.graphExec, self.stream)
        self.launched = signature, graph

    def latest(self, pack: Mapping[Any, Any], before: Latest | None) -> Latest | None:
        """What the last call replayed, under the keys of its pack; None if it replayed nothing."""
        if self.launched is None or not all(type(x) is torch.Tensor for x in pack.values()):
            return None
        signature, graph = self.launched
        written = {signature.addresses[i] for i in self.written}
        try:
            return Latest(pack, written, self, graph, before)
        except RuntimeError:
            return None  # an entry that the graph ignores has no plain memory

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
