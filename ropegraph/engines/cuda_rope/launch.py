"""Rotations by rope.cu: compiled for a step, and launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ropegraph.engines.cuda_rope.block import Kernel
from ropegraph.engines.cuda_rope.compiler import Loaded, load
from ropegraph.engines.cuda_rope.job import Job, jobs_of
from ropegraph.engines.cuda_rope.launcher import Launcher, Nothing, address_of, new_flag
from ropegraph.engines.cuda_rope.params import packed, pointers_of
from ropegraph.engines.cuda_rope.shape import LANES, Shape, grid_of, shape_of, widest_vector
from ropegraph.engines.cuda_rope.variant import variant_of
from ropegraph.errors import GraphError
from ropegraph.lowering.engine import Device, Executable, Step


class _RopeKernel(Kernel):
    """A kernel for given jobs."""

    def __init__(
        self, function: int, jobs: Sequence[Job], shape: Shape, warps: int, flag: int
    ) -> None:
        self.parts, self.warps = shape.parts, warps
        if jobs[0].kind.sequences == "ragged":
            batch, tiles = 1, warps  # of each call its own
        else:
            batch, tiles = max(job.dim[0] for job in jobs), shape.tiles
        grid = grid_of(batch, tiles, shape.parts, warps, shape.log_group)
        params, pointers = packed(jobs, shape, grid, flag), pointers_of(jobs, shape.vec)
        super().__init__(function, grid.blocks, warps * LANES, params, pointers)


class DenseLaunch(Launcher[_RopeKernel]):
    """Runs one step: patches addresses, picks the kernel that their alignment allows, launches."""

    def __init__(
        self,
        name: str,
        jobs: Sequence[Job],
        loaded: Loaded,
        shape: Shape,
        flag: Tensor | None = None,
    ) -> None:
        kernels, where = loaded.kernels, address_of(flag)
        slow = _RopeKernel(kernels["rope_any"], jobs, shape_of(jobs, 1), shape.warps, where)
        fast = slow
        if shape.vec > 1:
            fast = _RopeKernel(kernels["rope_vector"], jobs, shape, shape.warps, where)
        super().__init__(name, loaded, slow, fast, flag)
        self.jobs = tuple(jobs)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self.chosen(env)
        self.launch(kernel.function, kernel.blocks, kernel.threads, stream, kernel.block.address)

    def chosen(self, env: Sequence[Tensor]) -> _RopeKernel:
        """The kernel for these tensors.

        Raises GraphError where none can work in place: rope_any turns a wide segment in rounds,
        and where pairs move, a later one would read what an earlier one wrote.
        """
        kernel = self.patched(env)
        if kernel is not self.slow:
            return kernel
        for job in self.jobs:
            if job.kind.read_pairs == job.kind.write_pairs or job.pairs <= LANES:
                continue
            if env[job.x.slot].data_ptr() == env[job.y.slot].data_ptr():
                raise GraphError(
                    f"rope {self.name!r} changes the layout of pairs in place, in a buffer whose "
                    "base or strides are no multiple of 16 bytes; use a separate output"
                )
        return kernel


class RaggedLaunch(DenseLaunch):
    """The same for sequences at offsets: the grid covers as many tokens as the buffers hold."""

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kernel = self.chosen(env)
        most = 0
        for job, target in zip(self.jobs, kernel.block.params.jobs, strict=False):
            target.x_room, target.y_room = _room(env[job.x.slot]), _room(env[job.y.slot])
            target.offset_limit = max(target.x_room, target.y_room) // target.multiplier
            target.tokens = -(-target.y_room // job.x.stride[2])
            most = max(most, target.tokens)
        if most:
            blocks = grid_of(1, most, kernel.parts, kernel.warps).blocks
            self.launch(kernel.function, blocks, kernel.threads, stream, kernel.block.address)


def _room(buffer: Tensor) -> int:
    """Elements from the first to the last one of a tensor."""
    if not buffer.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(buffer.shape, buffer.stride(), strict=True))


def launch_of(
    name: str, jobs: Sequence[Job], loaded: Loaded, shape: Shape, new_flag: Callable[[], Tensor]
) -> DenseLaunch:
    """The launch for these jobs.  new_flag: makes the flag of one that needs it."""
    flag = new_flag() if any(job.is_watched for job in jobs) else None
    is_ragged = jobs[0].kind.sequences == "ragged"
    return (RaggedLaunch if is_ragged else DenseLaunch)(name, jobs, loaded, shape, flag)


def build(step: Step, device: Device) -> Executable:
    """Compile the kernels of the step for the device, and pack their arguments."""
    jobs = tuple(job for job in jobs_of(step) if not job.is_empty)
    if not jobs:
        return Nothing()
    shape = shape_of(jobs, widest_vector(jobs))
    loaded = load(variant_of(jobs, shape), device.index)
    return launch_of(step.name, jobs, loaded, shape, lambda: new_flag(device.index))
