"""The softmax scale moves into the rotations of Q (and K), forward and backward, or a reason says
why not."""

from math import sqrt
from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.errors import FoldContractError
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import RopeFreqsGrad
from ropegraph.passes.fold_attn_scale import fold_attn_scale
from tests.ir.build import Build, backward, forward, joint, rotated
from tests.passes.text import declines, done, nodes, run


def scales(graph: Graph) -> dict[str, Any]:
    """Node name -> the scale it carries."""
    found: dict[str, Any] = {}
    for n in graph.nodes:
        for field in ("output_scale", "factor", "attn_scale"):
            if hasattr(n.attrs, field):
                found[n.name] = getattr(n.attrs, field)
    return found


def test_q_takes_the_scale():
    after = run(fold_attn_scale, forward(0.25).graph("o"))
    assert nodes(after) == [
        "q_rot = rope 'rope_q' (input=q, freqs=freqs, output_scale=0.25)",
        "k_rot = rope 'rope_k' (input=k, freqs=freqs, output_scale=1)",
        "o* = sdpa 'attn' (q=q_rot, k=k_rot, v=v, attn_scale=1)",
    ]
    assert done(fold_attn_scale, forward(0.25).graph("o")) == [
        "attn: attn_scale 0.25 moved to rope_q (0.25)"
    ]


def test_q_and_k_share_the_scale():
    g = forward(0.25, fold="symmetric").graph("o")
    assert nodes(run(fold_attn_scale, g)) == [
        "q_rot = rope 'rope_q' (input=q, freqs=freqs, output_scale=0.5)",
        "k_rot = rope 'rope_k' (input=k, freqs=freqs, output_scale=0.5)",
        "o* = sdpa 'attn' (q=q_rot, k=k_rot, v=v, attn_scale=1)",
    ]
    assert done(fold_attn_scale, g) == ["attn: attn_scale 0.25 moved to rope_q, rope_k (0.5 each)"]


@pytest.mark.parametrize("fold", ["q", "auto", "symmetric"])
@pytest.mark.parametrize("scale", [0.3, 1 / sqrt(192), 3.0])
def test_a_scale_of_the_users_own_multiplies(fold: str, scale: float):
    b = Build(fold=fold)
    b.tensor("q", 1, 2, 3, 8), b.tensor("k", 1, 2, 3, 8)
    b.rope("rope_q", "q", "q_rot", output_scale=3.0)
    b.rope("rope_k", "k", "k_rot", output_scale=-0.5)
    b.sdpa("attn", "q_rot", "k_rot", "k", attn_scale=scale)
    half = sqrt(scale)
    q, k = (3 * half, -0.5 * half) if fold == "symmetric" else (3 * scale, -0.5)
    assert scales(run(fold_attn_scale, b.graph("o"))) == {"rope_q": q, "rope_k": k, "attn": 1.0}


def test_a_negative_scale_goes_to_q():
    after = scales(run(fold_attn_scale, forward(-0.5).graph("o")))
    assert after == {"rope_q": -0.5, "rope_k": 1.0, "attn": 1.0}


def test_a_scale_node_takes_it_like_a_rotation():
    b = Build()
    b.tensor("q", 1, 2, 3, 8)
    b.scale("s", "q", "q2", 4.0)
    b.sdpa("attn", "q2", "q", "q", attn_scale=0.5)
    assert nodes(run(fold_attn_scale, b.graph("o", "q2"))) == [
        "q2* = scale 's' (input=q, factor=2)",
        "o* = sdpa 'attn' (q=q2, k=q, v=q, attn_scale=1)",
    ]


@pytest.mark.parametrize("fold", ["q", "symmetric"])
def test_an_explicit_fold_may_change_bound_rotations(fold: str):
    g = forward(0.25, fold=fold).graph("o", "q_rot", "k_rot")
    assert scales(run(fold_attn_scale, g))["attn"] == 1.0


@pytest.mark.parametrize("fold", ["q", "symmetric", "auto"])
def test_saved_rotations_change_under_every_fold(fold: str):
    g = forward(0.25, fold=fold).graph("o", saved=["q_rot", "k_rot"])
    assert scales(run(fold_attn_scale, g))["attn"] == 1.0


