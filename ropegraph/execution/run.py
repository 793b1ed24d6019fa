"""The hot loop: bind, then call one executable a step, or replay what was captured of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ropegraph.errors import GraphError
from ropegraph.execution.bind import Binder
from ropegraph.execution.replay import Replays, Shortcuts, current_stream
from ropegraph.ir.graph import Value
from ropegraph.lowering.engine import Executable
from ropegraph.lowering.memory import span_bytes
from ropegraph.lowering.plan import Plan


class _Local(threading.local):
    """What one thread keeps for each of its streams: an arena laid out, and captured launches."""

    def __init__(self) -> None:
        self.layouts: dict[int, list[Any]] = {}
        self.replays: dict[int, Replays] = {}
        self.shortcuts = Shortcuts()


class Runnable:
    """A compiled plan. Several threads may run it: each has its own arena.

    workspace_bytes: the virtual values of the plan, and behind them the scratch memory of whichever
    step needs most.
    """

    def __init__(self, plan: Plan, executables: Sequence[Executable]) -> None:
        self.plan = plan
        self.executables = tuple(executables)
        scratch = max((getattr(e, "workspace_bytes", 0) for e in executables), default=0)
        self.workspace_bytes = plan.workspace_bytes + scratch
        self.binder = Binder(plan, _aligned(plan, executables))
        self.device = torch.device(plan.device.type, plan.device.index)
        written = {*plan.graph.outputs, *plan.graph.rewritten}
        self._written = [i for i, (n, _) in enumerate(self.binder.required) if n in written]
        self._on_cuda = plan.device.type == "cuda"
        values, slots = plan.graph.values, plan.slots
        parts = [(slots[n], slots[v.within], v) for n, v in values.items() if v.within is not None]
        # False: parts of what the caller binds.  True: of what lies in the arena.
        self._parts = {
            in_arena: [p for p in parts if (p[2].within in plan.workspace) is in_arena]
            for in_arena in (False, True)
        }
        # Launches by address know nothing of torch's modes, and entering those takes 4 us.
        self._by_address = all(getattr(e, "launches_by_address", False) for e in executables)
        # What is read on the host while steps are called would be frozen into a capture.
        self._may_capture = (
            self._on_cuda
            and find_spec("cupy") is not None  # what captures and launches
            and not any(v.is_host and v.constant is None for v in plan.graph.values.values())
            and self._by_address
        )
        self._local = _Local()

    def __call__(
        self, buffers: Mapping[str, Any], workspace: object = None, stream: int | None = None
    ) -> None:
        """Run every step on the caller's buffers.

        workspace: a buffer of workspace_bytes; None takes this thread's own arena.
        stream: a CUDA stream handle; None means torch's current stream.
        Raises GraphError before the first launch if a buffer is wrong; an error after it names
        the outputs that were written.
        """
        if stream is None:
            stream = self.current_stream
        arena = None if workspace is None else self._as_arena(workspace)
        env = self._own_layout(stream) if arena is None else self._layout(arena)
        signature = self.binder.bind(buffers, env, arena)
        self._place_parts(env)
        try:
            if self._may_capture:
                self.replays(stream)(env, signature)
            else:
                self._run(env, stream)
        finally:
            self.touch(env)

    def touch(self, env: list[Any]) -> None:
        """Tell autograd what was written, so that it refuses what was saved of it before.

        torch sees no launch by address; for its own launches counting twice does no harm.
        """
        increment_version([env[self.binder.required[i][1]] for i in self._written])

    @property
    def current_stream(self) -> int:
        """torch's current stream on the device of the plan; 0 where there are none."""
        return current_stream(self.plan.device.index) if self._on_cuda else 0

    def environment(self, buffers: Mapping[str, Any], stream: int) -> list[Any]:
        """What executables are called with: the buffers, checked, and this thread's arena."""
        env = self._own_layout(stream)
        self.binder.bind(buffers, env)
        self._place_parts(env)
        return env

    def replays(self, stream: int) -> Replays:
        """This thread's captured launches for a stream."""
        by_stream = self._local.replays
        if stream not in by_stream:
            by_stream[stream] = Replays(self._launch, self.device, stream, self._written)
        return by_stream[stream]

    def replay(self, pack: Mapping[Any, Any]) -> bool:
        """Launch what was captured for this very pack of keys and buffers; False if nothing was."""
        return self._local.shortcuts(pack)

    def remember(self, pack: Mapping[Any, Any], stream: int | None) -> None:
        """Let replay() find what was last captured by the caller's keys.  stream: as given."""
        if self._may_capture and stream is None and self.binder.is_settled:
            self._local.shortcuts.add(pack, self.replays(self.current_stream))

    def _run(self, env: list[Any], stream: int) -> None:
        if self._by_address:
            self._launch(env, stream)
            return
        if self._on_cuda and stream != self.current_stream:
            # torch launches on its current stream, whatever the handle of the graph says.
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.device)):
                self._run_modes_off(env, stream)
            return
        self._run_modes_off(env, stream)

    def _run_modes_off(self, env: list[Any], stream: int) -> None:
        # Inference mode: an arena may have been made within the caller's, and serves outside too.
        with torch.inference_mode():
            if torch.is_autocast_enabled(self.plan.device.type):
                # Autocast would round the products of angles and of scores to 16 bits.
                with torch.autocast(self.plan.device.type, enabled=False):
                    self._launch(env, stream)
            else:
                self._launch(env, stream)

    def _launch(self, env: list[Any], stream: int) -> None:
        done = 0
        try:
            for executable in self.executables:
                executable(env, stream)
                done += 1
        except (GraphError, RuntimeError) as error:
            written = self._names_written(done)
            if written:
                kind = type(error) if isinstance(error, GraphError) else RuntimeError
                raise kind(f"{error}; already written: {', '.join(written)}") from error
            raise

    def _names_written(self, steps: int) -> list[str]:
        graph = self.plan.graph
        values = (v for step in self.plan.steps[:steps] for v in step.node.outputs.values())
        wholes = dict.fromkeys(map(graph.place, values))
        return [w for w in wholes if not graph.is_virtual(w)]

    def _own_layout(self, stream: int) -> list[Any]:
        """The layout of an arena of our own: one a thread and stream, kept for the next call."""
        layouts = self._local.layouts
        if stream not in layouts:
            arena = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
            layouts[stream] = self._layout(arena)
        return list(layouts[stream])

    def _as_arena(self, workspace: object) -> Tensor:
        size = self.workspace_bytes
        if not isinstance(workspace, Tensor) or not workspace.is_contiguous():
            raise GraphError(
                f"workspace is {type(workspace).__name__}; "
                f"use a contiguous uint8 tensor of {size} bytes"
            )
        flat = workspace.detach().reshape(-1).view(torch.uint8)
        if flat.numel() < size or workspace.device.type != self.device.type:
            raise GraphError(
                f"workspace has {flat.numel()} bytes on {workspace.device}; "
                f"this plan needs {size} bytes on {self.device} (get_workspace_size)"
            )
        if size and flat.data_ptr() % 16:
            raise GraphError("workspace is not aligned to 16 bytes")
        return flat

    def _layout(self, arena: Tensor) -> list[Any]:
        """Every virtual value in its place in the arena, room for the others, and the scratch."""
        env: list[Any] = [None] * len(self.plan.slots)
        env.append(arena[self.plan.workspace_bytes : self.workspace_bytes])
        for name, start in self.plan.workspace.items():
            env[self.plan.slots[name]] = _place(arena, start, self.plan.graph.values[name])
        self._place_parts(env, in_arena=True)
        return env

    def _place_parts(self, env: list[Any], in_arena: bool = False) -> None:
        """Values that lie within others: views of a bound buffer, or of one in the arena."""
        for slot, whole, value in self._parts[in_arena]:
            x: Tensor = env[whole]
            x = x.detach() if x.requires_grad else x
            env[slot] = x.as_strided(value.dim, value.stride, x.storage_offset() + value.start)


def _aligned(plan: Plan, executables: Sequence[Executable]) -> set[str]:
    """Floating values at steps whose executable reads 16 bytes at a time."""
    return {
        plan.graph.place(value)
        for step, executable in zip(plan.steps, executables, strict=True)
        if getattr(executable, "needs_alignment", False)
        for value in (*step.node.inputs.values(), *step.node.outputs.values())
        if plan.graph.values[value].dtype.is_float and not plan.graph.values[value].is_host
    }


def _place(arena: Tensor, start: int, value: Value) -> Tensor:
    size = span_bytes(value)
    flat = arena[start : start + size].view(getattr(torch, value.dtype.torch_name))
    if value.ragged_offset is not None:
        return flat
    return flat.as_strided(value.dim, value.stride)
