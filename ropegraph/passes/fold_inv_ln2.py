"""Fold 1 / ln 2, which turns exp into exp2, into the rotation that makes Q.

    q2 = rope(q, output_scale=c)                   q2 = rope(q, output_scale=c / ln 2)
    o  = sdpa(q2, k2, v)                      ->   o  = sdpa(q2, k2, v, softmax_input_is_log2=True)

    dq = rope_backward(sdpa_backward(..), c)  ->   dq = rope_backward(sdpa_backward(..), c / ln 2)

softmax_input_is_log2 says that q.k is a base-2 logit: its natural value is ln 2 * q.k. Bias, ALiBi,
masks, sink and Stats stay natural. The backward's own ln 2 (chain rule through exp2) cancels the
1 / ln 2 of rope_backward. In bf16 the scaled Q rounds to other bits, nothing else moves.
"""

from __future__ import annotations

from typing import Any

from ropegraph.errors import FoldContractError
from ropegraph.ir.contract import INV_LN2
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.passes.agree import agreement
from ropegraph.passes.fold_attn_scale import SIDES
from ropegraph.passes.fold_group import find_group
from ropegraph.passes.rewrite import Decline, Edit, Rule


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
    agreed = agreement(graph, node)
    if agreed is not None:
        entry, stage = agreed
        if stage != "attn_scale":
            return None
        # The forward has found K foldable where it must be; dK itself gets no factor.
        answer = _edit(graph, node, ("q",), auto=False, by_contract=True)
        if isinstance(answer, Decline):
            raise FoldContractError(
                f"sdpa_backward {node.name!r}: the forward {entry.node!r} folded 1/ln 2, "
                f"but here {answer.reason}"
            )
        return answer
    if not graph.fold_log2 or graph.fold == "off":
        return None
    return _edit(graph, node, SIDES[graph.fold], auto=graph.fold == "auto")


def _edit(
    graph: Graph,
    node: Node[Any],
    sides: tuple[str, ...],
    auto: bool,
    by_contract: bool = False,
) -> Edit | Decline:
    if node.attrs.softmax_input_is_log2:
        return Decline("the logits are base 2 already")
    group = find_group(graph, node, sides, auto)
    if isinstance(group, Decline):
        return group
    if group.is_external and not by_contract:
        return Decline("Q comes from a forward graph and there is no contract: left as written")
    if unfolded := [n.name for n in group.nodes if n.attrs.attn_scale != 1.0]:
        return Decline(f"attn_scale of {unfolded} was not folded, so 1/ln 2 stays in the softmax")
    if any(n.attrs.softmax_input_is_log2 for n in group.nodes):
        return Decline("part of the group has base-2 logits already")
    edited = group.scaled(graph, {"q": INV_LN2}, softmax_input_is_log2=True)
    if isinstance(edited, Decline):
        return edited
    where = ", ".join(n.name for n in (*group.producers["q"], *group.adjoints["q"]))
    return Edit(edited, note=f"1/ln 2 = {INV_LN2:.6g} moved to {where}; exp becomes exp2")


fold_inv_ln2 = Rule("fold-inv-ln2", root=(Sdpa, SdpaBackward), apply=_apply)
