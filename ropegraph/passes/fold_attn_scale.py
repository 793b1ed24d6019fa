"""Fold the softmax scale into the rotations that make Q (and K).

    q2 = rope(q, output_scale=c)             q2 = rope(q, output_scale=c * a)
    o  = sdpa(q2, k2, v, attn_scale=a)  ->   o  = sdpa(q2, k2, v, attn_scale=1)

    dq2 = sdpa_backward(.., attn_scale=a)    dq2 = sdpa_backward(.., attn_scale=1)
    dq  = rope_backward(dq2, c)         ->   dq  = rope_backward(dq2, c * a)

Equal in exact arithmetic: the dot product is linear in q2. dK needs nothing: it is dS^T q2, and q2
carries a already. ``symmetric`` puts sqrt(a) on each side.
In bf16 one rounding moves: Q rounds after it is scaled, not before.
A backward graph whose Q comes from outside follows the contract of its forward, or is left alone.
"""

from __future__ import annotations

from typing import Any

from ropegraph.errors import FoldContractError
from ropegraph.ir.contract import Fold, FoldEntry, fold_factors
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.passes.agree import Stage, agreement
from ropegraph.passes.fold_group import Group, find_group, is_imported
from ropegraph.passes.rewrite import Decline, Edit, Rule

SIDES: dict[Fold, tuple[str, ...]] = {"q": ("q",), "symmetric": ("q", "k"), "auto": ("q",)}


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
    agreed = agreement(graph, node)
    if agreed is not None:
        return _by_contract(graph, node, *agreed)
    if graph.fold == "off":
        return Decline('fold="off"')
    sides = SIDES[graph.fold]
    if graph.contract is None and any(is_imported(graph, node.inputs[side]) for side in sides):
        return _without_contract(graph, node)
    group = find_group(graph, node, sides, auto=graph.fold == "auto")
    if isinstance(group, Decline):
        return group
    if group.has_backward and graph.contract is not None:
        return Decline("the contract decides, at the backward node")
    if group.is_external:
        return _without_contract(graph, node)
    return _edit(graph, node, group, "q" if graph.fold == "auto" else graph.fold)


def _edit(graph: Graph, node: Node[Any], group: Group, fold: Fold) -> Edit | Decline:
    scale = node.attrs.attn_scale
    if different := [n.name for n in group.nodes if n.attrs.attn_scale != scale]:
        return Decline(f"{different} read the same tensors with another attn_scale")
    if scale is None:
        return Decline("attn_scale is a tensor, so its value is not known when the graph is built")
    if scale == 1.0:
        return Decline("attn_scale is 1: there is nothing to fold")
    if scale == 0.0:
        return Decline("attn_scale is 0: folded, it would erase Q")
    if scale < 0.0 and fold == "symmetric":
        return Decline(f"attn_scale={scale:.6g} is negative: it has no square root to share")
    q, k = fold_factors(fold, scale)
    edited = group.scaled(graph, dict(zip(SIDES[fold], (q, k), strict=False)), attn_scale=1.0)
    if isinstance(edited, Decline):
        return edited
    where = [
        n.name for side in SIDES[fold] for n in (*group.producers[side], *group.adjoints[side])
    ]
    factors = f"{q:.6g}" if fold == "q" else f"{q:.6g} each"
    return Edit(edited, note=f"attn_scale {scale:.6g} moved to {', '.join(where)} ({factors})")


def _by_contract(graph: Graph, node: Node[Any], entry: FoldEntry, stage: Stage) -> Edit | Decline:
    if stage != "recorded":
        return Decline("the forward's contract leaves no attn_scale to fold here")
    # auto on both sides changes nothing that the caller sees; an explicit wish on either may.
    is_auto = graph.fold == "auto" and graph.contract is not None and graph.contract.fold == "auto"
    group = find_group(graph, node, SIDES[entry.fold], auto=is_auto)
    edit = group if isinstance(group, Decline) else _edit(graph, node, group, entry.fold)
    if isinstance(edit, Decline):
        raise FoldContractError(
            f"sdpa_backward {node.name!r}: the forward {entry.node!r} folded attn_scale "
            f"({entry.fold}), but here {edit.reason}"
            + (f"; fold={entry.fold!r} in this graph would allow that" if is_auto else "")
        )
    return edit


def _without_contract(graph: Graph, node: Node[Any]) -> Decline:
    if graph.fold == "auto":
        return Decline("Q comes from a forward graph and there is no contract: left as written")
    raise FoldContractError(
        f"sdpa_backward {node.name!r}: fold={graph.fold!r} in a backward graph needs the "
        "forward's contract; pass fold_contract=forward.fold_contract, or fold='auto' to run the "
        "graph as written"
    )


fold_attn_scale = Rule("fold-attn-scale", root=(Sdpa, SdpaBackward), apply=_apply)
