"""What a drawing of a graph shows, whoever draws it: boxes with their lines, labelled arrows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ropegraph.dtypes import short
from ropegraph.ir.graph import Graph, Node, origins
from ropegraph.ir.ops import NormRopePair, RopePair, op_name
from ropegraph.ir.printer import describe

Kind = Literal["user", "saved", "op", "scaled"]

# Fill and line of each kind, in the colours of cuDNN's own RoPE page.
COLOURS: dict[Kind, tuple[str, str]] = {
    "user": ("#e3f2fd", "#1976d2"),
    "saved": ("#e8f5e9", "#388e3c"),
    "op": ("#fff3e0", "#f57c00"),
    "scaled": ("#fce4ec", "#c2185b"),
}
BOLD: tuple[Kind, ...] = ("op", "scaled")


@dataclass(frozen=True)
class Box:
    """A tensor that the caller binds, or a node.  id: unlike any other of the picture.

    lines: of a tensor its name, and its type and dims; of a node its name and operation, and then
    its attributes, scales included.
    """

    id: str
    kind: Kind
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Arrow:
    """From one box to another by id.  label: the value between two nodes, and who sees it."""

    source: str
    target: str
    label: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Boxes in the order inputs, nodes, outputs; arrows in the order in which nodes run."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def picture(graph: Graph, before: Graph | None = None) -> Picture:
    """Inputs, nodes and outputs of ``graph``.

    before: the graph as recorded; nodes whose attributes changed since are marked ``scaled``.
    """
    ids = {name: f"t{i}" for i, name in enumerate(graph.values)}
    index = {node.name: f"n{i}" for i, node in enumerate(graph.nodes)}
    boxes = [_tensor(graph, ids, name) for name in graph.inputs]
    for node in graph.nodes:
        changed = before is not None and _differs(node, before)
        boxes.append(Box(index[node.name], "scaled" if changed else "op", _lines(node)))
    arrows: list[Arrow] = []
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs.values()):
            maker = graph.producer(value)
            if maker is None:
                arrows.append(Arrow(ids[value], index[node.name]))
            else:
                arrows.append(Arrow(index[maker.name], index[node.name], _label(graph, value)))
        for value in node.outputs.values():
            if not (graph.reading(value) and graph.is_virtual(value)):
                boxes.append(_tensor(graph, ids, value))
                arrows.append(Arrow(index[node.name], ids[value]))
    return Picture(tuple(boxes), tuple(arrows))


def _tensor(graph: Graph, ids: dict[str, str], name: str) -> Box:
    value = graph.values[name]
    is_saved = name in graph.saved or name in graph.imported
    about = f"{short(value.dtype)} {' x '.join(map(str, value.dim))}"
    return Box(ids[name], "saved" if is_saved else "user", (name, about))


def _lines(node: Node[Any]) -> tuple[str, ...]:
    about, is_pair = describe(node.attrs), isinstance(node.attrs, (RopePair, NormRopePair))
    if is_pair:
        about = [text.strip("[]") for text in about]
    return (f"{node.name} ({op_name(node.attrs)})", *about)


def _label(graph: Graph, value: str) -> tuple[str, ...]:
    bound = "user-bound" if value in graph.visible else "saved" if value in graph.saved else ""
    return (value, bound) if bound else (value,)


def _differs(node: Node[Any], before: Graph) -> bool:
    """True if folding changed the node; a merged pair counts if one of its parts changed."""
    recorded: dict[str, Any] = {n.name: n.attrs for n in before.nodes}
    return any(recorded.get(name) != attrs for name, attrs in origins(node).items())
