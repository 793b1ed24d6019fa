"""The engine: which rotations the kernels take. Imports nothing of CUDA, touches no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from ropegraph.dtypes import INDEX, DType, short
from ropegraph.engines.cuda_rope.job import Part, parts_of
from ropegraph.engines.cuda_rope.kind import kind_of, ports_of
from ropegraph.engines.cuda_rope.mla import MLA, why_not_mla
from ropegraph.engines.cuda_rope.norm import NORMS, rotation_steps, why_not_norm
from ropegraph.engines.cuda_rope.params import MOST_JOBS
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    CACHE_PORTS,
    POSITION_PORTS,
    CacheWrite,
    Op,
    Rope,
    RopeBackward,
    RopePair,
    Rotation,
)
from ropegraph.ir.rotation_shapes import merged_heads
from ropegraph.lowering.engine import Device, Executable, Step

_SERVED = (DType.HALF, DType.BFLOAT16, DType.FLOAT)
_LIMIT = 2**30  # extents are 32 bits wide in the kernel, strides and offsets 64


class CudaRope:
    """Rotary kernels built by CuPy: every layout and stride, fp16, bf16 and fp32, sm_80 and newer.

    The parts of a RopePair take one launch, and so do the outputs of an MlaKvRope, and Q and K with
    a norm before or after the rotation. Where the gradient of a norm's weight is wanted, a second,
    small launch in the same step adds that up.
    """

    name = "cuda.rope"
    ops: tuple[type[Op], ...] = (Rope, RopeBackward, CacheWrite, RopePair, *MLA, *NORMS)

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]:
        """Every broken rule, none if it can. Cheap: imports nothing, touches no GPU."""
        broken: list[str] = []
        if device.type != "cuda":
            broken.append(f"needs a CUDA device, this is {device}")
        elif device.sm < 80:
            broken.append(f"needs sm_80 or newer, this is sm_{device.sm}")
        if isinstance(step.node.attrs, MLA):
            return (*broken, *why_not_mla(step))
        is_normed = isinstance(step.node.attrs, NORMS)
        rotations = rotation_steps(step) if is_normed else [step]
        for one in rotations:
            for attrs, suffix in parts_of(one):
                if isinstance(attrs, Rotation):
                    broken += _attributes(attrs)
                broken += _ports(one, attrs, suffix)
        broken += _pair(rotations)
        if is_normed:
            broken += why_not_norm(step)
        return tuple(dict.fromkeys(broken))

    def compile(self, step: Step, device: Device) -> Executable:
        """Costly, once a step: the first place CuPy is imported."""
        if isinstance(step.node.attrs, MLA):
            from ropegraph.engines.cuda_rope.mla_launch import build_mla

            return build_mla(step, device)
        if isinstance(step.node.attrs, NORMS):
            from ropegraph.engines.cuda_rope.norm_launch import build_norm

            return build_norm(step, device)
        from ropegraph.engines.cuda_rope.launch import build

        return build(step, device)


def _attributes(attrs: Rotation) -> list[str]:
    broken: list[str] = []
    if attrs.compute is DType.DOUBLE:
        broken.append("computes in fp32, fp64 is asked for")
    if attrs.numerics == "fp32":
        return broken
    if attrs.angles not in ("cos_sin", "packed"):
        broken.append(
            f"numerics={attrs.numerics!r} reads tables of cos and sin, not {attrs.angles}"
        )
    if attrs.output_scale != 1.0 or (attrs.numerics == "nemo" and attrs.attention_factor != 1.0):
        broken.append(f"numerics={attrs.numerics!r} leaves no room for a scale")
    return broken


def _ports(step: Step, attrs: Part, suffix: str) -> list[str]:
    read, written = ports_of(attrs, suffix)
    names = () if isinstance(attrs, CacheWrite) else ANGLE_PORTS[attrs.angles]
    tables = tuple(port + suffix for port in names)
    others = (*POSITION_PORTS, *CACHE_PORTS)
    known = {read, written, *tables, *(port + suffix for port in others)}
    broken = [
        f"{port} is not read by the kernel"
        for port in step.node.inputs
        if port.endswith(suffix) and port not in known
    ]
    values = {port: step.value(port) for port in (read, written)}
    for port, value in values.items():
        if value.dtype not in _SERVED:
            broken.append(f"{port} is {short(value.dtype)}, not fp16, bf16 or fp32")
        if any(n >= _LIMIT for n in merged_heads(value.dim)):
            broken.append(f"{port} {list(value.dim)} has an extent of 2^30 or more")
    broken += [
        f"{port} is passed by value"
        for port in sorted(known)
        if step.has(port) and step.value(port).is_host
    ]
    for port in tables:
        dtype = step.value(port).dtype
        if port.startswith(("freqs", "inv_freq")) and dtype is not DType.FLOAT:
            broken.append(f"{port} is {short(dtype)}, not fp32")
        elif dtype not in _SERVED:
            broken.append(f"{port} is {short(dtype)}, not fp16, bf16 or fp32")
    for name in (*POSITION_PORTS, "cache_positions"):
        if step.has(port := name + suffix) and step.value(port).dtype not in INDEX:
            broken.append(f"{port} is {short(step.value(port).dtype)}, not int32 or int64")
    return broken + _ragged(step, values[read], values[written], "cu_seqlens" + suffix)


def _ragged(step: Step, x: Value, y: Value, bounds: str) -> list[str]:
    """Both or neither, with the same offsets and the same stride from token to token."""
    if x.ragged_offset is None and y.ragged_offset is None:
        return []
    if x.ragged_offset != y.ragged_offset or x.ragged_multiplier != y.ragged_multiplier:
        return [f"{x.name!r} and {y.name!r} lie at different ragged offsets"]
    broken: list[str] = []
    if len(x.dim) == 5 or len(y.dim) == 5:
        broken.append(f"ragged {x.name!r} has its heads in two levels")
    if step.has(bounds):
        broken.append(f"{bounds} and ragged offsets both say where the sequences of {x.name!r} lie")
    if x.stride[2] != y.stride[2] or x.stride[2] < 1:
        broken.append(
            f"ragged {x.name!r} and {y.name!r} have strides {x.stride[2]} and {y.stride[2]} from "
            "token to token; they must be equal and at least 1"
        )
    offsets = step.values[x.ragged_offset or ""]
    if offsets.dtype not in INDEX:
        broken.append(f"{offsets.name!r} is {short(offsets.dtype)}, not int32 or int64")
    return broken


# What one launch cannot vary between its two rotations, by fields of Kind.
_ONE_OF = {
    ("read", "written"): "the pair has two data types",
    ("read_pairs", "write_pairs", "is_full"): "the pair has two layouts of channels or tables",
    ("source", "table"): "the pair takes its angles from two kinds of tables",
    ("position", "id"): "the pair takes its positions from two kinds of tensors",
    ("sequences", "index"): "the pair has sequences bounded in two ways",
    ("numerics",): "the pair rounds in two ways",
}


def _pair(steps: Sequence[Step]) -> list[str]:
    """steps: each rotation's; one step where no norm stands beside it."""
    parts = [(step, *part) for step in steps for part in parts_of(step)]
    if len(parts) > MOST_JOBS:
        return [f"{len(parts)} parts; one launch takes {MOST_JOBS}"]
    rows = {
        step.value("cache_positions" + suffix).dtype
        for step, _, suffix in parts
        if step.has("cache_positions" + suffix)
    }
    if len(parts) == MOST_JOBS and not rows:
        return [f"{MOST_JOBS} parts of which none writes into a cache"]
    # Parts that turn nothing share but their data types with the others.
    turned = [kind_of(*part) for part in parts if not isinstance(part[1], CacheWrite)]
    types = [kind_of(*part) for part in parts]
    broken: list[str] = []
    for names, text in _ONE_OF.items():
        kinds = types if "read" in names else turned
        found = [[getattr(kind, name) for name in names] for kind in kinds]
        if any(one != found[0] for one in found):
            broken.append(f"{text}: {'; '.join(map(_words, found))}")
    if len(rows) > 1:
        broken.append("the pair takes cache_positions of two types")
    return broken


def _words(values: list[object]) -> str:
    return ", ".join(short(v) if isinstance(v, DType) else str(v) for v in values)
