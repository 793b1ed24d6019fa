"""The rotations of Q and K become one launch, where they rotate alike and neither waits."""

from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import Rope
from ropegraph.passes.merge_rope_qk import merge_rope_qk
from tests.ir.build import Build, backward, forward, joint, rotated
from tests.passes.text import declines, done, nodes, run

PAIR = (
    "q_rot, k_rot = rope_pair 'rope_q+rope_k' (input0=q, freqs0=freqs, input1=k, freqs1=freqs, "
    "[rope_dim=8; rope_offset=0; output_scale=1], [rope_dim=8; rope_offset=0; output_scale=1])"
)


def test_forward():
    g = forward().graph("o")
    after = run(merge_rope_qk, g)
    assert nodes(after) == [PAIR, "o* = sdpa 'attn' (q=q_rot, k=k_rot, v=v, attn_scale=0.25)"]
    assert done(merge_rope_qk, g) == ["attn: one launch for rope_q and rope_k"]
    assert after.node("rope_q+rope_k").attrs.names == ("rope_q", "rope_k")


def test_backward():
    after = run(merge_rope_qk, backward(fold="auto").graph("dq", "dk", "dv"))
    assert nodes(after)[1] == (
        "dq*, dk* = rope_pair 'rope_q_b+rope_k_b' (dY0=dq_rot, freqs0=freqs, dY1=dk_rot, "
        "freqs1=freqs, [rope_dim=8; rope_offset=0; output_scale=1], "
        "[rope_dim=8; rope_offset=0; output_scale=1])"
    )
    assert len(after.nodes) == 2


def test_each_part_keeps_its_own_scale_and_strides():
    b = Build()
    b.tensor("q", 2, 6, 5, 8, stride=(400, 8, 48, 1)), b.tensor("k", 2, 2, 7, 8)
    b.rope("rope_q", "q", "q_rot", output_scale=0.5)
    b.rope("rope_k", "k", "k_rot", output_scale=-3.0)
    b.sdpa("attn", "q_rot", "k_rot", "k")
    after = run(merge_rope_qk, b.graph("o", "k_rot"))
    assert [p.output_scale for p in after.nodes[0].attrs.parts] == [0.5, -3.0]
    assert after.values["q"].stride == (400, 8, 48, 1)
    assert after.visible == {"o", "k_rot"}


def different(**rotation: Any) -> Graph:
    b = Build()
    b.tensor("q", 2, 2, 5, 8), b.tensor("k", 2, 2, 5, 8)
    b.rope("rope_q", "q", "q_rot")
    b.rope("rope_k", "k", "k_rot", **rotation)
    b.sdpa("attn", "q_rot", "k_rot", "k")
    return b.graph("o")


def one_behind_the_other() -> Graph:
    b = Build()
    b.tensor("q", 2, 2, 5, 8)
    b.rope("rope_k", "q", "k_rot")
    b.scale("s", "k_rot", "x", 2.0)
    b.rope("rope_q", "x", "q_rot")
    b.sdpa("attn", "q_rot", "k_rot", "q")
    return b.graph("o")


def made_by_one() -> Graph:
    b = Build()
    b.tensor("q", 2, 2, 5, 8)
    b.rope("rope_q", "q", "q_rot")
    b.sdpa("attn", "q_rot", "q_rot", "q")
    return b.graph("o")


def merged_twice() -> Graph:
    b = rotated()
    b.sdpa("attn", "q_rot", "k_rot", "v")
    b.sdpa("attn2", "q_rot", "k_rot", "v", "o2")
    return run(merge_rope_qk, b.graph("o", "o2"))


def half_rotated() -> Graph:
    b = Build()
    b.tensor("q", 2, 2, 5, 8)
    b.rope("rope_q", "q", "q_rot")
    b.sdpa("attn", "q_rot", "q", "q")
    return b.graph("o")


def bare_gradient() -> Graph:
    b = backward(fold="auto")
    b.nodes = [n for n in b.nodes if n.name != "rope_k_b"]
    return b.graph("dq", "dk_rot", "dv")


