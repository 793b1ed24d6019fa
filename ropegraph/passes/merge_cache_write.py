"""Write V into its cache in the launch that writes K into its own.

    q2, k2 = rope_pair(q, k, cache=k_cache); v2 = cache_write(v, cache=v_cache)
                                        ->   q2, k2, v2 = rope_pair(q, k, v, ..)

Changes no bit. Both must write at the same positions: then they are most likely the K and V of one
layer. At most three parts take one launch.
"""

from __future__ import annotations

from typing import Any

from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Graph, Node, singles
from ropegraph.ir.ops import CacheWrite, Rope, RopePair
from ropegraph.passes.merge_rope_qk import joined, waits, why_not_types
from ropegraph.passes.rewrite import Decline, Edit, Rule

MOST = 3


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
    reason = "no rotation writes into a cache at the same cache_positions"
    for other in graph.nodes:
        parts = singles(other)
        if not isinstance(other.attrs, (Rope, RopePair)) or not _is_beside(node, parts):
            continue
        if len(parts) == MOST:
            reason = f"{other.name!r} has {MOST} parts already"
        elif waits(graph, node, other) or waits(graph, other, node):
            reason = f"one of {node.name!r} and {other.name!r} needs the other's result"
        elif why := why_not_types(graph, (*parts, node)):
            reason = why
        else:
            return joined(graph, (*parts, node), removed=(other.name, node.name))
    return Decline(reason)


def _is_beside(node: Node[Any], parts: tuple[Node[Any], ...]) -> bool:
    rows = node.inputs["cache_positions"]
    return any(writes_cache(part) and part.inputs["cache_positions"] == rows for part in parts)


merge_cache_write = Rule("merge-cache-write", root=(CacheWrite,), apply=_apply)
