"""What must be true of a graph before and after every pass."""

from __future__ import annotations

from ropegraph.errors import GraphError, InternalError
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Graph, is_in_place, singles
from ropegraph.ir.shapes import infer

# What is wrong, and the exception that told, if one did.
Broken = tuple[str, Exception | None]


def verify(graph: Graph, after: str) -> None:
    """Raise InternalError, the graph attached, if an invariant is broken after pass ``after``."""
    broken = _broken_values(graph) or _broken_nodes(graph)
    if broken is not None:
        text, cause = broken
        raise InternalError(f"after {after!r}: {text}\n{graph}") from cause


def _broken_values(graph: Graph) -> Broken | None:
    """Names that stand for nothing."""
    for node in graph.nodes:
        for port, value in (*node.inputs.items(), *node.outputs.items()):
            if value not in graph.values:
                return f"node {node.name!r} uses {value!r} at {port}, which is no value", None
    for value in graph.values.values():
        if value.ragged_offset is not None and value.ragged_offset not in graph.values:
            return f"{value.name!r} is ragged by {value.ragged_offset!r}, which is no value", None
        whole = None if value.within is None else graph.values.get(value.within)
        if value.within is not None and (whole is None or whole.within is not None):
            return f"{value.name!r} lies within {value.within!r}, which has no memory", None
    written = {v for node in graph.nodes for v in node.outputs.values()}
    for name in sorted(graph.visible | graph.saved):
        if name not in written:
            return f"the output {name!r} is written by no node", None
    return None


def _broken_nodes(graph: Graph) -> Broken | None:
    """The order of the nodes, their names, and the dims of what they write."""
    written, names = set(graph.inputs), set[str]()
    for node in graph.nodes:
        if node.name in names:
            return f"two nodes are named {node.name!r}", None
        names.add(node.name)
        for value in node.inputs.values():
            if value not in written:
                return f"node {node.name!r} reads {value!r}, which no earlier node produces", None
        for value in node.outputs.values():
            if value in written:
                return f"{value!r} is written twice, the second time by {node.name!r}", None
            written.add(value)
        try:
            dims = {port: graph.values[v].dim for port, v in node.inputs.items()}
            wanted = infer(node.name, node.attrs, dims)
        except GraphError as error:
            return str(error), error
        except KeyError as error:
            return f"node {node.name!r} has no input at {error}", error
        for single in filter(writes_cache, singles(node)):
            cache, after = single.inputs["cache"], single.outputs["output"]
            if not is_in_place(graph, cache, after):
                return f"{single.name!r} writes {after!r}, which is not its cache {cache!r}", None
        for port, value in node.outputs.items():
            if port not in wanted:
                return f"node {node.name!r} has no output {port}", None
            if wanted[port] != graph.values[value].dim:
                return f"{node.name!r} writes {wanted[port]} to {value!r}", None
    return None
