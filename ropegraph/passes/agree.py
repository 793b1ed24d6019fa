"""Hold a backward graph against the contract of its forward.

A hand-made backward graph may be recorded unfolded (the passes then fold it as the forward was) or
already folded. Anything else disagrees, and disagreeing by a factor is the fault nobody sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ropegraph.errors import FoldContractError
from ropegraph.ir.contract import INV_LN2, FoldContract, FoldEntry, Turn, close, fold_factors
from ropegraph.ir.graph import Graph, Node, position_ports
from ropegraph.ir.ops import KEYWORDS, Rotation, Scale, SdpaBackward, shared
from ropegraph.passes.fold_group import ADJOINTS, reading_through_sums

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
    _compare_settings(graph, graph.contract, entry)
    _compare_attention(node, entry)
    return entry, _stage(graph, node, entry)


def _compare_settings(graph: Graph, contract: FoldContract, entry: FoldEntry) -> None:
    """A backward graph may leave the fold to the contract, or ask for the same one."""
    if (
        graph.fold not in ("auto", contract.fold, entry.fold)
        or graph.fold_log2 > contract.fold_log2
    ):
        raise FoldContractError(
            f"backward of sdpa {entry.node!r}: fold={graph.fold!r}, fold_log2={graph.fold_log2} "
            f"differs from the forward's fold={contract.fold!r}, fold_log2={contract.fold_log2}; "
            "leave both out here, the contract decides"
        )


def _compare_attention(node: Node[SdpaBackward], entry: FoldEntry) -> None:
    forward = shared(entry.attention)
    for name, mine in shared(node.attrs).items():
        theirs = forward[name]
        if name not in _MOVED and mine != theirs:
            raise FoldContractError(
                f"sdpa_backward {node.name!r}: {KEYWORDS.get(name, name)} is {mine}, but {theirs} "
                f"in the forward sdpa {entry.node!r}; both must be the same"
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
            and _side(graph, node, "dQ", entry.q_chain, q_factor)
            and _side(graph, node, "dK", entry.k_chain, k_factor)
        ):
            return name
    raise FoldContractError(_explain(graph, node, entry, stages))


def _side(
    graph: Graph, node: Node[Any], port: str, chain: tuple[Turn | float, ...], factor: float
) -> bool:
    """True if what undoes the rotations behind a gradient carries the forward's scales.

    The gradient may be asked for anywhere along the forward's chain, scaled further by the caller,
    and scale nodes may have folded on one side only. So each path, up to its last rotation or
    some scale behind that, must equal some beginning of the chain, as a product.
    """
    grad = node.outputs.get(port)
    if grad is None:
        return True
    wanted = _beginnings(chain, factor)
    return all(
        any(_same(mine, theirs) for mine in _stops(path) for theirs in wanted)
        for path in _paths(graph, grad)
    )


class _Path(NamedTuple):
    """A product of scales, and the rotations (their scale set to 1) on the way."""

    product: float
    rotations: tuple[Turn, ...]

    def then(self, step: Turn | float) -> _Path:
        if not isinstance(step, Turn):
            return _Path(self.product * step, self.rotations)
        unscaled = replace(Rotation(**shared(step.rotation)), output_scale=1.0)
        turns = (*self.rotations, Turn(unscaled, step.positions))
        return _Path(self.product * step.rotation.output_scale, turns)


def _beginnings(chain: tuple[Turn | float, ...], factor: float) -> list[_Path]:
    """The product and rotations of the first n steps of a chain, for every n from 0 on."""
    found = [_Path(factor, ())]
    for step in chain:
        found.append(found[-1].then(step))
    return found


def _stops(path: tuple[Turn | float, ...]) -> list[_Path]:
    """Where a path may be compared: behind its last rotation, and behind each scale after it."""
    beginnings = _beginnings(path, 1.0)[1:]
    return [b for b in beginnings if b.rotations == beginnings[-1].rotations]


def _same(mine: _Path, theirs: _Path) -> bool:
    return mine.rotations == theirs.rotations and close(mine.product, theirs.product)


def _paths(graph: Graph, value: str) -> Iterator[tuple[Turn | float, ...]]:
    """Every way from a gradient through the nodes that undo rotations, to where it ends."""
    for reader in reading_through_sums(graph, value):
        attrs = reader.attrs
        if isinstance(attrs, ADJOINTS):
            is_scale = isinstance(attrs, Scale)
            step = attrs.factor if is_scale else Turn(attrs, position_ports(reader))
            beyond = list(_paths(graph, next(iter(reader.outputs.values()))))
            yield from ((step, *rest) for rest in beyond or [()])


def _explain(graph: Graph, node: Node[Any], entry: FoldEntry, stages: Mapping[Stage, Any]) -> str:
    def line(attn_scale: Any, log2: bool, q_factor: float, k_factor: float) -> str:
        text = f"attn_scale={attn_scale}, softmax_input_is_log2={log2}"
        for port, chain, factor in (
            ("dQ", entry.q_chain, q_factor),
            ("dK", entry.k_chain, k_factor),
        ):
            if chain:
                text += f", {port} scaled by {_beginnings(chain, factor)[-1].product:.12g}"
        return text

    attrs = node.attrs
    given = f"attn_scale={attrs.attn_scale}, softmax_input_is_log2={attrs.softmax_input_is_log2}"
    for port in ("dQ", "dK"):
        for path in _paths(graph, node.outputs.get(port, "")):
            given += f", {port} scaled by {_beginnings(path, 1.0)[-1].product:.12g}"
    return (
        f"sdpa_backward {node.name!r} does not agree with the forward sdpa {entry.node!r}: it has "
        f"{given}; use {line(*stages['recorded'])} (it is then folded for you) or "
        f"{line(*stages['done'])}; every rope_backward must have the attributes of its rope, "
        "and positions wherever that has them"
    )
