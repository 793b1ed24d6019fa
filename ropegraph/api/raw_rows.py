"""The rows that q_rot and k_rot should be: raw q and k, turned and scaled in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropegraph.dtypes import DType, as_dtype
from ropegraph.engines.reference.rope import RunRope, why_not_rope
from ropegraph.errors import GraphError, PositionError
from ropegraph.ir.graph import Graph, Node, singles
from ropegraph.ir.ops import (
    NormRope,
    Rope,
    RopeBackward,
    Rotation,
    Scale,
    SdpaBackward,
    shared,
)
from ropegraph.lowering.engine import Step


@dataclass(frozen=True)
class Raw:
    """Rows in fp64, laid out as the bound ones, and the scale that they carry.

    unchecked: why there are none, else "".
    """

    scale: float = 1.0
    rows: Tensor | None = None
    unchecked: str = ""


def made_here(node: Node[Any], value: str, rows: Tensor) -> Raw:
    """The rows of a value that a node of this graph writes.  rows: what it should have written."""
    for single in singles(node):
        if value in single.outputs.values():
            attrs = single.attrs
            rotation = attrs.rope if isinstance(attrs, NormRope) else attrs
            if isinstance(rotation, Rotation):
                return Raw(rotation.output_scale, rows)
            if isinstance(attrs, Scale):
                return Raw(attrs.factor, rows)
    return Raw(1.0, rows)


def made_elsewhere(graph: Graph, step: Step, side: str, env: Sequence[Any], raw: Tensor) -> Raw:
    """The rows of q or k of an sdpa_backward, whose rotation its rope_backward tells.

    raw: the rows before the rotation, as the caller has them.
    """
    value = step.node.inputs[side]
    gradient = step.node.outputs.get(f"d{side.upper()}")
    back = None if gradient is None else _rope_backward(graph, gradient)
    if back is None:
        return Raw(unchecked=f"no rope_backward reads the gradient of {value!r}")
    if why := why_not_rope(back.attrs):
        return Raw(unchecked="; ".join(why))
    before = graph.values[back.outputs["dX"]]
    if tuple(raw.shape) != before.dim:
        raise GraphError(
            f"verify: raw rows of {value!r} are {list(raw.shape)}; "
            f"{back.name!r} says that they are {list(before.dim)}"
        )
    given = replace(
        before,
        name="raw rows",
        stride=tuple(raw.stride()),
        dtype=as_dtype(raw.dtype, f"verify: raw rows of {value!r}"),
        within=None,
        start=0,
    )
    made = replace(step.values[value], name="turned rows", dtype=DType.DOUBLE, within=None, start=0)
    attrs = Rope(**shared(back.attrs))
    ports = {port: name for port, name in back.inputs.items() if port != "dY"}
    node = Node(
        f"rotation of {value}", attrs, {"input": given.name, **ports}, {"output": made.name}
    )
    slots = {**step.slots, given.name: len(env), made.name: len(env) + 1}
    values = {**step.values, given.name: given, made.name: made}
    bound: Tensor = env[step.slot(side)]
    rows = torch.empty_strided(
        bound.shape, bound.stride(), dtype=torch.float64, device=bound.device
    ).fill_(torch.nan)
    try:
        RunRope(Step(node, values, "reference", slots), attrs)([*env, raw.detach(), rows], 0)
    except PositionError as error:
        return Raw(unchecked=str(error))
    return Raw(attrs.output_scale, rows)


def _rope_backward(graph: Graph, gradient: str) -> Node[RopeBackward] | None:
    """The one node that turns ``gradient`` back, on its own or in a merged launch."""
    readers = [
        single
        for node in graph.reading(gradient)
        for single in singles(node)
        if gradient in single.inputs.values()
    ]
    if len(readers) == 1 and isinstance(readers[0].attrs, RopeBackward):
        return readers[0]
    return None


def raw_sides(graph: Graph, raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """Check ``raw=`` of verify: raw rows by the name of the q or k of an sdpa_backward."""
    names = [
        node.inputs[side]
        for node in graph.nodes
        if isinstance(node.attrs, SdpaBackward)
        for side in ("q", "k")
        if graph.producer(node.inputs[side]) is None
    ]
    for name, rows in raw.items():
        if name not in names:
            raise GraphError(
                f"verify: raw rows are given for {name!r}; in this graph they may be given for "
                f"{', '.join(dict.fromkeys(names)) or 'nothing: no sdpa_backward reads bound q, k'}"
            )
        if not isinstance(rows, Tensor) or not rows.dtype.is_floating_point:
            kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise GraphError(f"verify: raw rows of {name!r} are {kind}; use a floating tensor")
    return dict(raw)
