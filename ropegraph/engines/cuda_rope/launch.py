"""Launches with arguments packed at build: a call patches addresses and nothing else."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ropegraph.engines.cuda_rope.cupy_types import Driver
from ropegraph.engines.cuda_rope.job import Job
from ropegraph.engines.cuda_rope.params import Params, packed, pointers_of
from ropegraph.engines.cuda_rope.shape import LANES, Grid, Shape, grid_of, shape_of
from ropegraph.errors import GraphError, InternalError

# Bits that the kernel sets in its flag.
FAULTS = {
    1: "ragged offsets or cu_seqlens are negative or decrease",
    2: "a ragged or packed sequence ends past its buffer",
    4: "a position lies outside of the table",
    8: "the length of a sequence is no multiple of 2 cp_size",
    16: "cache_positions outside of the cache; their rows were not written",
}


@dataclass(frozen=True)
class Loaded:
    """The kernels of a variant in the context of one GPU.  vector: 0 if the variant has none."""

    driver: Driver
    context: int
    vector: int
    single: int


class _Block(threading.local):
    """A thread's own copy of the parameters: another thread may be in a launch meanwhile."""

    def __init__(self, template: bytes) -> None:
        self.params = Params.from_buffer_copy(template)
        self.words = (ctypes.c_uint64 * (len(template) // 8)).from_buffer(self.params)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.address = ctypes.addressof(self.arguments)


class _Kernel:
    """A kernel for given jobs.  pointers: word of the block, slot, address bits that must be 0."""

    def __init__(
        self, function: int, jobs: Sequence[Job], shape: Shape, warps: int, flag: int
    ) -> None:
        self.function, self.parts, self.warps = function, shape.parts, warps
        if jobs[0].kind.sequences == "ragged":
            batch, tiles = 1, warps  # of each call its own
        else:
            batch, tiles = max(job.dim[0] for job in jobs), shape.tiles
        self.grid = grid_of(batch, tiles, shape.parts, warps, shape.log_group)
        self.block = _Block(packed(jobs, shape, self.grid, flag))
        self.pointers = tuple((p.word, p.slot, p.mask) for p in pointers_of(jobs, shape.vec))


class Launcher:
    """What launches the kernels of a step, in the context of one GPU."""

    can_be_captured = True
    calls_torch = False

    def __init__(self, name: str, driver: Driver, context: int) -> None:
        self.name, self.driver, self.context = name, driver, context

    def launch(
        self, function: int, blocks: tuple[int, int, int], threads: int, stream: int, arguments: int
    ) -> None:
        """Launch in the context that owns the kernel, whichever is current in this thread."""
        driver = self.driver
        current = driver.ctxGetCurrent()
        if current != self.context:
            driver.ctxSetCurrent(self.context)
        try:
            driver.launchKernel(function, *blocks, threads, 1, 1, 0, stream, arguments, 0)
        except Exception as error:
            raise InternalError(
                f"cuda.rope could not launch {self.name!r} (blocks {blocks}, stream {stream:#x}): "
                f"{error}"
            ) from error
        finally:
            if current != self.context:
                driver.ctxSetCurrent(current)


class DenseLaunch(Launcher):
    """Runs one step: patches addresses, picks the kernel that their alignment allows, launches."""

    def __init__(
        self, name: str, jobs: Sequence[Job], loaded: Loaded, shape: Shape, flag: int = 0
    ) -> None:
        super().__init__(name, loaded.driver, loaded.context)
        self.jobs = tuple(jobs)
        self.slow = _Kernel(loaded.single, jobs, shape_of(jobs, 1), shape.warps, flag)
        self.fast = self.slow
        if shape.vec > 1:
            self.fast = _Kernel(loaded.vector, jobs, shape, shape.warps, flag)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self._patched(env)
        self._launch(kernel, kernel.grid, stream)

    def _patched(self, env: Sequence[Tensor]) -> _Kernel:
        """The kernel for these tensors, their addresses in its parameters."""
        kernel = self.fast
        words, low_bits = kernel.block.words, 0
        for word, slot, mask in kernel.pointers:
            address = env[slot].data_ptr()
            words[word] = address
            low_bits |= address & mask
        if not low_bits and kernel is not self.slow:
            return kernel
        words = self.slow.block.words
        for word, slot, _ in self.slow.pointers:
            words[word] = env[slot].data_ptr()
        self._refuse_in_place(env)
        return self.slow

    def _refuse_in_place(self, env: Sequence[Tensor]) -> None:
        """rope_any turns a wide segment in rounds: where pairs move, a later one would read what
        an earlier one wrote.
        """
        for job in self.jobs:
            if job.kind.read_pairs == job.kind.write_pairs or job.pairs <= LANES:
                continue
            if env[job.x.slot].data_ptr() == env[job.y.slot].data_ptr():
                raise GraphError(
                    f"rope {self.name!r} changes the layout of pairs in place, in a buffer whose "
                    "base or strides are no multiple of 16 bytes; use a separate output"
                )

    def _launch(self, kernel: _Kernel, grid: Grid, stream: int) -> None:
        blocks, threads = (grid.x, grid.y, grid.z), kernel.warps * LANES
        self.launch(kernel.function, blocks, threads, stream, kernel.block.address)


class WatchedLaunch(DenseLaunch):
    """The same where the kernel reads integers that may be wrong: positions, bounds of sequences.

    flag: one int32 on the device, which collects what was wrong with them.
    """

    def __init__(
        self, name: str, jobs: Sequence[Job], loaded: Loaded, shape: Shape, flag: Tensor
    ) -> None:
        super().__init__(name, jobs, loaded, shape, flag.data_ptr())
        self.flag = flag

    def faults(self) -> tuple[str, ...]:
        """What was wrong since the build. Waits for the device."""
        bits = int(self.flag.item())
        return tuple(text for bit, text in FAULTS.items() if bits & bit)


class RaggedLaunch(WatchedLaunch):
    """The same for sequences at offsets: the grid covers as many tokens as the buffers hold."""

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self._patched(env)
        params = kernel.block.params
        most = 0
        for job, target in zip(self.jobs, params.jobs, strict=False):
            target.x_room, target.y_room = _room(env[job.x.slot]), _room(env[job.y.slot])
            target.offset_limit = max(target.x_room, target.y_room) // target.multiplier
            target.tokens = -(-target.y_room // job.x.stride[2])
            most = max(most, target.tokens)
        if most:
            self._launch(kernel, grid_of(1, most, kernel.parts, kernel.warps), stream)


def _room(buffer: Tensor) -> int:
    """Elements from the first to the last one of a tensor."""
    if not buffer.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(buffer.shape, buffer.stride(), strict=True))


def launch_of(
    name: str, jobs: Sequence[Job], loaded: Loaded, shape: Shape, new_flag: Callable[[], Tensor]
) -> DenseLaunch:
    """The launch for these jobs.  new_flag: makes the flag of one that needs it."""
    if not any(job.is_watched for job in jobs):
        return DenseLaunch(name, jobs, loaded, shape)
    is_ragged = jobs[0].kind.sequences == "ragged"
    return (RaggedLaunch if is_ragged else WatchedLaunch)(name, jobs, loaded, shape, new_flag())


class Nothing:
    """Nothing to rotate, nothing to launch."""

    can_be_captured = True
    calls_torch = False

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        return
