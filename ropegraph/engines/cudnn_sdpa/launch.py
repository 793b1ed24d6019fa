"""A finished plan on the caller's buffers: pointers by uid, this thread's handle, the stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_float, c_void_p
from typing import Any

import torch

from ropegraph.engines.cudnn_sdpa.handles import handle_of
from ropegraph.engines.cudnn_sdpa.operands import is_usable_scale
from ropegraph.engines.cudnn_sdpa.places import Places, places_of
from ropegraph.engines.cudnn_sdpa.plans import BuiltPlan, plan_of
from ropegraph.engines.cudnn_sdpa.recipe import Recipe, recipe_of
from ropegraph.engines.cudnn_sdpa.repair import Repair, repair_of
from ropegraph.errors import GraphError
from ropegraph.lowering.engine import Device, Executable, Step


def build(step: Step, device: Device) -> Executable:
    """The executable of a step.  Raises UnsupportedError if cuDNN has no plan for it."""
    recipe = recipe_of(step, device)
    return Launch(step.name, recipe, plan_of(recipe, step.name))


class _Local(threading.local):
    """What one thread writes while it calls: its pointers, its host scale, its scratch memory."""

    def __init__(self, count: int) -> None:
        self.pointers: Array[c_void_p] = (c_void_p * count)()
        self.scale = c_float()
        self.scratch: _Scratch | None = None


class _Scratch:
    """Scratch memory, its address, and where the repair's copies lie in it."""

    def __init__(self, memory: torch.Tensor, repair: Repair | None) -> None:
        self.memory, self.address = memory, memory.data_ptr()
        self.rooms = [] if repair is None else repair.rooms(memory)


class Launch:
    """One attention step.

    workspace_bytes: scratch memory that it needs while it runs.
    """

    launches_by_address = True  # but for a repair, which sees to torch's modes by itself
    needs_alignment = True

    def __init__(self, name: str, recipe: Recipe, plan: BuiltPlan) -> None:
        self.name, self.plan, self.index = name, plan, recipe.device.index
        self.scale_unit = recipe.scale_unit
        uids, self.call = entry(plan)
        self.places: Places = places_of(recipe, uids, plan.workspace_bytes)
        self.repair: Repair | None = repair_of(recipe, self.places)
        self.workspace_bytes = self.places.workspace_bytes
        self.local = _Local(len(uids))
        self.is_one_of_many = torch.cuda.device_count() > 1

    def __call__(self, env: Sequence[Any], stream: int) -> None:
        if self.is_one_of_many:
            with torch.cuda.device(self.index):
                self._run(env, stream)
        else:
            self._run(env, stream)

    def _run(self, env: Sequence[Any], stream: int) -> None:
        local, places = self.local, self.places
        pointers = local.pointers
        for place, slot in places.buffers:
            pointers[place] = env[slot].data_ptr()
        for place, offsets in places.offsets:
            pointers[place] = offsets.data_ptr()
        if places.host_scale is not None:
            place, slot = places.host_scale
            local.scale.value = self._scale(float(env[slot]))
            pointers[place] = addressof(local.scale)
        scratch = self._scratch(env[-1])
        for place, start in places.in_scratch:
            pointers[place] = scratch.address + start
        if self.repair is not None:
            self._repair(self.repair, env, scratch.rooms, stream)
        handle = handle_of(self.plan.fe, self.index, stream)
        try:
            self.call(pointers, scratch.address, handle)
        except (RuntimeError, ValueError) as error:
            raise GraphError(f"node {self.name!r}: cuDNN refused to run: {error}") from error

    def _repair(
        self, repair: Repair, env: Sequence[Any], rooms: list[torch.Tensor], stream: int
    ) -> None:
        with torch.inference_mode():
            self._repair_on(repair, env, rooms, stream)

    def _repair_on(
        self, repair: Repair, env: Sequence[Any], rooms: list[torch.Tensor], stream: int
    ) -> None:
        # Entering a stream costs 40 us of host time, so it is not entered twice.
        if torch.cuda.current_stream(self.index).cuda_stream == stream:
            repair(env, rooms)
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.index)):
            repair(env, rooms)

    def _scale(self, given: float) -> float:
        if not is_usable_scale(given):
            raise GraphError(
                f"node {self.name!r}: attn_scale={given} is read at execute, and cuDNN gives NaN "
                "unless it is positive; use engines=('torch',)"
            )
        return given * self.scale_unit

    def _scratch(self, memory: torch.Tensor) -> _Scratch:
        found = self.local.scratch
        if found is None or found.address != memory.data_ptr():
            found = self.local.scratch = _Scratch(memory, self.repair)
        return found


def entry(plan: BuiltPlan) -> tuple[list[int], Callable[[Array[c_void_p], int, Any], None]]:
    """The uids in the order of the pointers, and the call that takes them.

    FE's public execute costs 86 us of host time, its inner entry 12 us (H200, forward at 256
    tokens). The inner one is used where this release has it.
    """
    graph: Any = plan.graph
    try:
        inner = graph._lowered_graph
        inner._prepare_variant_pack_template()
        uids: list[int] = list(inner._get_variant_pack_uids_sorted())
        run = inner._execute_with_raw_ptrs
        chosen: int = graph.plans[plan.index].cpp_index
    except AttributeError:
        return plan.uids, public_entry(plan)
    count = len(uids)

    def call(pointers: Array[c_void_p], workspace: int, handle: Any) -> None:
        run(addressof(pointers), count, workspace, handle.backend_handle, chosen)

    return uids, call


def public_entry(plan: BuiltPlan) -> Callable[[Array[c_void_p], int, Any], None]:
    """FE's documented call, for the uids as they were recorded."""

    def call(pointers: Array[c_void_p], workspace: int, handle: Any) -> None:
        addresses = [int(p or 0) for p in pointers]
        plan.graph.execute(dict(zip(plan.uids, addresses, strict=True)), workspace, handle)

    return call