def test_the_scale_of_a_base_2_softmax_moves_as_well():
    b = Build()
    b.tensor("q", 1, 2, 3, 8)
    b.rope("rope_q", "q", "q_rot")
    b.sdpa("attn", "q_rot", "q", "q", attn_scale=0.5, softmax_input_is_log2=True)
    assert nodes(run(fold_attn_scale, b.graph("o")))[1] == (
        "o* = sdpa 'attn' (q=q_rot, k=q, v=q, attn_scale=1, softmax_input_is_log2=True)"
    )


# Reasons


def other(kind: str, fold: str = "q") -> Build:
    """Q, K and V as inputs, q_rot made by something; then attn."""
    b = Build(fold=fold)
    b.tensor("q", 2, 4, 5, 8), b.tensor("k", 2, 4, 5, 8), b.tensor("v", 2, 4, 5, 8)
    match kind:
        case "input":
            b.sdpa("attn", "q", "k", "v", attn_scale=0.25)
        case "sdpa":
            b.sdpa("first", "q", "k", "v", "x", attn_scale=1.0)
            b.sdpa("attn", "x", "k", "v", attn_scale=0.25)
        case "sum":
            b.rope("rope_q", "q", "r"), b.sum("plus", ["r", "q"], "x")
            b.sdpa("attn", "x", "k", "v", attn_scale=0.25)
        case "rope":
            b.rope("rope_q", "q", "q_rot")
            b.sdpa("attn", "q_rot", "k", "v", attn_scale=0.25)
    return b


def read_by_a_sum() -> Graph:
    b = forward()
    b.sum("plus", ["q_rot", "q_rot"], "x")
    return b.graph("o", "x")


def as_port(port: str, fold: str = "q") -> Graph:
    """q_rot at q and at another port of the same attention."""
    b = Build(fold=fold)
    b.tensor("q", 2, 4, 5, 8), b.tensor("x", 2, 4, 5, 8)
    b.rope("rope_q", "q", "q_rot")
    ports = {"q": "q_rot", "k": "x", "v": "x", port: "q_rot"}
    b.sdpa("attn", ports["q"], ports["k"], ports["v"], attn_scale=0.25)
    return b.graph("o")


def as_bias() -> Graph:
    b = Build()
    b.tensor("q", 1, 1, 8, 8), b.tensor("x", 1, 1, 8, 8)
    b.rope("rope_q", "q", "q_rot")
    b.sdpa("attn", "q_rot", "x", "x", attn_scale=0.25, ports={"bias": "q_rot"})
    return b.graph("o")


def bit_exact() -> Graph:
    b = Build()
    b.tensor("q", 1, 2, 3, 8)
    b.rope("rope_q", "q", "q_rot", numerics="hf")
    b.sdpa("attn", "q_rot", "q", "q", attn_scale=0.5)
    return b.graph("o")


def with_tensor() -> Graph:
    b = rotated()
    b.tensor("a", 1, 1, 1, 1)
    b.sdpa("attn", "q_rot", "k_rot", "v", attn_scale=None, ports={"attn_scale": "a"})
    return b.graph("o")


