"""The graph as a value: frozen nodes over named tensors.

Edges are value names, so an edit that drops a node leaves no stale pointer behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Generic, TypeVar, cast

from ropegraph.dtypes import DType
from ropegraph.errors import InternalError
from ropegraph.ir.contract import Fold, FoldContract
from ropegraph.ir.ops import (
    POSITION_PORTS,
    JoinQkv,
    NormRope,
    NormRopeBackward,
    Op,
    Pair,
    Rope,
    RopeBackward,
    SplitQkv,
    data_ports,
)

T = TypeVar("T")
A = TypeVar("A", bound=Op, covariant=True)


def span(dim: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one that dim and stride reach, inclusive."""
    if 0 in dim:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(dim, stride, strict=True))


def row_major(dim: Iterable[int]) -> tuple[int, ...]:
    """Strides, in elements, of a packed tensor whose last axis is innermost."""
    strides: list[int] = []
    step = 1
    for extent in reversed(tuple(dim)):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Value:
    """One tensor of the graph.

    dim, stride: stride in elements.  ragged_offset: the value holding [b + 1] element offsets
    (times ragged_multiplier) of the sequences; None for a dense tensor.
    is_host: a CPU scalar read at execute (pass by value).  constant: its value, if the graph
    carries it.  uid: the user's, else None.
    within: the value in whose memory this one lies, from its element ``start`` on; never one that
    lies within another itself. None for memory of its own.
    """

    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType
    uid: int | None = None
    ragged_offset: str | None = None
    ragged_multiplier: int = 1
    is_host: bool = False
    constant: int | None = None
    within: str | None = None
    start: int = 0

    @property
    def numel(self) -> int:
        return prod(self.dim)

    @property
    def span_elems(self) -> int:
        """Elements from the first to the last one that dim and stride reach, inclusive."""
        return span(self.dim, self.stride)


@dataclass(frozen=True)
class Node(Generic[A]):
    """One operation: attributes, and ports to value names in both directions."""

    name: str
    attrs: A
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    def with_attrs(self, **changes: object) -> Node[A]:
        return replace(self, attrs=replace(self.attrs, **cast(Any, changes)))


@dataclass(frozen=True)
class Graph:
    """Nodes in execution order, and which values the caller sees.

    visible: values the caller binds (set_output or set_uid).  saved: exported for the backward
    graph alone, in whatever form the passes leave them.
    imported: inputs of a backward graph that its forward saved.
    contract: what a backward graph must agree with.
    """

    name: str
    values: Mapping[str, Value]
    nodes: tuple[Node[Op], ...]
    visible: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    imported: tuple[str, ...] = ()
    fold: Fold = "auto"
    fold_log2: bool = False
    contract: FoldContract | None = None

    @cached_property
    def _producers(self) -> dict[str, Node[Op]]:
        return {value: node for node in self.nodes for value in node.outputs.values()}

    @cached_property
    def _readers(self) -> dict[str, list[Node[Op]]]:
        readers: dict[str, list[Node[Op]]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs.values()):
                readers.setdefault(value, []).append(node)
        return readers

    def producer(self, value: str) -> Node[Op] | None:
        """The node that writes ``value``; None for an input of the graph."""
        return self._producers.get(value)

    def reading(self, value: str) -> list[Node[Op]]:
        """The nodes that read ``value``, in order."""
        return self._readers.get(value, [])

    def readers(self, value: str) -> set[str]:
        """The names of the nodes that read ``value``."""
        return {node.name for node in self.reading(value)}

    def node(self, name: str) -> Node[Op]:
        return next(n for n in self.nodes if n.name == name)

    def free_name(self, wanted: str) -> str:
        """A name for one more node."""
        taken = {node.name for node in self.nodes}
        while wanted in taken:
            wanted += "+"
        return wanted

    @property
    def singles(self) -> tuple[Node[Any], ...]:
        """The nodes, each Pair as those that it stands for."""
        return tuple(single for node in self.nodes for single in singles(node))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Values that no node writes and some node (or a ragged tensor) reads, in order."""
        read = (v for n in self.nodes for v in (*n.inputs.values(), *n.outputs.values()))
        names: dict[str, None] = {}
        for value in read:
            if self.producer(value) is None:
                names[value] = None
            known = self.values.get(value)
            if known is not None and known.ragged_offset is not None:
                names[known.ragged_offset] = None
        return tuple(names)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Values a node writes and the caller binds, in order of writing."""
        bound = self.visible | self.saved
        return tuple(v for n in self.nodes for v in n.outputs.values() if v in bound)

    def is_virtual(self, value: str) -> bool:
        """True if the value lives in the workspace: written here and bound by nobody."""
        return self.producer(value) is not None and value not in self.visible | self.saved

    def edited(self, changed: Iterable[Node[Op]], removed: Iterable[str] = ()) -> Graph:
        """A graph with nodes of the same names replaced, others added, and some removed.

        Nodes are ordered again (stable), and values nobody mentions any more are dropped.
        """
        new = {node.name: node for node in changed}
        gone = set(removed)
        nodes = [new.pop(n.name, n) for n in self.nodes if n.name not in gone]
        return replace(self, nodes=toposort([*nodes, *new.values()])).without_unused_values()

    def without_unused_values(self) -> Graph:
        used = {v for n in self.nodes for v in (*n.inputs.values(), *n.outputs.values())}
        used |= {offset for v in used if (offset := self.values[v].ragged_offset) is not None}
        used |= {whole for v in used if (whole := self.values[v].within) is not None}
        return replace(self, values={k: v for k, v in self.values.items() if k in used})

    def launches(self, node: Node[Op]) -> bool:
        """False for a node that only says where memory lies."""
        if isinstance(node.attrs, SplitQkv):
            return any(self.values[v].within is None for v in node.outputs.values())
        if isinstance(node.attrs, JoinQkv):
            (whole,), parts = node.outputs.values(), node.inputs.values()
            return len(node.inputs) < 3 or any(self.place(v) != whole for v in parts)
        return True

    def place(self, value: str) -> str:
        """The value whose memory ``value`` lies in: another one, or itself."""
        return self.values[value].within or value

    @cached_property
    def rewritten(self) -> frozenset[str]:
        """Inputs of the graph that a node writes into: their buffers change."""
        written = (self.place(v) for node in self.nodes for v in self.written_by(node))
        return frozenset(v for v in written if self.producer(v) is None)

    def written_by(self, node: Node[Op]) -> tuple[str, ...]:
        """The outputs that a node writes: none that only say where memory lies."""
        if not self.launches(node):
            return ()
        is_split = isinstance(node.attrs, SplitQkv)
        return tuple(
            v for v in node.outputs.values() if not is_split or self.values[v].within is None
        )

    def is_seen(self, value: str) -> bool:
        """True if the caller sees what is written there: in a buffer of its own or in another."""
        if value in self.visible:
            return True
        whole, maker = self.place(value), self.producer(value)
        is_written = maker is not None and self.launches(maker)
        return whole != value and is_written and (whole in self.visible or not self.producer(whole))

    def __str__(self) -> str:
        from ropegraph.ir.printer import print_graph

        return print_graph(self)


