"""Which nodes must change together when a scale moves into Q (and K), and whether they can.

All sdpa and sdpa_backward nodes that read a folded Q or K form one group: they change in one edit,
with one scale, or none does. In the backward, the factor returns through whatever undoes the
producer: rope_backward or scale, behind a sum where gradients of one tensor meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import (
    Attention,
    MlaKvRope,
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    Scale,
    Sdpa,
    SdpaBackward,
    SplitQkv,
    Sum,
)
from ropegraph.passes.limits import times, why_not_scale
from ropegraph.passes.rewrite import Decline

# The ops through which a gradient gets its factor back.
ADJOINTS = (RopeBackward, RopeFreqsGrad, Scale)
_GRAD = {"q": "dQ", "k": "dK"}


@dataclass(frozen=True)
class Group:
    """Attention nodes, and for each side ("q", "k") the nodes that carry its scale.

    producers: the ropes and scales that make the values.  adjoints: those that undo them.
    is_external: some value comes from outside the graph, that is, with another graph's fold.
    """

    nodes: tuple[Node[Any], ...]
    producers: dict[str, tuple[Node[Any], ...]]
    adjoints: dict[str, tuple[Node[Any], ...]]
    is_external: bool

    @property
    def has_backward(self) -> bool:
        return any(isinstance(n.attrs, SdpaBackward) for n in self.nodes)

    def scaled(
        self, graph: Graph, factors: dict[str, float], **attention: object
    ) -> tuple[Node[Any], ...] | Decline:
        """The edited nodes: factors on producers and adjoints, new attributes on the attention."""
        edited: dict[str, Node[Any]] = {n.name: n.with_attrs(**attention) for n in self.nodes}
        for side, factor in factors.items():
            for node in (*self.producers[side], *self.adjoints[side]):
                dtype = graph.values[next(iter(node.outputs.values()))].dtype
                # Under a contract the forward has decided, on the scale of the whole.
                if graph.contract is None and (reason := why_not_scale(node, factor, dtype)):
                    return Decline(reason)
                edited[node.name] = times(node, factor)
        return tuple(edited.values())


def _members(
    graph: Graph, root: Node[Any], sides: tuple[str, ...]
) -> tuple[list[Node[Any]], dict[str, list[str]]]:
    """The attention nodes connected to ``root`` through values on ``sides``, and those values."""
    nodes: dict[str, Node[Any]] = {root.name: root}
    values: dict[str, dict[str, None]] = {side: {} for side in sides}
    todo = [root]
    while todo:
        node = todo.pop()
        for side in sides:
            value = node.inputs[side]
            values[side][value] = None
            for reader in graph.reading(value):
                if isinstance(reader.attrs, Attention) and reader.name not in nodes:
                    nodes[reader.name] = reader
                    todo.append(reader)
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    members = sorted(nodes.values(), key=lambda n: order[n.name])
    return members, {side: list(found) for side, found in values.items()}


def find_group(
    graph: Graph, root: Node[Any], sides: tuple[str, ...], auto: bool
) -> Group | Decline:
    """The group around ``root``, or why its values cannot carry a scale.

    auto: a value the user sees must not change.
    """
    nodes, values = _members(graph, root, sides)
    producers: dict[str, tuple[Node[Any], ...]] = {}
    adjoints: dict[str, tuple[Node[Any], ...]] = {}
    is_external = False
    for side in sides:
        for value in values[side]:
            if reason := _why_not_value(graph, value, side, auto):
                return Decline(reason)
        made = [_maker(graph, value) for value in values[side]]
        undone = _adjoints(graph, nodes, side, auto)
        if isinstance(undone, Decline):
            return undone
        producers[side] = tuple(node for node in made if node is not None)
        adjoints[side] = undone
        is_external |= None in made
    return Group(tuple(nodes), producers, adjoints, is_external)


def _maker(graph: Graph, value: str) -> Node[Any] | None:
    """The node that computes ``value``; None for an input of the graph, and for a part of one."""
    producer = graph.producer(value)
    if producer is not None and isinstance(producer.attrs, SplitQkv):
        return _maker(graph, producer.inputs["qkv"])
    return producer


def is_imported(graph: Graph, value: str) -> bool:
    """True if a backward node reads the value and nothing here makes it or runs it forward.

    It comes from a forward graph then, whose fold it carries.
    """
    readers = [n.attrs for n in graph.reading(value)]
    return (
        _maker(graph, value) is None
        and any(isinstance(op, SdpaBackward) for op in readers)
        and not any(isinstance(op, Sdpa) for op in readers)
    )


def _why_not_value(graph: Graph, value: str, side: str, auto: bool) -> str | None:
    producer = _maker(graph, value)
    if producer is None and not is_imported(graph, value):
        return f"{value!r} is an input of the graph, not made by rope"
    if producer is not None and isinstance(producer.attrs, MlaKvRope):
        return (
            f"{value!r} is made by mla_kv_rope {producer.name!r}, which scales nothing (most of "
            'its channels are a copy of kv); fold="q" needs Q alone'
        )
    if producer is not None and writes_cache(producer):
        return (
            f"{value!r} is a cache that {producer.name!r} writes: what is kept there carries no "
            'scale; fold="q" needs Q alone'
        )
    if producer is not None and not isinstance(producer.attrs, (Rope, Scale)):
        return f"{value!r} is not made by rope or scale but by {producer.name!r}"
    for reader in graph.reading(value):
        ports = [p for p, v in reader.inputs.items() if v == value]
        if not isinstance(reader.attrs, Attention):
            return f"{value!r} is also read by {reader.name!r}"
        if ports != [side]:
            return f"{value!r} is {' and '.join(ports)} of {reader.name!r}, not {side} alone"
    if auto and graph.is_seen(value):
        return f'{value!r} is a visible output; fold="{side}" allows it to carry the scale'
    return None


def _adjoints(
    graph: Graph, nodes: list[Node[Any]], side: str, auto: bool
) -> tuple[Node[Any], ...] | Decline:
    """The nodes that bring the factor back into the gradients of one side."""
    grads = {n.outputs[_GRAD[side]] for n in nodes if _GRAD[side] in n.outputs}
    found: dict[str, Node[Any]] = {}
    for grad in sorted(grads):
        if auto and graph.is_seen(grad):
            return Decline(f"{grad!r} is a visible output and would lose the scale")
        readers = reading_through_sums(graph, grad)
        if not readers:
            return Decline(f"{grad!r} is not read by a rope_backward that could return the scale")
        for reader in readers:
            if not isinstance(reader.attrs, ADJOINTS):
                return Decline(f"{grad!r} is also read by {reader.name!r}")
            found[reader.name] = reader
        for total in sums_of(graph, grad):
            sum_of = total.outputs["output"]
            if not graph.is_virtual(sum_of) or graph.is_seen(sum_of):
                return Decline(f"{sum_of!r} is a visible sum of {grad!r}")
            if foreign := [v for v in total.inputs.values() if not _is_sum_of(graph, v, grads)]:
                return Decline(f"{grad!r} is added to {foreign}, which keep their scale")
    return tuple(found.values())


def sums_of(graph: Graph, value: str) -> list[Node[Any]]:
    """The sum nodes that ``value`` flows into, directly or through other sums."""
    direct = [n for n in graph.reading(value) if isinstance(n.attrs, Sum)]
    return [m for n in direct for m in (n, *sums_of(graph, n.outputs["output"]))]


def reading_through_sums(graph: Graph, value: str) -> list[Node[Any]]:
    """The nodes, other than sums, that read ``value`` or a sum it is part of."""
    values = [value, *(n.outputs["output"] for n in sums_of(graph, value))]
    readers = {n.name: n for v in values for n in graph.reading(v)}
    return [n for n in readers.values() if not isinstance(n.attrs, Sum)]


def _is_sum_of(graph: Graph, value: str, grads: set[str]) -> bool:
    """True if ``value`` is one of ``grads`` or a sum of such values only."""
    if value in grads:
        return True
    producer = graph.producer(value)
    return (
        producer is not None
        and isinstance(producer.attrs, Sum)
        and all(_is_sum_of(graph, v, grads) for v in producer.inputs.values())
    )
