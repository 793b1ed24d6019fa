"""Compiles mla.cu for a step, and launches it: arguments packed at build, addresses patched."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache

from torch import Tensor

from ropegraph.engines.cuda_rope.compiler import compile_kernels
from ropegraph.engines.cuda_rope.launch import Launcher, Loaded, Nothing
from ropegraph.engines.cuda_rope.mla import (
    SOURCE,
    MlaVariant,
    Task,
    alignment,
    cut_of,
    magic,
    task_of,
    variant_of_task,
)
from ropegraph.engines.cuda_rope.shape import LANES
from ropegraph.lowering.engine import Device, Executable, Step

_ADDRESS, _I64, _I32, _U64 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64
WORD = 8


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
_MAGIC = ("shares_magic", "batch_magic", "inner_magic", "each_magic")
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


def word_of(field: str) -> int:
    """The word of the block that holds the address of a tensor."""
    return getattr(MlaParams, field).offset // WORD


def packed(task: Task, vec: int) -> bytes:
    """The block, with every address 0."""
    params, cut = MlaParams(), cut_of(task, vec)
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
    params.inner_magic, params.each_magic = magic(cut.inner), magic(cut.each)
    return bytes(params)


class _Block(threading.local):
    """A thread's own copy of the parameters: another thread may be in a launch meanwhile."""

    def __init__(self, template: bytes) -> None:
        self.params = MlaParams.from_buffer_copy(template)
        self.words = (ctypes.c_uint64 * (len(template) // WORD)).from_buffer(self.params)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.address = ctypes.addressof(self.arguments)


class _Kernel:
    """A kernel for a task.  pointers: word of the block, slot, address bits that must be 0."""

    def __init__(self, function: int, task: Task, vec: int) -> None:
        self.function, self.grid = function, cut_of(task, vec).grid
        self.threads = task.tuning.warps * LANES
        self.block = _Block(packed(task, vec))
        self.pointers = tuple(
            (word_of(field), side.slot, alignment(field, side, vec) - 1)
            for field, side in (*task.places.items(), *task.tables.items())
        )


class MlaLaunch(Launcher):
    """Runs one step: patches addresses, picks the kernel that their alignment allows, launches."""

    def __init__(self, name: str, task: Task, loaded: Loaded) -> None:
        super().__init__(name, loaded.driver, loaded.context)
        vec = variant_of_task(task).vec
        self.slow = _Kernel(loaded.single, task, 1)
        self.fast = _Kernel(loaded.vector, task, vec) if vec > 1 else self.slow

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self.fast
        if _patch(kernel, env) and kernel is not self.slow:
            kernel = self.slow
            _patch(kernel, env)
        self.launch(kernel.function, kernel.grid, kernel.threads, stream, kernel.block.address)


def _patch(kernel: _Kernel, env: Sequence[Tensor]) -> int:
    """Put the addresses into the block; return the bits of them that should be 0."""
    words, low_bits = kernel.block.words, 0
    for word, slot, mask in kernel.pointers:
        address = env[slot].data_ptr()
        words[word] = address
        low_bits |= address & mask
    return low_bits


@cache
def load(variant: MlaVariant, index: int) -> Loaded:
    """Compile and load, once per variant and GPU."""
    names = ("mla_vector", "mla_any") if variant.vec > 1 else ("mla_any",)
    made = compile_kernels(SOURCE.read_text(encoding="utf-8"), variant.options, names, index)
    vector = made.kernels.get("mla_vector", 0)
    return Loaded(made.driver, made.context, vector, made.kernels["mla_any"])


def build_mla(step: Step, device: Device) -> Executable:
    """Compile the kernels of the step for the device, and pack their arguments."""
    task = task_of(step)
    if task.is_empty:
        return Nothing()
    return MlaLaunch(step.name, task, load(variant_of_task(task), device.index))
