"""Norm and rotation by norm_rope.cu: compiled for a step, and launched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ropegraph.engines.cuda_rope.block import WORD, Kernel, Pointer, magic, word_of
from ropegraph.engines.cuda_rope.compiler import Loaded, load
from ropegraph.engines.cuda_rope.launcher import Launcher, Nothing, address_of, new_flag
from ropegraph.engines.cuda_rope.norm import NormJob, norm_jobs
from ropegraph.engines.cuda_rope.norm_shape import (
    NormShape,
    norm_shape,
    scale_alignment,
    widest_vector,
)
from ropegraph.engines.cuda_rope.norm_variant import norm_variant
from ropegraph.engines.cuda_rope.params import Params, job_word, packed, pointers_of
from ropegraph.engines.cuda_rope.shape import LANES, MAX_X, alignment, grid_of
from ropegraph.lowering.engine import Device, Executable, Step

_POINTER, _I64, _I32, _F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
SUM_THREADS = 1024  # of norm_sum
SUM_COLUMNS = 8  # that a block of norm_sum adds up


class NormFields(ctypes.Structure):
    """struct Norm of norm_rope.cu."""

    _fields_ = [
        ("x", _POINTER), ("scale", _POINTER), ("inverse", _POINTER), ("sums", _POINTER),
        ("dscale", _POINTER), ("means", _POINTER),
        ("x_b", _I64), ("x_h", _I64), ("x_s", _I64), ("x_d", _I64),
        ("scale_h", _I64), ("scale_d", _I64), ("dscale_h", _I64), ("dscale_d", _I64),
        ("inverse_b", _I64), ("inverse_h", _I64), ("inverse_s", _I64),
        ("items_magic", ctypes.c_uint64), ("items", _I64),
        ("tiles", _I32), ("warps", _I32),
        ("epsilon", _F32), ("small", _F32), ("per", _F32), ("centre", _F32),
    ]  # fmt: skip


class NormParams(ctypes.Structure):
    """struct NormParams."""

    # The rotations come last: a kernel that writes into no cache does not have the third job.
    _fields_ = [("first", NormFields), ("second", NormFields), ("rope", Params)]


class _NormKernel(Kernel):
    """A kernel for given jobs.

    mean: the kernel that comes before it where all heads are one row of the gradient.
    scratch: word of the block and byte offset in the scratch memory, for what lies there.
    """

    def __init__(
        self, function: int, mean: int, jobs: Sequence[NormJob], shape: NormShape, flag: int
    ) -> None:
        base = shape.base
        batch = max(1, *(job.rope.dim[0] for job in jobs))
        grid = grid_of(batch, base.tiles, base.parts, base.warps, base.log_group)
        blocks = grid.blocks
        if jobs[0].is_backward:
            workers = sum(shape.workers(i) for i in range(len(jobs)))
            blocks = _blocks(workers, base.warps)
        params = NormParams()
        params.rope = packed([job.rope for job in jobs], base, grid, flag)
        for nth, job in enumerate(jobs):
            _pack((params.first, params.second)[nth], job, shape, nth)
        super().__init__(function, blocks, base.warps * LANES, params, _pointers(jobs, base.vec))
        self.scratch: list[tuple[int, int]] = []
        self.sum_blocks = self.scratch_bytes = 0
        self.mean, self.mean_blocks = mean, (0, 1, 1)
        for nth, job in enumerate(jobs):
            if job.dscale >= 0:
                self._reserve(_word(nth, "sums"), shape.sum_rows(nth, job) * job.size)
                self.sum_blocks += -(-job.size // SUM_COLUMNS)
        if jobs[0].is_backward and jobs[0].is_whole:
            items = [shape.items(nth, job) for nth, job in enumerate(jobs)]
            self.mean_blocks = _blocks(sum(items), base.warps)
            for nth, count in enumerate(items):
                self._reserve(_word(nth, "means"), count)

    def _reserve(self, word: int, floats: int) -> None:
        self.scratch.append((word, self.scratch_bytes))
        self.scratch_bytes += 4 * max(1, floats)

    def patch(self, env: Sequence[Tensor]) -> int:
        if self.scratch:
            words, scratch = self.block.words, env[-1].data_ptr()
            for word, offset in self.scratch:
                words[word] = scratch + offset
        return super().patch(env)


def _blocks(warps: int, each: int) -> tuple[int, int, int]:
    blocks = -(-warps // each)
    assert blocks <= MAX_X, blocks
    return blocks, 1, 1


class NormLaunch(Launcher[_NormKernel]):
    """Runs one step: one launch, and a small one behind it where a weight's gradient is wanted.

    Where all heads are one row, the gradient has a launch before both, for what all of them share.
    """

    def __init__(
        self, name: str, jobs: Sequence[NormJob], loaded: Loaded, vec: int, flag: Tensor | None
    ) -> None:
        kernels, where = loaded.kernels, address_of(flag)
        shape, single = norm_shape(jobs, vec), norm_shape(jobs, 1)
        # Blocks of both kernels have as many warps: that is compiled into them.
        single = replace(single, base=replace(single.base, warps=shape.base.warps))

        def made(width: str, own: NormShape) -> _NormKernel:
            mean = kernels.get(f"mean_{width}", 0)
            return _NormKernel(kernels[f"norm_{width}"], mean, jobs, own, where)

        slow = made("any", single)
        fast = slow if vec == 1 else made("vector", shape)
        super().__init__(name, loaded, slow, fast, flag)
        self.sum = kernels.get("norm_sum", 0)
        self.workspace_bytes = max(slow.scratch_bytes, fast.scratch_bytes)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self.patched(env)
        address = kernel.block.address
        if kernel.mean_blocks[0]:
            self.launch(kernel.mean, kernel.mean_blocks, kernel.threads, stream, address)
        if 0 not in kernel.blocks:
            self.launch(kernel.function, kernel.blocks, kernel.threads, stream, address)
        if kernel.sum_blocks:
            self.launch(self.sum, (kernel.sum_blocks, 1, 1), SUM_THREADS, stream, address)


def _word(nth: int, field: str) -> int:
    return nth * ctypes.sizeof(NormFields) // WORD + word_of(NormFields, field)


def _pointers(jobs: Sequence[NormJob], vec: int) -> list[Pointer]:
    found: list[Pointer] = []
    rope = word_of(NormParams, "rope")
    for nth, job in enumerate(jobs):
        for p in pointers_of([job.rope], vec):
            if p.word != job_word(0, "y") or job.y_slot >= 0:
                word = rope + p.word + job_word(nth, "y") - job_word(0, "y")
                found.append(Pointer(word, p.slot, p.mask))
        found.append(Pointer(_word(nth, "scale"), job.scale, scale_alignment(job, vec) - 1))
        if job.x is not None:
            found.append(Pointer(_word(nth, "x"), job.x.slot, alignment(job.x, vec) - 1))
        others = {"inverse": job.inverse, "dscale": job.dscale}
        found += (Pointer(_word(nth, f), slot) for f, slot in others.items() if slot >= 0)
    return found


def _pack(to: NormFields, job: NormJob, shape: NormShape, nth: int) -> None:
    if job.x is not None:
        to.x_b, to.x_h, to.x_s, to.x_d = job.x.stride
    to.scale_h, to.scale_d = job.scale_stride
    to.dscale_h, to.dscale_d = job.dscale_stride
    to.inverse_b, to.inverse_h, to.inverse_s = job.inverse_stride
    tiles = shape.base.cuts[nth].tiles
    to.tiles, to.items, to.warps = tiles, shape.items(nth, job), shape.warps[nth]
    to.items_magic = magic(tiles)
    to.epsilon, to.small = job.epsilon, job.small
    to.per, to.centre = 1.0 / max(job.size, 1), float(job.zero_centered)


def active(step: Step) -> tuple[NormJob, ...]:
    """The jobs with something to do: the gradient of a weight is written though it be 0."""
    return tuple(j for j in norm_jobs(step) if not j.rope.is_empty or j.dscale >= 0)


def build_norm(step: Step, device: Device) -> Executable:
    """Compile the kernels of the step for the device, and pack their arguments."""
    jobs = active(step)
    if not jobs:
        return Nothing()
    vec = widest_vector(jobs)
    loaded = load(norm_variant(jobs, norm_shape(jobs, vec)), device.index)
    is_watched = any(job.rope.is_watched for job in jobs)
    flag = new_flag(device.index) if is_watched else None
    return NormLaunch(step.name, jobs, loaded, vec, flag)
