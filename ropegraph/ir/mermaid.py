"""Mermaid flowcharts of a graph, in the colours and shapes of cuDNN's own RoPE page."""

from __future__ import annotations

from typing import Any

from ropegraph.dtypes import short
from ropegraph.ir.graph import Graph, Node, origins
from ropegraph.ir.ops import NormRopePair, RopePair, op_name
from ropegraph.ir.printer import describe

_CLASSES = (
    "classDef user fill:#e3f2fd,stroke:#1976d2",
    "classDef saved fill:#e8f5e9,stroke:#388e3c",
    "classDef op fill:#fff3e0,stroke:#f57c00,font-weight:bold",
    "classDef scaled fill:#fce4ec,stroke:#c2185b,font-weight:bold",
)
_RULE = "───────"


def to_mermaid(graph: Graph, before: Graph | None = None) -> str:
    """A flowchart of ``graph``: tensors the caller binds, nodes with their scales, labelled edges.

    before: the graph as recorded; nodes whose attributes changed since are marked ``scaled``.
    """
    ids = {name: f"t{i}" for i, name in enumerate(graph.values)}
    lines = ["flowchart LR"]
    lines += [
        f"    {ids[name]}[{_tensor(graph, name)}]:::{_kind(graph, name)}" for name in graph.inputs
    ]
    for i, node in enumerate(graph.nodes):
        changed = before is not None and _differs(node, before)
        lines.append(f"    n{i}[{_node(node)}]:::{'scaled' if changed else 'op'}")
    index = {node.name: i for i, node in enumerate(graph.nodes)}
    for i, node in enumerate(graph.nodes):
        for value in dict.fromkeys(node.inputs.values()):
            producer = graph.producer(value)
            if producer is None:
                lines.append(f"    {ids[value]} --> n{i}")
            else:
                label = _label(graph, value)
                lines.append(f'    n{index[producer.name]} -->|"{label}"| n{i}')
        for value in node.outputs.values():
            if graph.reading(value) and graph.is_virtual(value):
                continue
            target = f"{ids[value]}[{_tensor(graph, value)}]:::{_kind(graph, value)}"
            lines.append(f"    n{i} --> {target}")
    return "\n".join([*lines, *(f"    {c}" for c in _CLASSES)])


def _kind(graph: Graph, name: str) -> str:
    return "saved" if name in graph.saved or name in graph.imported else "user"


def _tensor(graph: Graph, name: str) -> str:
    value = graph.values[name]
    dims = " x ".join(map(str, value.dim))
    return f'"{_safe(name)}<br/>{short(value.dtype)} {dims}"'


def _node(node: Node[Any]) -> str:
    about, is_pair = describe(node.attrs), isinstance(node.attrs, (RopePair, NormRopePair))
    if is_pair:
        about = [text.strip("[]") for text in about]
    return f'"{_safe("<br/>".join((f"{node.name} ({op_name(node.attrs)})", _RULE, *about)))}"'


def _label(graph: Graph, value: str) -> str:
    bound = "user-bound" if value in graph.visible else "saved" if value in graph.saved else ""
    return f"{_safe(value)}<br/>{bound}" if bound else _safe(value)


def _differs(node: Node[Any], before: Graph) -> bool:
    """True if folding changed the node; a merged pair counts if one of its parts changed."""
    recorded: dict[str, Any] = {n.name: n.attrs for n in before.nodes}
    return any(recorded.get(name) != attrs for name, attrs in origins(node).items())


def _safe(text: str) -> str:
    """Quotes would end a Mermaid label early."""
    return text.replace('"', "'")
