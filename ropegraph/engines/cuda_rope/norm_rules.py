"""Which norms beside a rotation the kernels of norm_rope.cu take."""

from __future__ import annotations

from dataclasses import replace

from ropegraph.dtypes import DType, short
from ropegraph.engines.cuda_rope.norm import NormJob, fused_parts, norm_jobs, rotation_steps
from ropegraph.engines.cuda_rope.rules import not_served, why_not_rope
from ropegraph.lowering.engine import Step

MAX_WIDTH = 512  # channels of a head row: what a warp holds in registers


def why_not_norm(step: Step) -> list[str]:
    """Every rule that the step breaks, those of the rotation among them."""
    broken: list[str] = []
    for single in fused_parts(step):
        own = replace(step, node=single)
        attrs, x = single.attrs, own.value("input")
        if attrs.norm.compute is DType.DOUBLE:
            broken.append("computes in fp32, fp64 is asked for")
        for port in ("input", "scale"):
            broken += not_served(port, own.value(port).dtype)
        for port in ("inv_variance", "Dscale"):
            if own.has(port):
                wanted = DType.FLOAT if port == "inv_variance" else own.value("scale").dtype
                if own.value(port).dtype is not wanted:
                    broken.append(f"{port} is {short(own.value(port).dtype)}, not {short(wanted)}")
        if x.dim[3] > MAX_WIDTH:
            broken.append(f"input {list(x.dim)} has rows of more than {MAX_WIDTH} channels")
        if x.ragged_offset is not None:
            broken.append("input lies at ragged offsets")
        if attrs.rope.head_groups:
            broken.append("heads in two levels")
        if attrs.rope.numerics != "fp32":
            broken.append(f"numerics={attrs.rope.numerics!r} rounds between norm and rotation")
        if x.dim[0] * x.dim[2] >= 2**31:
            broken.append(f"input {list(x.dim)} has 2^31 tokens or more")
        broken += [f"{p} is passed by value" for p in single.inputs if own.value(p).is_host]
    if not broken and len(kinds := {_common(job) for job in norm_jobs(step)}) > 1:
        broken.append(f"the pair differs in types or in what is normalised: {sorted(kinds)}")
    return why_not_rope(rotation_steps(step)) + broken


def _common(job: NormJob) -> tuple[str, ...]:
    """What is compiled into a kernel beside the kind of rotation."""
    dtypes = [short(job.scale_dtype), *([] if job.x is None else [short(job.x.dtype)])]
    return (*dtypes, f"norm_first={job.norm_first}", f"over all heads={job.is_whole}")