def last_reads(graph: Graph) -> dict[str, int]:
    """Value -> the index of the last node that reads it, or a part of it, or uses it as offsets."""
    found: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for value in (*node.inputs.values(), *node.outputs.values()):
            offsets = graph.values[value].ragged_offset
            if offsets is not None:
                found[offsets] = i
        found |= dict.fromkeys(node.inputs.values(), i)
        found |= dict.fromkeys(map(graph.place, node.inputs.values()), i)
    return found


def is_in_place(graph: Graph, before: str, after: str) -> bool:
    """True if ``after``, a part of another value, lies where ``before`` does."""
    x, y = graph.values[before], graph.values[after]
    return y.within is not None and (graph.place(before), x.start) == (y.within, y.start)


def position_ports(node: Node[Any]) -> tuple[str, ...]:
    """The ports of a rotation that say which positions its rows have, where it uses any."""
    return tuple(port for port in POSITION_PORTS if port in node.inputs)


def rotated_by(node: Node[Any], output: str) -> str | None:
    """The value that ``node`` rotates into ``output``; None if the node is no rotation."""
    for single in singles(node):
        is_rotation = isinstance(single.attrs, (Rope, RopeBackward))
        if is_rotation and output in single.outputs.values():
            return single.inputs[data_ports(single.attrs)[0]]
    return None


def singles(node: Node[Any]) -> tuple[Node[Any], ...]:
    """The nodes that a Pair stands for, under their own names; else the node itself."""
    pair = node.attrs
    if not isinstance(pair, Pair):
        return (node,)
    return tuple(
        Node(name, part, merged_ports(node.inputs, i), merged_ports(node.outputs, i))
        for i, (name, part) in enumerate(zip(pair.names, pair.parts, strict=True))
    )


def origins(node: Node[Any]) -> dict[str, Op]:
    """What was recorded and is done by ``node`` now: attributes by the name of the node then."""
    found: dict[str, Op] = {}
    for single in singles(node):
        attrs = single.attrs
        if isinstance(attrs, (NormRope, NormRopeBackward)):
            found |= dict(zip(attrs.names, (attrs.norm, attrs.rope), strict=True))
        else:
            found[single.name] = attrs
    return found


def toposort(nodes: list[Node[Op]]) -> tuple[Node[Op], ...]:
    """Order nodes so that every value is written before it is read, keeping order where free."""
    written_by = {value: n.name for n in nodes for value in n.outputs.values()}
    done: set[str] = set()
    ordered: list[Node[Op]] = []
    pending = list(nodes)
    while pending:
        for node in pending:
            needs = {written_by[v] for v in node.inputs.values() if v in written_by}
            if needs <= done:
                break
        else:
            names = [n.name for n in pending]
            raise InternalError(f"the nodes {names} wait for each other")
        pending.remove(node)
        ordered.append(node)
        done.add(node.name)
    return tuple(ordered)


def merged_ports(ports: Mapping[str, T], part: int) -> dict[str, T]:
    """The ports of one part of a Pair, under the names of the single op."""
    suffix = str(part)
    return {p[: -len(suffix)]: v for p, v in ports.items() if p.endswith(suffix)}
