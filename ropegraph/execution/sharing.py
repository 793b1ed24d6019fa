"""Which buffers may share memory: the graph decides it once, every set of buffers is held to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ropegraph.errors import GraphError
from ropegraph.execution.overlap import disjoint, overlaps
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Graph, last_reads, rotated_by


class Pair(NamedTuple):
    """Two buffers, by index, that may not share memory: one that is written, one used after that.

    node: what writes the output.  may_be_in_place: the other is what ``node`` rotates into it, and
    nothing else reads that; then the two may be the very same memory.
    """

    output: int
    other: int
    node: str
    may_be_in_place: bool


def pairs_of(graph: Graph, names: Sequence[str]) -> list[Pair]:
    """The pairs of a graph.  names: of the bound values; an index is a place among them."""
    last_read = last_reads(graph)
    place = {name: i for i, name in enumerate(names)}
    # Ports, not nodes: both parts of a merged rotation may read one value.
    reads = [graph.place(value) for node in graph.nodes for value in node.inputs.values()]

    def turns_alone(step: int, source: str | None) -> bool:
        """True if nothing but the node at ``step`` reads what it rotates."""
        return (
            source in place
            and graph.values[source].ragged_offset is None
            and last_read.get(source, -1) == step
            and reads.count(source) == 1
        )

    # What an output was before it was rotated, if that has a buffer for nothing but this.
    before = {
        output: source
        for step, node in enumerate(graph.nodes)
        for output in map(graph.place, graph.written_by(node))
        if (source := rotated_by(node, output)) is not None and turns_alone(step, source)
    }
    found: dict[tuple[int, int], Pair] = {}
    for step, node in enumerate(graph.nodes):
        for part in graph.written_by(node):
            output = graph.place(part)
            if output not in place:
                continue
            rotated = rotated_by(node, output)
            for name, other in place.items():
                is_used_later = last_read.get(name, -1) >= step or name in graph.outputs
                # Of several nodes that write parts of one buffer, the first decides.
                if name != output and is_used_later and (place[output], other) not in found:
                    may_be_in_place = before.get(name) == output or (
                        name == rotated and turns_alone(step, name)
                    )
                    pair = Pair(place[output], other, node.name, may_be_in_place)
                    found[pair.output, pair.other] = pair
    return list(found.values())


def check_sharing(graph: Graph, pairs: Sequence[Pair], bound: dict[str, Tensor]) -> None:
    """Raise GraphError if an output overlaps itself, or shares memory that it may not share.

    bound: the buffers by name, in the order of the names that the pairs were made from.
    """
    for name in (*graph.outputs, *sorted(graph.rewritten)):
        mine = bound[name]
        if overlaps(mine.shape, mine.stride()):
            raise GraphError(
                f"the buffer of {_role(graph, name)} {name!r} overlaps itself: shape "
                f"{list(mine.shape)}, strides {list(mine.stride())}"
            )
    for name in sorted(graph.rewritten):
        if bound[name].requires_grad and bound[name].is_leaf:
            is_cache = any(
                graph.place(node.inputs["cache"]) == name
                for node in graph.singles
                if writes_cache(node)
            )
            raise GraphError(
                f"{name!r} is written in place, but it is a leaf tensor that requires grad; "
                "bind a detached one"
                if is_cache
                else f"{name!r} is rotated in place, but it is a leaf tensor that requires grad; "
                "leave in_place out"
            )
    named = list(bound.items())
    for pair in pairs:
        (output, mine), (name, theirs) = named[pair.output], named[pair.other]
        if pair.may_be_in_place and _is_one_place(mine, theirs):
            if theirs.requires_grad and theirs.is_leaf:
                raise GraphError(
                    f"{name!r} is rotated in place, but it is a leaf tensor that requires grad; "
                    "use a separate output"
                )
        elif not disjoint(mine, theirs):
            raise GraphError(
                f"the buffer of {_role(graph, output)} {output!r} (written by {pair.node!r}) "
                f"shares memory with that of {name!r}; use separate buffers"
            )


def _role(graph: Graph, name: str) -> str:
    return "output" if graph.producer(name) else "input"


def _is_one_place(x: Tensor, y: Tensor) -> bool:
    """True for the very same elements; what has none shares nothing, though both lie at 0."""
    return x.numel() > 0 and (x.data_ptr(), x.shape, x.stride(), x.dtype) == (
        y.data_ptr(), y.shape, y.stride(), y.dtype,
    )  # fmt: skip
