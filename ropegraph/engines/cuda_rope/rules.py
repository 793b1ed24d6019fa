"""What the kernels of rotations take, and what of it those of other source files take too."""

from __future__ import annotations

from collections.abc import Sequence

from ropegraph.dtypes import INDEX, DType, short
from ropegraph.engines.cuda_rope.job import Part, parts_of
from ropegraph.engines.cuda_rope.kind import kind_of, ports_of
from ropegraph.engines.cuda_rope.params import MOST_JOBS
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import ANGLE_PORTS, CACHE_PORTS, POSITION_PORTS, CacheWrite, Rotation
from ropegraph.ir.rotation_shapes import merged_heads
from ropegraph.lowering.engine import Step

SERVED = (DType.HALF, DType.BFLOAT16, DType.FLOAT)
_LIMIT = 2**30  # extents are 32 bits wide in the kernels, strides and offsets 64


def not_served(port: str, dtype: DType) -> list[str]:
    """The types that kernels read and write."""
    return [] if dtype in SERVED else [f"{port} is {short(dtype)}, not fp16, bf16 or fp32"]


def too_large(port: str, value: Value) -> list[str]:
    """The extents that kernels can count."""
    if all(n < _LIMIT for n in merged_heads(value.dim)):
        return []
    return [f"{port} {list(value.dim)} has an extent of 2^30 or more"]


def why_not_rope(steps: Sequence[Step]) -> list[str]:
    """Every rule that rotations in one launch break.

    steps: each rotation's own where norms stand beside them; else the one step with all its parts.
    """
    broken: list[str] = []
    for step in steps:
        for attrs, suffix in parts_of(step):
            if isinstance(attrs, Rotation):
                broken += _attributes(attrs)
            broken += _ports(step, attrs, suffix)
    return broken + _pair(steps)


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
        broken += [*not_served(port, value.dtype), *too_large(port, value)]
    broken += [
        f"{port} is passed by value"
        for port in sorted(known)
        if step.has(port) and step.value(port).is_host
    ]
    for port in tables:
        dtype = step.value(port).dtype
        if port.startswith(("freqs", "inv_freq")) and dtype is not DType.FLOAT:
            broken.append(f"{port} is {short(dtype)}, not fp32")
        else:
            broken += not_served(port, dtype)
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
    """What all parts of a launch must have in common."""
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
