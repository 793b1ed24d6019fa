"""All passes in order: launch counts, the trace, and a second run that changes nothing."""

from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.errors import InternalError
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Scale
from ropegraph.passes import pipeline
from ropegraph.passes.rewrite import Decline, Edit, Rule
from tests.ir.build import Build, backward, forward, joint, rotated
from tests.passes.text import nodes

SETTINGS = [
    {"fold": fold, "fold_log2": log2}
    for fold in ("off", "q", "symmetric", "auto")
    for log2 in (False, True)
    if not (fold == "off" and log2)
]


def scaled() -> Build:
    """Scale nodes around every rotation."""
    b = Build()
    b.tensor("q", 2, 6, 5, 8), b.tensor("k", 2, 2, 7, 8), b.tensor("v", 2, 3, 7, 4)
    b.scale("s", "q", "q1", 0.5), b.rope("rope_q", "q1", "q2"), b.scale("t", "q2", "q_rot", 3.0)
    b.rope("rope_k", "k", "k1"), b.scale("u", "k1", "k_rot", 0.25)
    b.sdpa("attn", "q_rot", "k_rot", "v", stats="stats", attn_scale=0.25)
    b.rope("dead", "q", "unread")
    return b


def declined() -> Build:
    b = forward(0.25)
    b.sum("plus", ["q_rot", "q_rot"], "x")
    return b


# Name -> how it is recorded, what is bound, nodes recorded, launches left.
GRAPHS: dict[str, tuple[Any, tuple[str, ...], int, int]] = {
    "forward": (forward, ("o",), 3, 2),
    "forward with bound rotations": (forward, ("o", "q_rot", "k_rot"), 3, 2),
    "scale nodes and a dead one": (scaled, ("o",), 7, 2),
    "forward and backward": (joint, ("o", "dq", "dk", "dv"), 6, 4),
    "one gradient": (joint, ("o", "dq"), 6, 4),
    "declined": (declined, ("o", "x"), 4, 3),
    "rotation alone": (rotated, ("q_rot", "k_rot"), 2, 1),
    "nothing": (forward, (), 3, 0),
}


def of(name: str, settings: dict[str, Any]) -> Graph:
    make, visible, _, _ = GRAPHS[name]
    b = make()
    b.settings |= settings
    return b.graph(*visible)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", GRAPHS)
def test_launches(name: str, settings: dict[str, Any]):
    graph = of(name, settings)
    assert len(graph.nodes) == GRAPHS[name][2]
    assert len(pipeline.run(graph)[-1].graph.nodes) == GRAPHS[name][3]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_second_run_changes_nothing(name: str, settings: dict[str, Any]):
    once = pipeline.run(of(name, settings))[-1].graph
    again = pipeline.run(once)
    assert again[-1].graph == once
    assert not [d for t in again for d in t.decisions if d.applied]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_second_run_of_a_backward_changes_nothing(settings: dict[str, Any]):
    made = pipeline.contract_of(pipeline.run(of("forward", settings)), {})
    once = pipeline.run(backward(fold="auto", contract=made).graph("dq", "dk", "dv"))[-1].graph
    assert len(once.nodes) == 2
    assert pipeline.run(once)[-1].graph == once


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_the_caller_binds_stays(name: str, settings: dict[str, Any]):
    before = of(name, settings)
    after = pipeline.run(before)[-1].graph
    assert after.outputs == before.outputs
    assert set(after.inputs) <= set(before.inputs)
    for output in after.outputs:
        assert after.values[output] == before.values[output]


def test_scale_nodes_are_folded_before_attn_scale():
    assert nodes(pipeline.run(of("scale nodes and a dead one", {"fold": "q"}))[-4].graph) == [
        "q_rot = rope 'rope_q' (input=q, freqs=freqs, output_scale=0.375)",
        "k_rot = rope 'rope_k' (input=k, freqs=freqs, output_scale=0.25)",
        "o* = sdpa 'attn' (q=q_rot, k=k_rot, v=v, attn_scale=1)",
    ]


def test_the_trace_holds_the_graph_after_each_pass():
    trace = pipeline.run(forward().graph("o"))
    assert [t.rule for t in trace] == [
        "record",
        "drop-dead",
        "fold-scale-node",
        "fold-attn-scale",
        "fold-inv-ln2",
        "fuse-norm-rope",
        "merge-rope-qk",
        "merge-lone-ropes",
        "merge-cache-write",
    ]
    assert trace[0].graph == forward().graph("o")
    assert [len(t.graph.nodes) for t in trace] == [3, 3, 3, 3, 3, 3, 2, 2, 2]
    assert [d.applied for t in trace for d in t.decisions] == [True, True]


def test_declines_are_in_the_trace_with_their_reasons():
    b = forward(0.25, fold="auto", fold_log2=True)
    trace = pipeline.run(b.graph("o", "q_rot"))
    reason = "'q_rot' is a visible output; fold=\"q\" allows it to carry the scale"
    found = [str(d) for t in trace for d in t.decisions]
    assert found == [
        f"declined fold-attn-scale  attn: {reason}",
        f"declined fold-inv-ln2     attn: {reason}",
        "folded   merge-rope-qk    attn: one launch for rope_q and rope_k",
    ]


def test_a_pass_that_breaks_the_graph_is_found_at_once():
    def lose(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
        return Edit((), (node.name,)) if node.outputs["output"] == "y" else None

    b = Build()
    b.tensor("x", 1, 1, 2, 4)
    b.scale("s", "x", "y", 2.0)
    broken = Rule("lose", root=(Scale,), apply=lose)
    with pytest.raises(InternalError, match="after 'lose': the output 'y' is written by no node"):
        pipeline.run(b.graph("y"), rules=(broken,))


def test_a_rule_is_tried_until_nothing_changes():
    seen: list[float] = []

    def halve(graph: Graph, node: Node[Any]) -> Edit | Decline:
        seen.append(node.attrs.factor)
        if node.attrs.factor <= 1:
            return Decline("small enough")
        return Edit((node.with_attrs(factor=node.attrs.factor / 2),), note="halved")

    b = Build(DType.DOUBLE)
    b.tensor("x", 1, 1, 2, 4)
    b.scale("big", "x", "y", 4.0), b.scale("small", "x", "z", 0.5)
    graph, decisions = Rule("halve", root=(Scale,), apply=halve).run(b.graph("y", "z"))
    assert [n.attrs.factor for n in graph.nodes] == [1.0, 0.5]
    assert [(d.node, d.applied) for d in decisions] == [
        ("big", True),
        ("big", True),
        ("small", False),
    ]
    assert seen == [4.0, 2.0, 1.0, 0.5]