SYMMETRIC = {"fold": "symmetric"}
REASONS = {
    "off": (forward(fold="off").graph("o"), 'fold="off"'),
    "an input": (other("input").graph("o"), "'q' is an input of the graph, not made by rope"),
    "another op": (other("sdpa").graph("o"), "'x' is not made by rope or scale but by 'first'"),
    "a sum": (other("sum").graph("o"), "'x' is not made by rope or scale but by 'plus'"),
    "another reader": (read_by_a_sum(), "'q_rot' is also read by 'plus'"),
    "both sides": (as_port("k"), "'q_rot' is q and k of 'attn', not q alone"),
    "the values": (as_port("v"), "'q_rot' is q and v of 'attn', not q alone"),
    "the bias": (as_bias(), "'q_rot' is q and bias of 'attn', not q alone"),
    "visible": (
        forward(fold="auto").graph("o", "q_rot"),
        "'q_rot' is a visible output; fold=\"q\" allows it to carry the scale",
    ),
    "k an input": (
        other("rope", fold="symmetric").graph("o"),
        "'k' is an input of the graph, not made by rope",
    ),
    "k with v": (as_port("k", "symmetric"), "'q_rot' is q and k of 'attn', not q alone"),
    "a tensor": (
        with_tensor(),
        ("attn_scale is a tensor, so its value is not known when the graph is built"),
    ),
    "1": (forward(1.0).graph("o"), "attn_scale is 1: there is nothing to fold"),
    "0": (forward(0.0).graph("o"), "attn_scale is 0: folded, it would erase Q"),
    "negative": (
        forward(-0.5, **SYMMETRIC).graph("o"),
        "attn_scale=-0.5 is negative: it has no square root to share",
    ),
    "too small for fp16": (
        forward(2.0**-11, DType.HALF).graph("o"),
        (
            "the total output_scale of 'rope_q' would be 0.000488281, outside [0.000976562, 16] "
            "for fp16"
        ),
    ),
    "too large for fp16": (
        forward(17.0, DType.HALF).graph("o"),
        "the total output_scale of 'rope_q' would be 17, outside [0.000976562, 16] for fp16",
    ),
    "too small": (
        forward(2.0**-101).graph("o"),
        (
            "the total output_scale of 'rope_q' would be 3.9443e-31, outside "
            "[7.88861e-31, 1.26765e+30] for fp32"
        ),
    ),
    "bit-exact": (bit_exact(), "'rope_q' is bit-exact (numerics='hf')"),
}


@pytest.mark.parametrize(("graph", "reason"), REASONS.values(), ids=REASONS)
def test_reasons_to_leave_it(graph: Graph, reason: str):
    assert declines(fold_attn_scale, graph)["attn"] == reason


@pytest.mark.parametrize("dtype", [DType.HALF, DType.BFLOAT16, DType.FLOAT, DType.DOUBLE])
def test_the_limits_themselves_are_allowed(dtype: DType):
    low, high = (2.0**-10, 16.0) if dtype is DType.HALF else (2.0**-100, 2.0**100)
    for scale in (low, high, -low, -high):
        assert scales(run(fold_attn_scale, forward(scale, dtype).graph("o")))["rope_q"] == scale


# Backward graphs


@pytest.mark.parametrize(
    ("fold", "q", "k"), [("q", 0.25, 1.0), ("symmetric", 0.5, 0.5), ("auto", 0.25, 1.0)]
)
def test_forward_and_backward_change_in_one_edit(fold: str, q: float, k: float):
    g = joint(fold=fold).graph("o", "dq", "dk", "dv")
    want = {"rope_q": q, "rope_k": k, "attn": 1.0, "bwd": 1.0, "rope_q_b": q, "rope_k_b": k}
    assert scales(run(fold_attn_scale, g)) == want
    assert len(done(fold_attn_scale, g)) == 1


def test_an_explicit_fold_may_change_bound_gradients_of_rotations():
    g = joint(fold="symmetric").graph("o", "dq", "dk", "dv", "dq_rot", "dk_rot")
    assert scales(run(fold_attn_scale, g))["bwd"] == 1.0
    assert declines(fold_attn_scale, joint(fold="auto").graph("o", "dq", "dq_rot")) == {
        "attn": "'dq_rot' is a visible output and would lose the scale",
        "bwd": "'dq_rot' is a visible output and would lose the scale",
    }


def without_adjoint() -> Graph:
    b = joint()
    b.nodes = [n for n in b.nodes if n.name != "rope_q_b"]
    return b.graph("o", "dq_rot", "dk")


def read_twice() -> Graph:
    b = joint()
    b.sdpa("again", "dq_rot", "k_rot", "v", "x", attn_scale=1.0)
    return b.graph("o", "dq", "x")


def summed(visible: bool = False, foreign: bool = False) -> Graph:
    """Two attentions share q_rot; the gradients meet in a sum before rope_backward."""
    b = joint()
    b.nodes = [n for n in b.nodes if n.name != "rope_q_b"]
    del b.values["dq"]
    terms = ["dq_rot", "dq_2"]
    if foreign:
        b.tensor("dq_2", 2, 6, 5, 8)
    else:
        b.sdpa_backward("bwd2", "q_rot", "k_rot", "v", {"dQ": "dq_2"}, attn_scale=0.25)
    b.sum("plus", terms, "dq_sum")
    b.rope_backward("rope_q_b", "dq_sum", "dq")
    return b.graph("o", "dq", *(["dq_sum"] if visible else []))


