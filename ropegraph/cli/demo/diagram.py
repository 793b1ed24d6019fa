"""A graph as a short Mermaid flowchart that is also readable as text: a line or two a node.

``to_mermaid()`` draws the same with shapes, types and colours, in a line for each box and arrow.
"""

from __future__ import annotations

import re

from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Attention, CacheWrite, Op, RopePair, Rotation, op_name


def flowchart(graph: Graph) -> str:
    """Inputs and outputs by name, nodes with the scale that folding moves."""
    lines = ["flowchart LR"]
    for node in graph.nodes:
        given: list[str] = []
        for value in dict.fromkeys(node.inputs.values()):
            producer = graph.producer(value)
            if producer is None:
                given.append(_id(value))
            else:
                label = value.rpartition("::")[2]
                lines.append(f"    {_id(producer.name)} -->|{label}| {_id(node.name)}")
        target = f'{_id(node.name)}["{node.name}: {_scales(node.attrs)}"]'
        lines.append(f"    {' & '.join(given)} --> {target}" if given else f"    {target}")
        if made := _results(graph, node):
            lines.append(f"    {_id(node.name)} --> {' & '.join(map(_id, made))}")
    return "\n".join(lines)


def _results(graph: Graph, node: Node[Op]) -> list[str]:
    """What leaves the graph here; what the next node reads is an arrow already."""
    return [v for v in node.outputs.values() if not (graph.is_virtual(v) or graph.reading(v))]


def _scales(attrs: Op) -> str:
    match attrs:
        case RopePair(parts):
            turned = [part for part in parts if not isinstance(part, CacheWrite)]
            scales = ", ".join(f"{part.output_scale:.6g}" for part in turned)
            return f"output_scale={scales}" if turned else op_name(parts[0])
        case Rotation():
            return f"output_scale={attrs.output_scale:.6g}"
        case Attention():
            scale = "tensor" if attrs.attn_scale is None else f"{attrs.attn_scale:.6g}"
            return f"attn_scale={scale}{', log2' if attrs.softmax_input_is_log2 else ''}"
        case _:
            return op_name(attrs)


def _id(name: str) -> str:
    """A name as Mermaid takes it for an identifier."""
    return re.sub(r"\W", "_", name)
