"""A finished plan on the caller's buffers: pointers by uid, this thread's handle, the stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import c_float, c_void_p, sizeof
from typing import Any

import torch

from ropegraph.engines.cudnn_sdpa.handles import handle_of
from ropegraph.engines.cudnn_sdpa.plans import BuiltPlan, plan_of, pointers_call
from ropegraph.engines.cudnn_sdpa.recipe import Recipe, recipe_of
from ropegraph.errors import GraphError
from ropegraph.lowering.engine import Device, Executable, Step

ALIGNMENT = 256


def build(step: Step, device: Device) -> Executable:
    recipe = recipe_of(step, device)
    return Launch(step.name, recipe, plan_of(recipe, step.name))


class _Local(threading.local):
    """What one thread writes while it calls: its pointers, its host scale, its workspaces."""

    def __init__(self, count: int) -> None:
        self.pointers = (c_void_p * count)()
        self.scale = c_float()
        self.scratch: dict[int, torch.Tensor] = {}


class Launch:
    """One attention step.

    workspace_bytes: scratch memory that it needs while it runs: cuDNN's own, then the outputs
    nobody reads.
    """

    def __init__(self, name: str, recipe: Recipe, plan: BuiltPlan) -> None:
        self.name, self.plan, self.index = name, plan, recipe.device.index
        self.unit = recipe.scale_unit
        self.uids, self.call, self.cpp_index = pointers_call(plan.graph) or ([], None, None)
        if self.call is None:
            self.uids = [uid for uid, _, _ in recipe]
        order = {uid: i for i, uid in enumerate(self.uids)}
        self.buffers: list[tuple[int, int]] = []
        self.spares: list[tuple[int, int]] = []
        self.scale: tuple[int, int] | None = None
        size = _aligned(plan.workspace_bytes)
        for uid, operand, slot in recipe:
            if uid not in order:
                continue
            if operand.spare_bytes:
                self.spares.append((order[uid], size))
                size += _aligned(operand.spare_bytes)
            elif operand.port == "attn_scale" and operand.is_host:
                self.scale = (order[uid], slot)
            else:
                self.buffers.append((order[uid], slot))
        self.workspace_bytes = size
        self.local = _Local(len(self.uids))
        self.is_one_of_many = torch.cuda.device_count() > 1

    def __call__(self, env: Sequence[Any], stream: int) -> None:
        if self.is_one_of_many:
            with torch.cuda.device(self.index):
                self._run(env, stream)
        else:
            self._run(env, stream)

    def _run(self, env: Sequence[Any], stream: int) -> None:
        local = self.local
        pointers = local.pointers
        for place, slot in self.buffers:
            pointers[place] = env[slot].data_ptr()
        if self.scale is not None:
            place, slot = self.scale
            local.scale.value = float(env[slot]) * self.unit
            pointers[place] = _address(local.scale)
        scratch = self._scratch(stream)
        for place, start in self.spares:
            pointers[place] = scratch + start
        handle = handle_of(self.plan.fe, self.index, stream)
        try:
            if self.call is not None:
                self.call(
                    _address(pointers), len(self.uids), scratch, handle.backend_handle, self.cpp_index
                )
            else:
                pack = dict(zip(self.uids, pointers, strict=True))
                self.plan.graph.execute(pack, scratch, handle)
        except (RuntimeError, ValueError) as error:
            raise GraphError(f"sdpa {self.name!r}: cuDNN refused to run: {error}") from error

    def _scratch(self, stream: int) -> int:
        if not self.workspace_bytes:
            return 0
        found = self.local.scratch.get(stream)
        if found is None:
            # On the stream that uses it, so that its memory is never reused too early.
            on = torch.cuda.ExternalStream(stream, device=self.index)
            with torch.cuda.stream(on):
                size = self.workspace_bytes
                found = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.index}")
            self.local.scratch[stream] = found
        return found.data_ptr()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(cell: Any) -> int:
    from ctypes import addressof

    return addressof(cell)


assert sizeof(c_void_p) == 8
