"""Hold a backward graph against the contract of its forward.

A hand-made backward graph may be recorded unfolded (the passes then fold it as the forward was) or
already folded. Anything else disagrees, and disagreeing by a factor is the fault nobody sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from ropegraph.errors import FoldContractError
from ropegraph.ir.contract import INV_LN2, FoldContract, FoldEntry, close, fold_factors
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Attention, Rotation, SdpaBackward
from ropegraph.passes.fold_group import ADJOINTS, reading_through_sums
from ropegraph.passes.limits import output_scale

# Compared together with the scales of the rotations: these are what folding moves.
_MOVED = ("attn_scale", "softmax_input_is_log2")
Stage = Literal["recorded", "attn_scale", "done"]
_OPTIONAL = ("attn_scale", "bias", "sink_token")


def agreement(graph: Graph, node: Node[Any]) -> tuple[FoldEntry, Stage] | None:
    """The contract's entry for a backward node, and how far the node is folded.

    "recorded": nothing is folded yet.  "attn_scale": 1 / ln 2 is still to come.  "done": all is.
    None where no contract applies: a forward node, or no contract.
    Raises FoldContractError on any disagreement.
    """
    if graph.contract is None or not isinstance(node.attrs, SdpaBackward):
        return None
    entry = graph.contract.entry_for(node.name)
    _compare_settings(graph, graph.contract, node)
    _compare_attention(node, entry)
    return entry, _stage(graph, node, entry)


def _compare_settings(graph: Graph, contract: FoldContract, node: Node[Any]) -> None:
    """A backward graph may leave the fold to the contract, or ask for the same one."""
    if graph.fold not in ("auto", contract.fold) or graph.fold_log2 > contract.fold_log2:
        raise FoldContractError(
            f"sdpa_backward {node.name!r}: fold={graph.fold!r}, fold_log2={graph.fold_log2} "
            f"differs from the forward's fold={contract.fold!r}, fold_log2={contract.fold_log2}; "
            "leave both out here, the contract decides"
        )


def _compare_attention(node: Node[Any], entry: FoldEntry) -> None:
    for f in fields(Attention):
        mine, theirs = getattr(node.attrs, f.name), getattr(entry.attention, f.name)
        if f.name not in _MOVED and mine != theirs:
            raise FoldContractError(
                f"sdpa_backward {node.name!r}: {f.name}={mine} differs from {f.name}={theirs} of "
                f"the forward sdpa {entry.node!r}; both must be the same"
            )
    for port in _OPTIONAL:
        if (port in node.inputs) != (port in entry.ports):
            has, lacks = ("forward", "backward")[:: 1 if port in entry.ports else -1]
            raise FoldContractError(
                f"sdpa_backward {node.name!r}: {port} is given in the {has} and not in the {lacks} "
                f"of sdpa {entry.node!r}"
            )


def _stage(graph: Graph, node: Node[Any], entry: FoldEntry) -> Stage:
    attention = entry.attention
    q, k = fold_factors(entry.fold, attention.attn_scale or 1.0)
    q_sources = entry.q_source, entry.q_recorded
    k_sources = entry.k_source, entry.k_recorded
    after = attention.attn_scale if entry.fold == "off" else 1.0
    log2 = attention.softmax_input_is_log2
    stages: dict[Stage, tuple[float | None, bool, float, float]] = {
        "recorded": (attention.attn_scale, log2, 1.0, 1.0),
        "attn_scale": (after, log2, q, k),
        "done": (after, log2 or entry.log2, q * (INV_LN2 if entry.log2 else 1.0), k),
    }
    # The last stage first: where nothing was folded all three are the same, and all is done.
    order: tuple[Stage, ...] = ("done", "attn_scale", "recorded")
    for name in order:
        attn_scale, is_log2, q_factor, k_factor = stages[name]
        if (
            close(node.attrs.attn_scale, attn_scale)
            and node.attrs.softmax_input_is_log2 == is_log2
            and _side(graph, node, "dQ", q_sources, q_factor)
            and _side(graph, node, "dK", k_sources, k_factor)
        ):
            return name
    raise FoldContractError(_explain(graph, node, entry, stages))


def _side(
    graph: Graph, node: Node[Any], port: str, sources: tuple[Any, Any], factor: float
) -> bool:
    """True if every adjoint behind a gradient equals the forward's producer times ``factor``."""
    adjoints = _adjoints(graph, node, port)
    return any(all(_equal(a, source, factor) for a in adjoints) for source in sources)


def _adjoints(graph: Graph, node: Node[Any], port: str) -> list[Node[Any]]:
    grad = node.outputs.get(port)
    readers = [] if grad is None else reading_through_sums(graph, grad)
    return [n for n in readers if isinstance(n.attrs, ADJOINTS)]


def _equal(adjoint: Node[Any], source: Any, factor: float) -> bool:
    if source is None:
        return True
    if isinstance(source, Rotation) != isinstance(adjoint.attrs, Rotation):
        return False
    if not isinstance(source, Rotation):
        return close(adjoint.attrs.factor, source * factor)
    same = all(
        getattr(adjoint.attrs, f.name) == getattr(source, f.name)
        for f in fields(Rotation)
        if f.name != "output_scale"
    )
    return same and close(adjoint.attrs.output_scale, source.output_scale * factor)


def _explain(graph: Graph, node: Node[Any], entry: FoldEntry, stages: Mapping[Stage, Any]) -> str:
    def line(attn_scale: Any, log2: bool, q_factor: float, k_factor: float) -> str:
        text = f"attn_scale={attn_scale}, softmax_input_is_log2={log2}"
        for port, source, factor in (
            ("dQ", entry.q_source, q_factor),
            ("dK", entry.k_source, k_factor),
        ):
            if isinstance(source, Rotation):
                expected = replace(source, output_scale=source.output_scale * factor)
                text += f", rope_backward({port}) output_scale={expected.output_scale:.12g}"
        return text

    log2 = node.attrs.softmax_input_is_log2
    given = f"attn_scale={node.attrs.attn_scale}, softmax_input_is_log2={log2}"
    for port in ("dQ", "dK"):
        for adjoint in _adjoints(graph, node, port):
            given += f", {adjoint.name!r} ({port}) scale={output_scale(adjoint):.12g}"
    return (
        f"sdpa_backward {node.name!r} does not agree with the forward sdpa {entry.node!r}: it has "
        f"{given}; the forward needs either {line(*stages['recorded'])} (folded for you) or "
        f"{line(*stages['done'])}; the attributes of each rope_backward must be those of its rope"
    )
