"""Compiles norm_rope.cu for a step."""

from __future__ import annotations

from functools import cache

from ropegraph.engines.cuda_rope.compiler import compile_kernels, new_flag
from ropegraph.engines.cuda_rope.launch import Nothing
from ropegraph.engines.cuda_rope.norm import (
    NormJob,
    NormVariant,
    norm_jobs,
    norm_shape,
    norm_variant,
    source,
    widest_vector,
)
from ropegraph.engines.cuda_rope.norm_launch import NormLaunch, NormLoaded
from ropegraph.lowering.engine import Device, Executable, Step


@cache
def load(variant: NormVariant, index: int) -> NormLoaded:
    """Compile and load, once per variant and GPU."""
    made = compile_kernels(source(), variant.options, variant.kernels, index)
    found = made.kernels
    vector, last = found.get("norm_vector", 0), found.get("norm_sum", 0)
    return NormLoaded(made.driver, made.context, vector, found["norm_any"], last)


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
