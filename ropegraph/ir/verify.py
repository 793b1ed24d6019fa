"""What must be true of a graph before and after every pass."""

from __future__ import annotations

from ropegraph.errors import GraphError, InternalError
from ropegraph.ir.graph import Graph
from ropegraph.ir.shapes import infer


def verify(graph: Graph, after: str) -> None:
    """Raise InternalError, the graph attached, if an invariant is broken after pass ``after``."""
    written: set[str] = set(graph.inputs)
    names: set[str] = set()

    def fail(text: str) -> InternalError:
        return InternalError(f"after {after!r}: {text}\n{graph}")

    for node in graph.nodes:
        if node.name in names:
            raise fail(f"two nodes are named {node.name!r}")
        names.add(node.name)
        for port, value in (*node.inputs.items(), *node.outputs.items()):
            if value not in graph.values:
                raise fail(f"node {node.name!r} uses {value!r} at {port}, which is no value")
        for value in node.inputs.values():
            if value not in written:
                raise fail(f"node {node.name!r} reads {value!r}, which no earlier node produces")
        for value in node.outputs.values():
            if value in written:
                raise fail(f"{value!r} is written twice, the second time by {node.name!r}")
            written.add(value)
        try:
            wanted = infer(
                node.name, node.attrs, {p: graph.values[v].dim for p, v in node.inputs.items()}
            )
        except GraphError as error:
            raise fail(str(error)) from error
        for port, value in node.outputs.items():
            if wanted[port] != graph.values[value].dim:
                raise fail(f"{node.name!r} writes {wanted[port]} to {value!r}")
    for value in graph.visible | graph.saved:
        if value not in written:
            raise fail(f"the output {value!r} is written by no node")
