"""The engine: which rotations the kernels take. Imports nothing of CUDA, touches no GPU."""

from __future__ import annotations

from ropegraph.dtypes import INDEX, DType, short
from ropegraph.engines.cuda_rope.job import is_full, parts_of, ports_of
from ropegraph.engines.cuda_rope.mla import MLA, why_not_mla
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Op, Rope, RopeBackward, RopePair, Rotation
from ropegraph.lowering.engine import Device, Executable, Step

_SERVED = (DType.HALF, DType.BFLOAT16, DType.FLOAT)
_LIMIT = 2**30  # extents are 32 bits wide in the kernel, strides and offsets 64


class CudaRope:
    """Rotary kernels built by CuPy: every layout and stride, fp16, bf16 and fp32, sm_80 and newer.

    Q and K of a RopePair take one launch, and so do the outputs of an MlaKvRope.
    """

    name = "cuda.rope"
    ops: tuple[type[Op], ...] = (Rope, RopeBackward, RopePair, *MLA)

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]:
        """Every broken rule, none if it can. Cheap: imports nothing, touches no GPU."""
        broken: list[str] = []
        if device.type != "cuda":
            broken.append(f"needs a CUDA device, this is {device}")
        elif device.sm < 80:
            broken.append(f"needs sm_80 or newer, this is sm_{device.sm}")
        if isinstance(step.node.attrs, MLA):
            return (*broken, *why_not_mla(step))
        for attrs, suffix in parts_of(step):
            broken += _attributes(attrs)
            broken += _ports(step, attrs, suffix)
        broken += _pair(step)
        return tuple(dict.fromkeys(broken))

    def compile(self, step: Step, device: Device) -> Executable:
        """Costly, once a step: the first place CuPy is imported."""
        if isinstance(step.node.attrs, MLA):
            from ropegraph.engines.cuda_rope.mla_launch import build_mla

            return build_mla(step, device)
        from ropegraph.engines.cuda_rope.kernels import build

        return build(step, device)


def _attributes(attrs: Rotation) -> list[str]:
    broken: list[str] = []
    if attrs.angles != "freqs":
        broken.append(f"angles come from {attrs.angles}; the kernel reads freqs")
    if attrs.numerics != "fp32":
        broken.append(f"numerics={attrs.numerics!r} asks for other roundings than the kernel's")
    if attrs.compute is DType.DOUBLE:
        broken.append("computes in fp32, fp64 is asked for")
    if attrs.cp_size != 1:
        broken.append(f"cp_size={attrs.cp_size}: row i of the table must belong to token i")
    return broken


def _ports(step: Step, attrs: Rotation, suffix: str) -> list[str]:
    read, written = ports_of(attrs, suffix)
    known = {read, written, "freqs" + suffix}
    broken = [
        f"{port} is not read by the kernel"
        for port in step.node.inputs
        if port.endswith(suffix) and port not in known
    ]
    values = {port: step.value(port) for port in (read, written)}
    for port, value in values.items():
        if value.dtype not in _SERVED:
            broken.append(f"{port} is {short(value.dtype)}, not fp16, bf16 or fp32")
        if value.is_host:
            broken.append(f"{port} is passed by value")
        if any(n >= _LIMIT for n in value.dim):
            broken.append(f"{port} {list(value.dim)} has an extent of 2^30 or more")
    if step.has("freqs" + suffix):
        table = step.value("freqs" + suffix)
        if table.dtype is not DType.FLOAT:
            broken.append(f"freqs is {short(table.dtype)}, not fp32")
    return broken + _ragged(step, values[read], values[written])


def _ragged(step: Step, x: Value, y: Value) -> list[str]:
    """Both or neither, with the same offsets and the same stride from token to token."""
    if x.ragged_offset is None and y.ragged_offset is None:
        return []
    if x.ragged_offset != y.ragged_offset or x.ragged_multiplier != y.ragged_multiplier:
        return [f"{x.name!r} and {y.name!r} lie at different ragged offsets"]
    broken: list[str] = []
    if x.stride[2] != y.stride[2] or x.stride[2] < 1:
        broken.append(
            f"ragged {x.name!r} and {y.name!r} have strides {x.stride[2]} and {y.stride[2]} from "
            "token to token; they must be equal and at least 1"
        )
    offsets = step.values[x.ragged_offset or ""]
    if offsets.dtype not in INDEX:
        broken.append(f"{offsets.name!r} is {short(offsets.dtype)}, not int32 or int64")
    return broken


def _pair(step: Step) -> list[str]:
    """What one launch cannot vary between its two rotations."""
    parts = parts_of(step)
    if len(parts) < 2:
        return []
    (a, first), (b, second) = parts
    broken: list[str] = []
    for i, what in enumerate(("read", "written")):
        x, y = (step.value(ports_of(p, s)[i]) for p, s in parts)
        if x.dtype is not y.dtype:
            broken.append(f"the pair is {what} as {short(x.dtype)} and {short(y.dtype)}")
    x, y = (step.value(ports_of(p, s)[0]) for p, s in ((a, first), (b, second)))
    kinds = [step.values[v.ragged_offset].dtype if v.ragged_offset else None for v in (x, y)]
    if kinds[0] is not kinds[1]:
        broken.append("the pair has ragged offsets of two kinds")
    layouts = [(p.interleaved, p.interleaved_output, is_full(p)) for p in (a, b)]
    if layouts[0] != layouts[1]:
        broken.append("the pair has two layouts of channels or tables")
    return broken
