"""Rotate in one launch what rotates alike, where no sdpa of this graph reads the results.

    q2 = rope(q, freqs); k2 = rope(k, freqs)   ->   q2, k2 = rope_pair(q, k)

Changes no bit. Both must read the same angles: then they are most likely the Q and K of one
attention that runs elsewhere.
"""

from __future__ import annotations

from typing import Any

from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import ANGLE_PORTS, NormRope, NormRopeBackward, Rope, RopeBackward
from ropegraph.passes.merge_rope_qk import merged
from ropegraph.passes.rewrite import Decline, Edit, Rule

_ROTATIONS = (Rope, RopeBackward, NormRope, NormRopeBackward)


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
    place = graph.nodes.index(node)
    for other in graph.nodes[place + 1 :]:
        is_twin = type(other.attrs) is type(node.attrs)
        if is_twin and _angles(other) == _angles(node):
            edit = merged(graph, node, other)
            if isinstance(edit, Edit):
                return edit
    return None


def _angles(node: Node[Any]) -> list[str | None]:
    attrs = node.attrs
    rope = attrs.rope if isinstance(attrs, (NormRope, NormRopeBackward)) else attrs
    return [node.inputs.get(port) for port in ANGLE_PORTS[rope.angles]]


merge_lone_ropes = Rule("merge-lone-ropes", root=_ROTATIONS, apply=_apply)
