"""Fold a multiply by a host number into the rotation before or after it.

    y = rope(x, output_scale=c); z = scale(y, f)   ->   z = rope(x, output_scale=c * f)
    y = scale(x, f); z = rope(y, output_scale=c)   ->   z = rope(x, output_scale=c * f)

Equal in exact arithmetic: a rotation is linear. One rounding goes: y is never stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Rope, RopeBackward, Scale, data_ports
from ropegraph.passes.limits import times, why_not_scale
from ropegraph.passes.rewrite import Decline, Edit, Rule

_LINEAR = (Rope, RopeBackward, Scale)


def _apply(graph: Graph, node: Node[Scale]) -> Edit | Decline:
    into_producer = _into_producer(graph, node)
    if isinstance(into_producer, Edit):
        return into_producer
    into_readers = _into_readers(graph, node)
    if isinstance(into_readers, Edit):
        return into_readers
    return Decline(f"{into_producer.reason}; {into_readers.reason}")


def _into_producer(graph: Graph, node: Node[Scale]) -> Edit | Decline:
    x, y = node.inputs["input"], node.outputs["output"]
    before = graph.producer(x)
    if before is None or not isinstance(before.attrs, _LINEAR):
        return Decline(f"{x!r} is not made by rope or scale")
    if not graph.is_virtual(x) or graph.is_seen(x):
        return Decline(f"{x!r} is a visible output")
    if others := graph.readers(x) - {node.name}:
        return Decline(f"{x!r} is also read by {sorted(others)}")
    if reason := why_not_scale(before, node.attrs.factor, graph.values[y].dtype):
        return Decline(reason)
    port = next(p for p, v in before.outputs.items() if v == x)
    folded = replace(times(before, node.attrs.factor), outputs={port: y})
    return Edit((folded,), (node.name,), f"factor {node.attrs.factor:.6g} moved to {before.name!r}")


def _into_readers(graph: Graph, node: Node[Scale]) -> Edit | Decline:
    x, y = node.inputs["input"], node.outputs["output"]
    if not graph.is_virtual(y) or graph.is_seen(y):
        return Decline(f"{y!r} is a visible output")
    readers = graph.reading(y)
    if others := [n.name for n in readers if not _takes(n, y)]:
        return Decline(f"{y!r} is read by {others}, which rotate nothing")
    folded: list[Node[Any]] = []
    for reader in readers:
        out = next(iter(reader.outputs.values()))
        if reason := why_not_scale(reader, node.attrs.factor, graph.values[out].dtype):
            return Decline(reason)
        moved = times(reader, node.attrs.factor)
        folded.append(replace(moved, inputs={**reader.inputs, data_ports(reader.attrs)[0]: x}))
    names = ", ".join(repr(n.name) for n in folded)
    return Edit(tuple(folded), (node.name,), f"factor {node.attrs.factor:.6g} moved to {names}")


def _takes(node: Node[Any], value: str) -> bool:
    """True if ``value`` is what the node rotates, and not, say, its table of angles."""
    if not isinstance(node.attrs, _LINEAR):
        return False
    return [p for p, v in node.inputs.items() if v == value] == [data_ports(node.attrs)[0]]


fold_scale_node = Rule("fold-scale-node", root=(Scale,), apply=_apply)
