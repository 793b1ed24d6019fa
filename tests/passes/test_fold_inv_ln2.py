"""1 / ln 2 moves into the rotation of Q, and the logits become base 2."""

from math import log

import pytest

from ropegraph.dtypes import DType
from ropegraph.ir.contract import INV_LN2
from ropegraph.ir.graph import Graph
from ropegraph.passes.fold_inv_ln2 import fold_inv_ln2
from tests.ir.build import Build, backward, forward, joint, rotated
from tests.passes.text import declines, done, nodes, run

LOG2 = {"fold_log2": True}


def test_the_constant():
    assert INV_LN2 * log(2) == 1.0


@pytest.mark.parametrize("fold", ["q", "auto", "symmetric"])
def test_q_takes_the_factor_and_k_does_not(fold: str):
    g = forward(1.0, fold=fold, **LOG2).graph("o")
    assert nodes(run(fold_inv_ln2, g)) == [
        "q_rot = rope 'rope_q' (input=q, freqs=freqs, output_scale=1.44269504089)",
        "k_rot = rope 'rope_k' (input=k, freqs=freqs, output_scale=1)",
        "o* = sdpa 'attn' (q=q_rot, k=k_rot, v=v, attn_scale=1, softmax_input_is_log2=True)",
    ]
    assert done(fold_inv_ln2, g) == ["attn: 1/ln 2 = 1.4427 moved to rope_q; exp becomes exp2"]


def test_forward_and_backward_change_in_one_edit():
    g = joint(1.0, **LOG2).graph("o", "dq", "dk", "dv")
    after = run(fold_inv_ln2, g)
    assert len(done(fold_inv_ln2, g)) == 1
    assert after.node("attn").attrs.softmax_input_is_log2
    assert after.node("bwd").attrs.softmax_input_is_log2
    found = {n.name: n.attrs.output_scale for n in after.nodes if "rope" in n.name}
    assert found == {"rope_q": INV_LN2, "rope_k": 1.0, "rope_q_b": INV_LN2, "rope_k_b": 1.0}


def base_2(second: bool = False) -> Graph:
    b = rotated(**LOG2)
    b.sdpa("attn", "q_rot", "k_rot", "v", softmax_input_is_log2=not second)
    b.sdpa("attn2", "q_rot", "k_rot", "v", "o2", softmax_input_is_log2=True)
    return b.graph("o", "o2")


def not_rotated() -> Graph:
    b = Build(**LOG2)
    b.tensor("q", 1, 2, 3, 8)
    b.sdpa("attn", "q", "q", "q")
    return b.graph("o")


def close_to_the_limit() -> Graph:
    b = Build(DType.HALF, **LOG2)
    b.tensor("q", 1, 2, 3, 8)
    b.rope("rope_q", "q", "q_rot", output_scale=15.0)
    b.sdpa("attn", "q_rot", "q", "q")
    return b.graph("o")


REASONS = {
    "base 2 already": (base_2(), "the logits are base 2 already"),
    "part of them": (base_2(second=True), "part of the group has base-2 logits already"),
    "attn_scale stayed": (
        forward(0.25, **LOG2).graph("o"),
        "attn_scale of ['attn'] was not folded, so 1/ln 2 stays in the softmax",
    ),
    "not rotated": (not_rotated(), "'q' is an input of the graph, not made by rope"),
    "visible": (
        forward(1.0, fold="auto", **LOG2).graph("o", "q_rot"),
        "'q_rot' is a visible output; fold=\"q\" allows it to carry the scale",
    ),
    "no contract": (
        backward(1.0, **LOG2).graph("dq", "dk", "dv"),
        "Q comes from a forward graph and there is no contract: left as written",
    ),
    "the limit": (
        close_to_the_limit(),
        "the total output_scale of 'rope_q' would be 21.6404, outside [0.000976562, 16] for fp16",
    ),
}


@pytest.mark.parametrize(("graph", "reason"), REASONS.values(), ids=REASONS)
def test_reasons_to_leave_it(graph: Graph, reason: str):
    assert declines(fold_inv_ln2, graph)["attn"] == reason


@pytest.mark.parametrize("settings", [{"fold_log2": False}, {"fold": "off", "fold_log2": True}])
def test_nothing_is_said_where_it_was_not_asked_for(settings):
    assert declines(fold_inv_ln2, forward(1.0, **settings).graph("o")) == {}


def test_all_of_a_group_or_none():
    b = rotated(**LOG2)
    b.sdpa("attn", "q_rot", "k_rot", "v")
    b.sdpa("attn2", "q_rot", "k_rot", "v", "o2", attn_scale=0.5)
    reason = "attn_scale of ['attn2'] was not folded, so 1/ln 2 stays in the softmax"
    assert declines(fold_inv_ln2, b.graph("o", "o2")) == {"attn": reason, "attn2": reason}
