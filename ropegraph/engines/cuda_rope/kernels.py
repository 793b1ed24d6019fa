"""Compiles rope.cu for a step."""

from __future__ import annotations

from functools import cache

from ropegraph.engines.cuda_rope.compiler import compile_kernels, new_flag
from ropegraph.engines.cuda_rope.job import jobs_of
from ropegraph.engines.cuda_rope.launch import Loaded, Nothing, launch_of
from ropegraph.engines.cuda_rope.shape import shape_of, widest_vector
from ropegraph.engines.cuda_rope.variant import SOURCE, Variant, variant_of
from ropegraph.lowering.engine import Device, Executable, Step


@cache
def load(variant: Variant, index: int) -> Loaded:
    """Compile and load, once per variant and GPU."""
    names = ("rope_vector", "rope_any") if variant.vec > 1 else ("rope_any",)
    made = compile_kernels(SOURCE.read_text(encoding="utf-8"), variant.options, names, index)
    vector = made.kernels.get("rope_vector", 0)
    return Loaded(made.driver, made.context, vector, made.kernels["rope_any"])


def build(step: Step, device: Device) -> Executable:
    """Compile the kernels of the step for the device, and pack their arguments."""
    jobs = tuple(job for job in jobs_of(step) if not job.is_empty)
    if not jobs:
        return Nothing()
    shape = shape_of(jobs, widest_vector(jobs))
    loaded = load(variant_of(jobs, shape), device.index)
    return launch_of(step.name, jobs, loaded, shape, lambda: new_flag(device.index))
