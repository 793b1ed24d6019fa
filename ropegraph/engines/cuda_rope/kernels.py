"""Compiles rope.cu for a step: here and in mla_launch.py CuPy is imported."""

from __future__ import annotations

from functools import cache

import torch

from ropegraph.engines.cuda_rope.cupy_types import device_guard, import_cupy
from ropegraph.engines.cuda_rope.job import jobs_of
from ropegraph.engines.cuda_rope.launch import Loaded, Nothing, launch_of
from ropegraph.engines.cuda_rope.shape import shape_of, widest_vector
from ropegraph.engines.cuda_rope.variant import SOURCE, Variant, variant_of
from ropegraph.lowering.engine import Device, Executable, Step


@cache
def load(variant: Variant, index: int) -> Loaded:
    """Compile and load, once per variant and GPU; CuPy keeps what it compiled on disk as well."""
    cupy = import_cupy()
    with device_guard(cupy, index):
        # Makes the context of this GPU current: the primary one, which is that of torch too.
        torch.cuda.synchronize(index)
        module = cupy.RawModule(
            code=SOURCE.read_text(encoding="utf-8"), options=variant.options, backend="nvrtc"
        )
        driver = cupy.cuda.driver
        vector = module.get_function("rope_vector").kernel.ptr if variant.vec > 1 else 0
        single = module.get_function("rope_any").kernel.ptr
        return Loaded(driver, driver.ctxGetCurrent(), vector, single)


def build(step: Step, device: Device) -> Executable:
    """Compile the kernels of the step for the device, and pack their arguments."""
    jobs = tuple(job for job in jobs_of(step) if not job.is_empty)
    if not jobs:
        return Nothing()
    shape = shape_of(jobs, widest_vector(jobs))
    loaded = load(variant_of(jobs, shape), device.index)

    def new_flag() -> torch.Tensor:
        where = torch.device("cuda", device.index)
        flag = torch.zeros(1, dtype=torch.int32, device=where)
        torch.cuda.synchronize(where)
        return flag

    return launch_of(step.name, jobs, loaded, shape, new_flag)
