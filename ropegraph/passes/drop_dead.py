"""Drop what nobody reads.

    y = rope(x)          (y unread, not bound)   ->   nothing
    o, stats = sdpa(..)  (stats unread)          ->   o = sdpa(..)

Right because an op has no effect but its outputs. Stats are the costly case: without them the
forward needs no log-sum-exp. O stays even if only Stats are read: every engine writes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Op, Pair, Sdpa
from ropegraph.passes.rewrite import Decline, Edit, Rule


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
    used = {
        port: value
        for port, value in node.outputs.items()
        if graph.reading(value) or not graph.is_virtual(value) or graph.place(value) in graph.inputs
    }
    if not used:
        return Edit(removed=(node.name,), note="removed: nobody reads its outputs")
    # A pair keeps its outputs: its launch writes them all.
    if isinstance(node.attrs, Pair):
        return None
    if isinstance(node.attrs, Sdpa):
        used = {"O": node.outputs["O"], **used}
    if len(used) == len(node.outputs):
        return None
    unused = sorted(set(node.outputs) - set(used))
    return Edit((replace(node, outputs=used),), note=f"{', '.join(unused)} not computed: unread")


drop_dead = Rule("drop-dead", root=get_args(Op), apply=_apply)
