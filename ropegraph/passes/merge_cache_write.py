"""Write K and V into their caches in one launch: that of K's rotation, if it turns on its way.

    q2, k2 = rope_pair(q, k, cache=k_cache); v2 = cache_write(v, cache=v_cache)
                                        ->   q2, k2, v2 = rope_pair(q, k, v, ..)
    k2 = cache_write(k, cache=k_cache); v2 = cache_write(v, cache=v_cache)
                                        ->   k2, v2 = rope_pair(k, v, ..)

Changes no bit. Both must write at the same positions: then they are most likely the K and V of one
layer. The second form is for a K whose rotation shares a launch with its norm. At most three parts
take one launch.
"""

from __future__ import annotations

from typing import Any

from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Graph, Node, singles
from ropegraph.ir.ops import CacheWrite, Rope
from ropegraph.passes.merge_rope_qk import joined, waits, why_not_types
from ropegraph.passes.rewrite import Decline, Edit, Rule

MOST = 3


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline:
    reason = "nothing else writes into a cache at the same cache_positions"
    for other in _beside(graph, node):
        parts = singles(other)
        if len(parts) == MOST:
            reason = f"{other.name!r} has {MOST} parts already"
        elif waits(graph, node, other) or waits(graph, other, node):
            reason = f"one of {node.name!r} and {other.name!r} needs the other's result"
        elif why := why_not_types(graph, (*parts, node)) or _why_not_memory(graph, node, other):
            reason = why
        else:
            parts = (*parts, node)
            if isinstance(other.attrs, CacheWrite):
                recorded = list(graph.values)  # what nodes write, in the order of the recording
                parts = sorted(parts, key=lambda part: recorded.index(part.outputs["output"]))
            return joined(graph, parts, removed=(other.name, node.name))
    return Decline(reason)


def _beside(graph: Graph, node: Node[Any]) -> list[Node[Any]]:
    """What writes into caches at the same positions: rotations first, then the most parts."""
    rows = node.inputs["cache_positions"]

    def is_beside(other: Node[Any]) -> bool:
        parts = filter(writes_cache, singles(other))
        return other.name != node.name and rows in (p.inputs["cache_positions"] for p in parts)

    def order(other: Node[Any]) -> tuple[bool, int]:
        parts = singles(other)
        return not any(isinstance(part.attrs, Rope) for part in parts), -len(parts)

    return sorted(filter(is_beside, graph.nodes), key=order)


def _why_not_memory(graph: Graph, node: Node[Any], other: Node[Any]) -> str | None:
    """Why the two must keep their order, or have another node between, though no edge says so."""
    for writer, beside in ((node, other), (other, node)):
        used = {graph.place(v) for v in (*beside.inputs.values(), *beside.outputs.values())}
        for part in filter(writes_cache, singles(writer)):
            cache = part.inputs["cache"]
            if graph.place(cache) in used:
                return f"{beside.name!r} uses {cache!r}, which {part.name!r} writes over"
            if others := graph.readers(cache) - {writer.name}:
                return f"{cache!r}, which {part.name!r} writes over, is read by {sorted(others)}"
    return None


merge_cache_write = Rule("merge-cache-write", root=(CacheWrite,), apply=_apply)
