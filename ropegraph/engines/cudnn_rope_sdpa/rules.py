"""What cuDNN's native graph of rotation and attention takes: a node's rules, a graph's rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ropegraph.dtypes import DType, short
from ropegraph.engines.cudnn_sdpa.engine import CudnnSdpa
from ropegraph.engines.cudnn_sdpa.facts import version_name
from ropegraph.ir.graph import Graph, Value, singles
from ropegraph.ir.ops import (
    POSITION_PORTS,
    Attention,
    Rope,
    RopeBackward,
    RopePair,
    Rotation,
    Sdpa,
    SdpaBackward,
    data_ports,
    op_name,
)
from ropegraph.lowering.choose import slots_of
from ropegraph.lowering.engine import Device, Step

OLDEST = 92400


def why_not(graph: Graph, device: Device) -> tuple[str, ...]:
    """Every rule that a whole graph breaks, node names in front; none if it can be recorded."""
    found = list(_graph_rules(graph))
    slots = slots_of(graph)
    for node in graph.singles:
        step = Step(node, graph.values, "cudnn.rope_sdpa", slots)
        found += [
            f"{op_name(node.attrs)} {node.name!r}: {rule}" for rule in node_rules(step, device)
        ]
    return tuple(dict.fromkeys(found))


def node_rules(step: Step, device: Device) -> tuple[str, ...]:
    """Every rule that one node breaks, apart from being alone."""
    attrs = step.node.attrs
    found: list[str] = []
    if device.type == "cuda" and device.cudnn < OLDEST:
        here = version_name(device.cudnn) if device.cudnn else "not installed"
        found.append(f"needs cuDNN 9.24 or newer, this is {here}")
    if isinstance(attrs, RopePair):
        parts = (replace(step, node=part) for part in singles(step.node))
        found += [
            rule
            for part in parts
            if isinstance(part.node.attrs, Rotation)
            for rule in _rotation(part, device)
        ]
    elif isinstance(attrs, Rotation):
        found += _rotation(step, device)
    elif isinstance(attrs, Attention):
        found += CudnnSdpa().why_not(step, device)
        if attrs.padding:
            found.append("padding and ragged tensors are not recorded beside a rotation")
        wanted = ("O",) if isinstance(attrs, Sdpa) else ("dQ", "dK", "dV")
        found += [f"{port} is not asked for" for port in wanted if not step.has(port)]
    return tuple(dict.fromkeys(found))


def _graph_rules(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if not isinstance(node.attrs, (Rope, RopeBackward, RopePair, Sdpa, SdpaBackward)):
            yield f"{op_name(node.attrs)} {node.name!r} has no node there"
    if not any(isinstance(node.attrs, Attention) for node in graph.nodes):
        yield "a graph without sdpa has no plan: cuDNN rotates only beside an attention"
    for node in graph.nodes:
        if isinstance(node.attrs, SdpaBackward):
            for port in ("dQ", "dK"):
                value = node.outputs.get(port)
                if value is not None and graph.is_virtual(value):
                    yield f"{value!r} must be bound: the backward runs from buffers only"


def _rotation(step: Step, device: Device) -> Iterator[str]:
    attrs = step.node.attrs
    assert isinstance(attrs, Rotation)
    port, _ = data_ports(attrs)
    x = step.value(port)
    if device.type != "cuda":
        yield f"needs a CUDA device, this is {device}"
    elif device.sm < 80:
        yield f"needs sm_80 or newer, this is {device}"
    if x.dtype not in (DType.HALF, DType.BFLOAT16):
        yield f"{port} is {short(x.dtype)}; cuDNN rotates fp16 and bf16"
    if x.dim[3] % 2:
        yield f"{port} has {x.dim[3]} channels, an odd number"
    if x.ragged_offset is not None:
        yield f"{port} is ragged"
    if attrs.rope_offset != x.dim[3] - attrs.rope_dim:
        yield f"rope_offset={attrs.rope_offset}; cuDNN rotates the last {attrs.rope_dim} channels"
    yield from _meaning(attrs)
    if step.has("cache"):
        yield "it writes into a cache"
    for name in POSITION_PORTS:
        if step.has(name):
            yield f"{name} is given; cuDNN rotates row i of the data by row i of freqs"
    if step.has("freqs"):
        yield from _table(attrs, step.value("freqs"))


def _meaning(attrs: Rotation) -> Iterator[str]:
    if attrs.interleaved or attrs.interleaved_output:
        yield "interleaved pairs; cuDNN pairs channel i with i + r/2"
    if attrs.attention_factor != 1.0:
        yield f"attention_factor={attrs.attention_factor}; cuDNN scales whole rows only"
    if attrs.inverse:
        yield "inverse=True"
    if attrs.angles != "freqs":
        yield f"angles={attrs.angles!r}; cuDNN reads freqs"
    if attrs.numerics != "fp32":
        yield f"numerics={attrs.numerics!r}"
    if attrs.cp_size != 1:
        yield f"cp_size={attrs.cp_size}"


def _table(attrs: Rotation, freqs: Value) -> Iterator[str]:
    if attrs.half_width or attrs.table_layout != "first_half":
        yield "freqs in another form than full width with the angles in the first half"
    if freqs.dtype is not DType.FLOAT:
        yield f"freqs is {short(freqs.dtype)}; cuDNN reads fp32"
    if freqs.dim[1] != 1:
        yield f"freqs {list(freqs.dim)} differs between sequences"
