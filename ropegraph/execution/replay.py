"""Captured launches: when the same buffers come again, one CUDA graph replaces all launches.

The first call with a set of buffers launches directly, the second captures, later ones replay.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# A training loop alternates between few sets of buffers; a capture of two launches is small.
KEPT = 8

Run = Callable[[list[Any], int], None]


class Replays:
    """The captures of one plan for one thread and one stream, the latest used first."""

    def __init__(self, run: Run, device: torch.device, stream: int) -> None:
        self.run, self.device, self.stream = run, device, stream
        self.known: list[tuple[list[Any], Any]] = []

    def __call__(self, env: list[Any], signature: list[Any]) -> None:
        """Launch the steps on ``env``, whose buffers ``signature`` identifies."""
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
        graph.launch(self._external)

    def _capture(self, env: list[Any]) -> Any:
        """Record the launches of all steps, without running them."""
        cupy: Any = import_module("cupy")
        with cupy.cuda.Device(self.device.index):
            self._external: Any = cupy.cuda.ExternalStream(self.stream, self.device.index)
            side = cupy.cuda.Stream(non_blocking=True)
            # Other threads may allocate or synchronize meanwhile; that is no business of ours.
            side.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
            try:
                self.run(env, side.ptr)
            finally:
                graph = side.end_capture()
        return graph
