"""From a recording to something that runs: validate, plan, compile, execute."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import torch

from ropegraph.api.checks import refuse_unknown
from ropegraph.api.freeze import freeze
from ropegraph.api.handle import Handle, as_handle, create_handle
from ropegraph.api.recording import Recorder
from ropegraph.api.variant_pack import Keys, meant
from ropegraph.compile import Lowered, compile_plan, device_of, lower
from ropegraph.dtypes import torch_dtype
from ropegraph.errors import GraphError
from ropegraph.execution.run import Runnable
from ropegraph.ir.contract import Fold, FoldContract
from ropegraph.ir.graph import Graph as IrGraph

_UNSERVED_EXECUTE: dict[str, Any] = dict.fromkeys(
    ("override_uids", "override_shapes", "override_strides", "tensor_uids")
)
_CPU = torch.device("cpu")


class LifeCycle:
    """Part of pygraph: FE's stages. Each brings about the ones before it; none happens twice."""

    recorder: Recorder
    name: str
    saved: list[str]
    _handle: Handle | None
    _fold: Fold
    _fold_log2: bool
    _contract: FoldContract | None
    _engines: tuple[str, ...] | None
    _frozen: IrGraph

    def __init__(self) -> None:
        self._lowered: Lowered | None = None
        self._runnables: dict[torch.device, Runnable] = {}
        self._latest: Runnable | None = None
        self._building = threading.Lock()

    def validate(self) -> None:
        """Settle names, data types and shapes; the graph cannot change from then on."""
        self._close("validate()")

    def _close(self, by: str) -> None:
        """End the recording.  by: the call that did, for whoever wants to change it afterwards."""
        if not self.recorder.closed_by:
            frozen = self._look()
            # Set first: another thread that finds the recording closed reads it.
            self._frozen = frozen
            self.recorder.close(frozen, by)

    def _look(self) -> IrGraph:
        """The graph as a value, as far as it is recorded. Looking changes nothing."""
        if self.recorder.closed_by:
            return self._frozen
        if not self.recorder.nodes:
            raise GraphError(f"graph {self.name!r} has no operation")
        frozen = self._freeze()
        if not (frozen.outputs or frozen.rewritten):
            raise GraphError(
                f"graph {self.name!r} has no output, so nothing would run; call "
                "set_output(True) on what you want written"
            )
        return frozen

    def _freeze(self) -> IrGraph:
        return freeze(self.recorder, self._fold, self._fold_log2, self._contract, tuple(self.saved))

    @cached_property
    def _keys(self) -> Keys:
        return Keys(self.recorder)

    def build_operation_graph(self) -> None:
        """Run the passes and choose an engine for every node."""
        self._close("build_operation_graph()")
        _ = self.lowered

    def _device(self) -> torch.device:
        """Where it will run: on its handle, beside the tensors it was recorded with, by default."""
        if self._handle is not None:
            return self._handle.device
        for tensor in self.recorder.tensors:
            bound = tensor.spec.bound
            if isinstance(bound, torch.Tensor) and bound.device.type != "cpu":
                return bound.device
        return create_handle().device

    def create_execution_plans(self, heuristics: object = None) -> None:
        """Plan; the heuristics are a hint."""
        self.build_operation_graph()

    def check_support(self) -> None:
        """Raise UnsupportedError, with every broken rule, if no allowed engine takes a node."""
        self.build_operation_graph()

    def build_plans(self, policy: object = None) -> None:
        """Compile every step."""
        self._close("build()")
        self._runnable(self._device())

    def build(self, heuristics: object = None, policy: object = None) -> None:
        """validate, plan and compile in one call."""
        self.build_plans(policy)

    def _runnable(self, device: torch.device) -> Runnable:
        """The compiled plan for a device: a graph built for a GPU also runs on CPU buffers."""
        found = self._runnables.get(device)
        if found is not None:
            return found
        with self._building:
            if device not in self._runnables:
                where, lowered = device_of(device), self.lowered
                if where == lowered.plan.device:
                    self._lowered, found = compile_plan(lowered)
                else:
                    _, found = compile_plan(lower(self._look(), where, self._engines))
                self._runnables[device] = found
        return self._runnables[device]

    def get_workspace_size(self) -> int:
        """Bytes of workspace that execute() needs."""
        self._close("get_workspace_size()")
        return self._runnable(self._device()).workspace_bytes

    def allocate(
        self, *names: str, device: torch.device | str | None = None
    ) -> dict[str, torch.Tensor]:
        """Uninitialised buffers of the declared shapes, strides and types, by name.

        names: of which tensors; of all outputs if none is given, those that backward_graph wants
        saved among them.  device: that of the graph if left out.  Ends the recording.
        Raises GraphError for a name that is none, and for a ragged tensor, whose length is up to
        the caller.
        """
        self._close("allocate()")
        graph, where = self._frozen, self._device() if device is None else torch.device(device)
        found: dict[str, torch.Tensor] = {}
        for name in names or graph.outputs:
            value = graph.values.get(name)
            if value is None:
                raise GraphError(
                    f"allocate: {name!r} names no tensor of graph {self.name!r}"
                    f"{meant(name, list(graph.values))}; outputs are {', '.join(graph.outputs)}"
                )
            if graph.is_virtual(name):
                raise GraphError(f"allocate: {name!r} is virtual: nobody binds it")
            if value.ragged_offset is not None:
                raise GraphError(
                    f"allocate: {name!r} is ragged; make a buffer with room for all its tokens"
                )
            dtype = torch_dtype(value.dtype)
            found[name] = torch.empty_strided(value.dim, value.stride, dtype=dtype, device=where)
        return found

    def execute(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any = None,
        handle: Handle | None = None,
        **fe_arguments: Any,
    ) -> None:
        """Run on the caller's buffers; outputs are written in place.

        variant_pack: Tensor, name or uid -> torch or DLPack tensor.  None keys and unknown uids are
        ignored, as in FE.  workspace: get_workspace_size() bytes; None takes an arena kept for this
        thread and stream.
        Raises GraphError, nothing written, for a missing, wrongly shaped, typed or placed buffer.
        """
        latest = self._latest
        is_plain = workspace is None and handle is None and not fe_arguments
        if latest is not None and is_plain and latest.replay(variant_pack):
            return
        if fe_arguments:
            refuse_unknown("execute", fe_arguments, _UNSERVED_EXECUTE)
        runnable, buffers = self._read(variant_pack, "execute")
        stream = None
        handle = self._handle if handle is None else handle
        if handle is not None:
            stream = as_handle(handle, "execute: handle").stream
        runnable(buffers, workspace, stream)
        if workspace is None and handle is None:
            runnable.remember(variant_pack, stream)
            self._latest = runnable

    def _read(self, variant_pack: Any, method: str) -> tuple[Runnable, dict[str, Any]]:
        """The plan for where the buffers are, and the buffers by the names of their values."""
        # An exact dict is the common case, and asking an abstract class takes longest.
        if type(variant_pack) is not dict and not isinstance(variant_pack, Mapping):
            raise GraphError(
                f"{method}: variant_pack is {type(variant_pack).__name__}; "
                "use a dict of tensors to buffers"
            )
        if not self.recorder.closed_by:
            self._close(f"{method}()")
        buffers = self._keys.buffers(cast("Mapping[Any, Any]", variant_pack))
        runnable = self._runnable(self._buffers_device(buffers))
        if len(buffers) > len(runnable.binder.required):
            self._refuse_virtual(buffers)
        return runnable, buffers

    def _buffers_device(self, buffers: Mapping[str, Any]) -> torch.device:
        """Where the buffers are: on a GPU if any of them is, for scalars may stay on the host."""
        for buffer in buffers.values():
            if isinstance(buffer, torch.Tensor) and not (buffer.is_cpu or buffer.is_meta):
                return buffer.device
        return _CPU if buffers else self._device()

    def _refuse_virtual(self, buffers: Mapping[str, Any]) -> None:
        graph = self._look()
        for name in buffers:
            if name in graph.values and graph.is_virtual(name):
                raise GraphError(
                    f"execute: {name!r} is virtual, it has no buffer; call set_output(True) on it "
                    "before the graph is built"
                )

    @property
    def lowered(self) -> Lowered:
        """The graph after the passes, with its plan."""
        if self._lowered is not None:
            return self._lowered
        lowered = lower(self._look(), device_of(self._device()), self._engines)
        if self.recorder.closed_by:
            self._lowered = lowered
        return lowered
