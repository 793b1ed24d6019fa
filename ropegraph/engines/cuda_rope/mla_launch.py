"""Compiles mla.cu for a step, and launches it: arguments packed at build, addresses patched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ropegraph.engines.cuda_rope.block import Kernel, Pointer, magic, word_of
from ropegraph.engines.cuda_rope.compiler import Loaded, load
from ropegraph.engines.cuda_rope.launcher import Launcher, Nothing
from ropegraph.engines.cuda_rope.mla import Task, task_of
from ropegraph.engines.cuda_rope.mla_shape import Cut, alignment, cut_of, vector_of
from ropegraph.engines.cuda_rope.mla_variant import variant_of_task
from ropegraph.engines.cuda_rope.shape import LANES
from ropegraph.lowering.engine import Device, Executable, Step

_ADDRESS, _I64, _I32, _U64 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64


class PlaceParams(ctypes.Structure):
    """struct Place."""

    _fields_ = [("base", _ADDRESS), ("b", _I64), ("h", _I64), ("s", _I64), ("d", _I64)]


class TableParams(ctypes.Structure):
    """struct Table."""

    _fields_ = [("base", _ADDRESS), ("s", _I64), ("d", _I64)]


# The same fields in the same order as struct Params of mla.cu.
_PLACES = (
    "kv", "k_rope", "key", "key_scale", "key_column", "key_column_scale",
    "value", "value_scale", "value_column", "value_column_scale",
)  # fmt: skip
_MAGIC = ("shares_magic", "batch_magic", "each_magic", "key_magic", "value_magic")
_NUMBERS = (
    "batch", "heads", "tokens", "nope", "v", "half", "part_heads", "shares", "batch_x",
    "log_group",
)  # fmt: skip


class MlaParams(ctypes.Structure):
    """struct Params."""

    _fields_ = [
        *((name, PlaceParams) for name in _PLACES),
        ("cos", TableParams),
        ("sin", TableParams),
        *((name, _U64) for name in _MAGIC),
        *((name, _I32) for name in _NUMBERS),
    ]


def packed(task: Task, cut: Cut) -> MlaParams:
    """The block, with every address 0."""
    params = MlaParams()
    for field, side in task.places.items():
        place = getattr(params, field)
        place.b, place.h, place.s, place.d = side.stride
    for field, side in task.tables.items():
        table = getattr(params, field)
        table.s, _, _, table.d = side.stride
    params.batch, params.heads, params.tokens = task.batch, task.heads, task.tokens
    params.nope, params.v, params.half = task.nope, task.v, task.half
    params.part_heads, params.shares = cut.part_heads, cut.shares
    params.batch_x, params.log_group = cut.batch, cut.log_group
    params.shares_magic, params.batch_magic = magic(cut.shares), magic(cut.batch)
    params.each_magic = magic(cut.each)
    params.key_magic = magic(max(1, task.key_dim))
    params.value_magic = magic(max(1, task.v))
    return params


class _MlaKernel(Kernel):
    """A kernel for a task."""

    def __init__(self, function: int, task: Task, vec: int) -> None:
        cut, sides = cut_of(task, vec), (*task.places.items(), *task.tables.items())
        pointers = (
            Pointer(word_of(MlaParams, field), side.slot, alignment(field, side, vec) - 1)
            for field, side in sides
        )
        threads = task.tuning.warps * LANES
        super().__init__(function, cut.grid, threads, packed(task, cut), pointers)


class MlaLaunch(Launcher[_MlaKernel]):
    """Runs one step: patches addresses, picks the kernel that their alignment allows, launches."""

    def __init__(self, name: str, task: Task, loaded: Loaded) -> None:
        vec, kernels = vector_of(task), loaded.kernels
        slow = _MlaKernel(kernels["mla_any"], task, 1)
        fast = _MlaKernel(kernels["mla_vector"], task, vec) if vec > 1 else slow
        super().__init__(name, loaded, slow, fast)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self.patched(env)
        self.launch(kernel.function, kernel.blocks, kernel.threads, stream, kernel.block.address)


def build_mla(step: Step, device: Device) -> Executable:
    """Compile the kernels of the step for the device, and pack their arguments."""
    task = task_of(step)
    if task.is_empty:
        return Nothing()
    return MlaLaunch(step.name, task, load(variant_of_task(task), device.index))
