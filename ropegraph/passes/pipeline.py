"""The passes in order, and what they did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ropegraph.ir.contract import Fold, FoldContract, FoldEntry, Turn
from ropegraph.ir.graph import Graph, position_ports
from ropegraph.ir.ops import Rope, Scale, Sdpa
from ropegraph.ir.verify import verify
from ropegraph.passes.drop_dead import drop_dead
from ropegraph.passes.fold_attn_scale import fold_attn_scale
from ropegraph.passes.fold_inv_ln2 import fold_inv_ln2
from ropegraph.passes.fold_scale_node import fold_scale_node
from ropegraph.passes.fuse_norm_rope import fuse_norm_rope
from ropegraph.passes.merge_cache_write import merge_cache_write
from ropegraph.passes.merge_lone_ropes import merge_lone_ropes
from ropegraph.passes.merge_rope_qk import merge_rope_qk
from ropegraph.passes.rewrite import Decision, Rule

# The order is a decision: scale nodes go first, so that a rotation is seen behind them; 1/ln 2 goes
# where attn_scale went; fusing with norms and merging come last, because a merged rotation folds no
# more.
DEFAULT: tuple[Rule, ...] = (
    drop_dead,
    fold_scale_node,
    fold_attn_scale,
    fold_inv_ln2,
    fuse_norm_rope,
    merge_rope_qk,
    merge_lone_ropes,
    merge_cache_write,
)

# A backward graph is held against its forward as both were recorded: a scale node behind
# rope_backward, say to undo a loss scale, folds into it only after that.
BACKWARD: tuple[Rule, ...] = (
    drop_dead,
    fold_attn_scale,
    fold_inv_ln2,
    fold_scale_node,
    fuse_norm_rope,
    merge_rope_qk,
    merge_lone_ropes,
)


@dataclass(frozen=True)
class Trace:
    """The graph after one pass, and what the pass decided at each node."""

    rule: str
    graph: Graph
    decisions: tuple[Decision, ...]


def run(graph: Graph, rules: tuple[Rule, ...] | None = None) -> tuple[Trace, ...]:
    """Apply ``rules`` in order; the first Trace is the graph as recorded, the last the result.

    rules: by default BACKWARD for a graph with a contract, DEFAULT for any other.
    """
    if rules is None:
        rules = DEFAULT if graph.contract is None else BACKWARD
    verify(graph, after="record")
    trace = [Trace("record", graph, ())]
    for rule in rules:
        graph, decisions = rule.run(graph)
        verify(graph, after=rule.name)
        trace.append(Trace(rule.name, graph, decisions))
    return tuple(trace)


def contract_of(trace: tuple[Trace, ...], engines: dict[str, str]) -> FoldContract:
    """What a traced forward graph promises its backward.  engines: node name -> engine."""
    before = next(t.graph for t in trace if t.rule == fold_scale_node.name)
    after = next(t.graph for t in trace if t.rule == fold_inv_ln2.name)
    entries: dict[str, FoldEntry] = {}
    for node in before.nodes:
        if isinstance(node.attrs, Sdpa):
            now = cast(Sdpa, after.node(node.name).attrs)
            log2 = now.softmax_input_is_log2 and not node.attrs.softmax_input_is_log2
            moved = now.attn_scale != node.attrs.attn_scale
            fold: Fold = "off"
            if log2 or moved:
                fold = "symmetric" if before.fold == "symmetric" else "q"
            entries[node.name] = FoldEntry(
                node=node.name,
                attention=node.attrs,
                fold=fold,
                log2=log2,
                q_chain=_chain(trace[0].graph, node.inputs["q"]),
                k_chain=_chain(trace[0].graph, node.inputs["k"]),
                ports=tuple(sorted(set(node.inputs) - {"q", "k", "v"})),
                engine=engines.get(node.name, ""),
            )
    return FoldContract(entries, before.fold, before.fold_log2)


def _chain(graph: Graph, value: str) -> tuple[Turn | float, ...]:
    """The rotations and factors that make ``value``, from the last one up to a graph input."""
    found: list[Turn | float] = []
    producer = graph.producer(value)
    while producer is not None and isinstance(producer.attrs, (Rope, Scale)):
        attrs = producer.attrs
        is_scale = isinstance(attrs, Scale)
        found.append(attrs.factor if is_scale else Turn(attrs, position_ports(producer)))
        producer = graph.producer(producer.inputs["input"])
    return tuple(found)