BACKWARD = {
    "nothing undoes it": (
        without_adjoint(),
        "'dq_rot' is not read by a rope_backward that could return the scale",
    ),
    "another reader": (read_twice(), "'dq_rot' is also read by 'again'"),
    "a visible sum": (summed(visible=True), "'dq_sum' is a visible sum of 'dq_2'"),
    "a foreign term": (
        summed(foreign=True),
        "'dq_rot' is added to ['dq_2'], which keep their scale",
    ),
}


@pytest.mark.parametrize(("graph", "reason"), BACKWARD.values(), ids=BACKWARD)
def test_reasons_in_the_backward(graph: Graph, reason: str):
    found = declines(fold_attn_scale, graph)
    assert found["attn"] == found["bwd"] == reason


def test_the_scale_returns_through_a_sum():
    after = scales(run(fold_attn_scale, summed()))
    assert (after["rope_q"], after["rope_q_b"]) == (0.25, 0.25)
    assert after["attn"] == after["bwd"] == after["bwd2"] == 1.0


def test_the_scale_returns_through_sums_of_sums_and_scale_nodes():
    b = joint()
    b.nodes = [n for n in b.nodes if n.name != "rope_q_b"]
    del b.values["dq"]
    for i in (2, 3):
        b.sdpa_backward(f"bwd{i}", "q_rot", "k_rot", "v", {"dQ": f"dq_{i}"}, attn_scale=0.25)
    b.sum("some", ["dq_rot", "dq_2"], "s1"), b.sum("all", ["s1", "dq_3"], "s2")
    b.scale("rope_q_b", "s2", "dq", 3.0)
    after = scales(run(fold_attn_scale, b.graph("o", "dq")))
    assert (after["rope_q"], after["rope_q_b"]) == (0.25, 0.75)


def test_the_gradient_of_angles_takes_the_scale_too():
    b = joint()
    ports = {"input": "q", "dY": "dq_rot", "freqs": "freqs"}
    b.node("angles", RopeFreqsGrad(8, 0, output_scale=3.0), ports, {"dfreqs": "df"})
    after = scales(run(fold_attn_scale, b.graph("o", "dq", "df")))
    assert (after["rope_q"], after["rope_q_b"], after["angles"]) == (0.25, 0.25, 0.75)


def test_a_backward_of_its_own_is_left_as_written():
    assert declines(fold_attn_scale, backward(fold="auto").graph("dq", "dk", "dv")) == {
        "attn": "Q comes from a forward graph and there is no contract: left as written"
    }


@pytest.mark.parametrize("fold", ["q", "symmetric"])
def test_a_fold_in_a_backward_of_its_own_needs_the_contract(fold: str):
    with pytest.raises(FoldContractError, match="'attn'") as caught:
        fold_attn_scale.run(backward(fold=fold).graph("dq", "dk", "dv"))
    assert f"fold={fold!r} in a backward graph needs the forward's contract" in str(caught.value)


@pytest.mark.parametrize("scale", [0.25, 1.0])
@pytest.mark.parametrize("visible", [("dq", "dk"), ("dq_rot", "dk_rot")])
def test_it_needs_the_contract_whatever_else_would_hold_it_back(scale: float, visible: Any):
    b = backward(scale, fold="q")
    if "dq_rot" in visible:
        b.nodes = b.nodes[:1]
    with pytest.raises(FoldContractError, match="needs the forward's contract"):
        fold_attn_scale.run(b.graph(*visible))


def test_an_input_of_both_directions_in_one_graph_is_no_other_graphs():
    b = Build(fold="q")
    b.tensor("q", 1, 2, 3, 8)
    b.sdpa("attn", "q", "q", "q", stats="stats", attn_scale=0.25)
    b.tensor("do", 1, 2, 3, 8)
    b.sdpa_backward("bwd", "q", "q", "q", {"dQ": "dq"}, attn_scale=0.25)
    assert set(declines(fold_attn_scale, b.graph("o", "dq")).values()) == {
        "'q' is an input of the graph, not made by rope"
    }


# Groups


