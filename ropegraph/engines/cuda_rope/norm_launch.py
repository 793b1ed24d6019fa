"""Launches of norm_rope.cu: a call patches addresses, picks the kernel, and launches it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ropegraph.engines.cuda_rope.cupy_types import Driver
from ropegraph.engines.cuda_rope.launch import FAULTS, Launcher
from ropegraph.engines.cuda_rope.norm import (
    SUM_COLUMNS,
    NormJob,
    NormShape,
    norm_shape,
    scale_alignment,
)
from ropegraph.engines.cuda_rope.params import WORD, Params, job_word, packed, pointers_of
from ropegraph.engines.cuda_rope.shape import LANES, MAX_X, Grid, Shape, alignment, grid_of

_POINTER, _I64, _I32, _F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
SUM_THREADS = 1024  # of norm_sum


class NormFields(ctypes.Structure):
    """struct Norm of norm_rope.cu."""

    _fields_ = [
        ("x", _POINTER), ("scale", _POINTER), ("inverse", _POINTER), ("sums", _POINTER),
        ("dscale", _POINTER),
        ("x_b", _I64), ("x_h", _I64), ("x_s", _I64), ("x_d", _I64),
        ("scale_h", _I64), ("scale_d", _I64), ("dscale_d", _I64),
        ("inverse_b", _I64), ("inverse_h", _I64), ("inverse_s", _I64),
        ("items_magic", ctypes.c_uint64), ("items", _I64),
        ("tiles", _I32), ("warps", _I32),
        ("epsilon", _F32), ("small", _F32), ("per", _F32), ("centre", _F32),
    ]  # fmt: skip


class NormParams(ctypes.Structure):
    """struct NormParams."""

    # The rotations come last: a kernel that writes into no cache does not have the third job.
    _fields_ = [("first", NormFields), ("second", NormFields), ("rope", Params)]


@dataclass(frozen=True)
class NormLoaded:
    """The kernels of a variant in the context of one GPU.  0: the variant has no such kernel."""

    driver: Driver
    context: int
    vector: int
    single: int
    sum: int


class _Block(threading.local):
    """A thread's own copy of the parameters: another thread may be in a launch meanwhile."""

    def __init__(self, template: bytes) -> None:
        self.params = NormParams.from_buffer_copy(template)
        self.words = (ctypes.c_uint64 * (len(template) // WORD)).from_buffer(self.params)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.address = ctypes.addressof(self.arguments)


class _Kernel:
    """A kernel for given jobs.  pointers: word of the block, slot, address bits that must be 0.

    sums: word of the block and byte offset in the scratch memory, for each job with a Dscale.
    """

    def __init__(self, function: int, jobs: Sequence[NormJob], shape: NormShape, flag: int) -> None:
        self.function, base = function, shape.base
        self.threads = base.warps * LANES
        batch = max(1, *(job.rope.dim[0] for job in jobs))
        rope_grid = grid_of(batch, base.tiles, base.parts, base.warps, base.log_group)
        self.grid = rope_grid
        if jobs[0].is_backward:
            rows = sum(shape.sum_rows(i) for i in range(len(jobs)))
            self.grid = Grid(-(-rows // base.warps), 1, 1, 0, 0)
            assert self.grid.x <= MAX_X, self.grid
        params = NormParams()
        params.rope = Params.from_buffer_copy(packed([j.rope for j in jobs], base, rope_grid, flag))
        for nth, job in enumerate(jobs):
            _pack((params.first, params.second)[nth], job, shape, nth)
        self.block = _Block(bytes(params))
        self.pointers = tuple(_pointers(jobs, base.vec))
        self.sums: list[tuple[int, int]] = []
        self.sum_blocks = self.scratch_bytes = 0
        for nth, job in enumerate(jobs):
            if job.dscale >= 0:
                self.sums.append((_word(nth, "sums"), self.scratch_bytes))
                self.sum_blocks += -(-job.rope.dim[3] // SUM_COLUMNS)
                self.scratch_bytes += 4 * max(1, shape.sum_rows(nth) * job.rope.dim[3])

    def patch(self, env: Sequence[Tensor]) -> int:
        """Fill in every address; the bits that should have been 0."""
        words, low_bits = self.block.words, 0
        for word, slot, mask in self.pointers:
            address = env[slot].data_ptr()
            words[word] = address
            low_bits |= address & mask
        if self.sums:
            scratch = env[-1].data_ptr()
            for word, offset in self.sums:
                words[word] = scratch + offset
        return low_bits


class NormLaunch(Launcher):
    """Runs one step: one launch, and a small second one where a gradient of the weight is wanted.

    flag: one int32 on the device that collects wrong positions; None where none are read.
    """

    def __init__(
        self, name: str, jobs: Sequence[NormJob], loaded: NormLoaded, vec: int, flag: Tensor | None
    ) -> None:
        super().__init__(name, loaded.driver, loaded.context)
        self.flag, self.sum = flag, loaded.sum
        address = 0 if flag is None else flag.data_ptr()
        shape = norm_shape(jobs, vec)
        # Blocks of both kernels have as many warps: that is compiled into them.
        single = norm_shape(jobs, 1)
        single = NormShape(
            _with_warps(single.base, shape.base.warps), single.turns, single.passes, single.warps
        )
        self.slow = _Kernel(loaded.single, jobs, single, address)
        self.fast = self.slow if vec == 1 else _Kernel(loaded.vector, jobs, shape, address)
        self.workspace_bytes = max(self.slow.scratch_bytes, self.fast.scratch_bytes)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self.fast
        if kernel.patch(env) and kernel is not self.slow:
            kernel = self.slow
            kernel.patch(env)
        grid, address = kernel.grid, kernel.block.address
        if grid.x and grid.y and grid.z:
            blocks = (grid.x, grid.y, grid.z)
            self.launch(kernel.function, blocks, kernel.threads, stream, address)
        if kernel.sum_blocks:
            self.launch(self.sum, (kernel.sum_blocks, 1, 1), SUM_THREADS, stream, address)

    def faults(self) -> tuple[str, ...]:
        """What was wrong with positions since the build. Waits for the device."""
        if self.flag is None:
            return ()
        bits = int(self.flag.item())
        return tuple(text for bit, text in FAULTS.items() if bits & bit)


def _with_warps(base: Shape, warps: int) -> Shape:
    return replace(base, warps=warps)


def _word(nth: int, field: str) -> int:
    return (nth * ctypes.sizeof(NormFields) + getattr(NormFields, field).offset) // WORD


def _pointers(jobs: Sequence[NormJob], vec: int) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    rope = NormParams.rope.offset // WORD
    for nth, job in enumerate(jobs):
        for p in pointers_of([job.rope], vec):
            if p.word != job_word(0, "y") or job.y_slot >= 0:
                word = rope + p.word + job_word(nth, "y") - job_word(0, "y")
                found.append((word, p.slot, p.mask))
        found.append((_word(nth, "scale"), job.scale, scale_alignment(job, vec) - 1))
        if job.x is not None:
            found.append((_word(nth, "x"), job.x.slot, alignment(job.x, vec) - 1))
        others = {"inverse": job.inverse, "dscale": job.dscale}
        found += ((_word(nth, f), slot, 0) for f, slot in others.items() if slot >= 0)
    return found


def _pack(to: NormFields, job: NormJob, shape: NormShape, nth: int) -> None:
    if job.x is not None:
        to.x_b, to.x_h, to.x_s, to.x_d = job.x.stride
    to.scale_h, to.scale_d = job.scale_stride
    to.dscale_d = job.dscale_stride
    to.inverse_b, to.inverse_h, to.inverse_s = job.inverse_stride
    tiles = shape.base.cuts[nth].tiles
    to.tiles, to.items, to.warps = tiles, job.rope.dim[0] * tiles, shape.warps[nth]
    to.items_magic = 0 if tiles <= 1 else -(-(2**64) // tiles)
    to.epsilon, to.small = job.epsilon, job.small
    to.per, to.centre = 1.0 / max(job.size, 1), float(job.zero_centered)