def without_dk() -> Graph:
    b = Build(fold="auto")
    b.tensor("q", 2, 2, 5, 8)
    b.sdpa_backward("attn", "q", "q", "q", {"dQ": "dq_rot"})
    b.rope_backward("rope_q_b", "dq_rot", "dq")
    return b.graph("dq")


def two_ropes_of_a_gradient() -> Graph:
    b = backward(fold="auto")
    b.rope_backward("again", "dq_rot", "dq_2")
    return b.graph("dq", "dq_2", "dk", "dv")


ALIKE = "'rope_q' and 'rope_k' rotate differently"
REASONS = {
    "width": (different(rope_dim=4), ALIKE),
    "direction": (different(inverse=True), ALIKE),
    "attention factor": (different(attention_factor=2.0), ALIKE),
    "pairs": (different(interleaved=True), ALIKE),
    "numerics": (different(numerics="nemo"), ALIKE),
    "one behind the other": (
        one_behind_the_other(),
        "one of 'rope_q' and 'rope_k' needs the other's result",
    ),
    "one node": (made_by_one(), "q and k are made by the same node 'rope_q'"),
    "merged": (merged_twice(), "'rope_q+rope_k' is a merged launch already"),
    "k as it comes": (half_rotated(), "'q' is not made by rope"),
    "a bare gradient": (bare_gradient(), "dK is not read by one rope_backward of its own"),
    "one gradient": (without_dk(), "dK is not read by one rope_backward of its own"),
    "two ropes": (two_ropes_of_a_gradient(), "dQ is not read by one rope_backward of its own"),
}


@pytest.mark.parametrize(("graph", "reason"), REASONS.values(), ids=REASONS)
def test_reasons_to_leave_it(graph: Graph, reason: str):
    assert declines(merge_rope_qk, graph)["attn"] == reason


def test_a_graph_of_both_has_two_launches_for_rotations():
    after = run(merge_rope_qk, joint().graph("o", "dq", "dk", "dv"))
    assert [n.name for n in after.nodes] == [
        "rope_q+rope_k",
        "attn",
        "bwd",
        "rope_q_b+rope_k_b",
    ]


def test_two_attentions_with_rotations_of_their_own():
    b = rotated()
    b.tensor("q_2", 2, 6, 5, 8)
    b.rope("rope_q2", "q_2", "q_rot2")
    b.sdpa("attn", "q_rot", "k_rot", "v")
    b.sdpa("attn2", "q_rot2", "k_rot", "v", "o2")
    after = run(merge_rope_qk, b.graph("o", "o2"))
    assert [n.name for n in after.nodes] == ["rope_q2", "rope_q+rope_k", "attn", "attn2"]


def test_a_node_may_have_the_name_that_the_launch_would_get():
    b = rotated()
    b.sdpa("rope_q+rope_k", "q_rot", "k_rot", "v")
    after = run(merge_rope_qk, b.graph("o"))
    assert [n.name for n in after.nodes] == ["rope_q+rope_k+", "rope_q+rope_k"]


def test_the_launch_stands_where_both_inputs_are_ready():
    b = Build()
    b.tensor("q", 2, 2, 5, 8)
    b.rope("rope_q", "q", "q_rot")
    b.scale("s", "q", "k", 2.0)
    b.rope("rope_k", "k", "k_rot")
    b.sdpa("attn", "q_rot", "k_rot", "q")
    after = run(merge_rope_qk, b.graph("o"))
    assert [n.name for n in after.nodes] == ["s", "rope_q+rope_k", "attn"]


def test_positions_of_one_side_alone():
    b = Build()
    b.tensor("q", 2, 2, 5, 8), b.tensor("k", 2, 2, 5, 8), b.tensor("inv", 4)
    b.tensor("at", 2, dtype=DType.INT32)
    op = Rope(8, 0, angles="inv_freq")
    ports = {"inv_freq": "inv", "start_positions": "at"}
    b.node("rope_q", op, {"input": "q", **ports}, {"output": "q_rot"})
    b.node("rope_k", op, {"input": "k", "inv_freq": "inv"}, {"output": "k_rot"})
    b.sdpa("attn", "q_rot", "k_rot", "k")
    g = b.graph("o")
    text = "only one of 'rope_q' and 'rope_k' reads start_positions"
    assert declines(merge_rope_qk, g) == {"attn": text}