def two(fold: str = "q", second: float = 0.25, share: str = "q", **attrs: Any) -> Build:
    """Two attentions that share the rotated Q, the rotated K, both, or neither."""
    b = rotated(fold=fold)
    b.tensor("q_2", 2, 6, 5, 8), b.tensor("k_2", 2, 2, 7, 8)
    q, k = "q_rot", "k_rot"
    if "q" not in share:
        q = b.rope("rope_q2", "q_2", "q_rot2")
    if "k" not in share:
        k = b.rope("rope_k2", "k_2", "k_rot2")
    b.sdpa("attn", "q_rot", "k_rot", "v", attn_scale=0.25)
    b.sdpa("attn2", q, k, "v", "o2", attn_scale=second, **attrs)
    return b


@pytest.mark.parametrize(
    ("fold", "share", "edits"),
    [("q", "q", 1), ("q", "k", 2), ("q", "qk", 1), ("q", "", 2),
     ("symmetric", "q", 1), ("symmetric", "k", 1), ("symmetric", "qk", 1), ("symmetric", "", 2)],
)  # fmt: skip
def test_attentions_that_share_a_folded_tensor_change_together(fold: str, share: str, edits: int):
    g = two(fold, share=share).graph("o", "o2")
    assert len(done(fold_attn_scale, g)) == edits
    after = scales(run(fold_attn_scale, g))
    q, k = (0.25, 1.0) if fold == "q" else (0.5, 0.5)
    assert after["attn"] == after["attn2"] == 1.0
    assert {after[n] for n in after if n.startswith("rope_q")} == {q}
    assert {after[n] for n in after if n.startswith("rope_k")} == {k}


@pytest.mark.parametrize(
    ("fold", "share"), [("q", "q"), ("q", "qk"), ("auto", "q"), ("symmetric", "k")]
)
def test_different_scales_of_one_tensor_stay(fold: str, share: str):
    assert declines(fold_attn_scale, two(fold, 0.5, share).graph("o", "o2")) == {
        "attn": "['attn2'] read the same tensors with another attn_scale",
        "attn2": "['attn'] read the same tensors with another attn_scale",
    }


def test_different_scales_of_different_queries_fold():
    after = scales(run(fold_attn_scale, two("q", 0.5, "k").graph("o", "o2")))
    assert (after["rope_q"], after["rope_q2"]) == (0.25, 0.5)


@pytest.mark.parametrize("fold", ["q", "symmetric"])
def test_one_tensor_in_two_roles_stays(fold: str):
    b = Build(fold=fold)
    b.tensor("q", 2, 2, 5, 8), b.tensor("k", 2, 2, 5, 8)
    b.rope("rope_q", "q", "q_rot"), b.rope("rope_k", "k", "k_rot")
    b.sdpa("attn", "q_rot", "k_rot", "q", attn_scale=0.25)
    b.sdpa("crossed", "k_rot", "q_rot", "q", "o2", attn_scale=0.25)
    found = declines(fold_attn_scale, b.graph("o", "o2"))
    assert found["attn"] == "'q_rot' is k of 'crossed', not q alone"
    assert found["crossed"] == "'k_rot' is k of 'attn', not q alone"


def test_a_chain_of_shared_tensors_is_one_group():
    """attn shares q with attn2, which shares k with attn3: symmetric changes all or none."""
    b = two("symmetric", share="q")
    b.rope("rope_q3", "q", "q_rot3")
    b.sdpa("attn3", "q_rot3", "k_rot2", "v", "o3", attn_scale=0.25)
    after = scales(run(fold_attn_scale, b.graph("o", "o2", "o3")))
    assert {after[n] for n in after if n.startswith("rope")} == {0.5}
    b.sdpa("attn4", "q_rot3", "k", "v", "o4", attn_scale=0.25)
    found = declines(fold_attn_scale, b.graph("o", "o2", "o3", "o4"))
    assert set(found.values()) == {"'k' is an input of the graph, not made by rope"}
    assert set(found) == {"attn", "attn2", "attn3", "attn4"}


def test_one_member_that_may_not_holds_back_all():
    b = two("q", share="q")
    b.sum("plus", ["q_rot", "q_rot"], "x")
    found = declines(fold_attn_scale, b.graph("o", "o2", "x"))
    assert set(found.values()) == {"'q_rot' is also read by 'plus'"}
    g = two("auto", share="q").graph("o", "o2", "q_rot")
    assert "visible output" in declines(fold_attn_scale, g)["attn2"]
