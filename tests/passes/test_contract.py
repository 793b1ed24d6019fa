"""What a forward promises its backward, and every way in which a backward can break it."""

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest

from ropegraph.errors import FoldContractError, GraphError
from ropegraph.ir.contract import INV_LN2, FoldContract, FoldEntry, Turn
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import KEYWORDS, Rope, RopeFreqsGrad, Sdpa
from ropegraph.ir.score_mod import softcap
from ropegraph.passes import pipeline
from ropegraph.passes.fold_attn_scale import fold_attn_scale
from tests.ir.build import Build, backward, forward, joint, rotated
from tests.passes.text import nodes

FOLDS = [("off", False), ("q", False), ("symmetric", False), ("q", True), ("symmetric", True),
         ("auto", False), ("auto", True)]  # fmt: skip


def contract(b: Build, *visible: str, engines: dict[str, str] | None = None) -> FoldContract:
    return pipeline.contract_of(pipeline.run(b.graph(*visible)), engines or {})


def moved(fold: str, log2: bool, a: float) -> tuple[float, float, float, bool]:
    """What a fold makes of scales 1, 1 and a: of rope_q, rope_k, attn_scale, and base 2 or not."""
    if fold == "off":
        return 1.0, 1.0, a, False
    q, k = (sqrt(a), sqrt(a)) if fold == "symmetric" else (a, 1.0)
    return (q * INV_LN2 if log2 else q), k, 1.0, log2


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_entries(fold: str, log2: bool):
    b = forward(0.25, fold=fold, fold_log2=log2)
    made = contract(b, "o", engines={"attn": "torch"})
    assert (made.fold, made.fold_log2) == (fold, log2)
    assert made.entries == {
        "attn": FoldEntry(
            node="attn",
            attention=Sdpa(attn_scale=0.25),
            fold="q" if fold == "auto" else fold,
            log2=log2,
            q_chain=(Turn(Rope(8, 0)),),
            k_chain=(Turn(Rope(8, 0)),),
            ports=(),
            engine="torch",
        )
    }
    factors = made.entries["attn"].factors
    assert factors == pytest.approx(moved(fold, log2, 0.25)[:2], rel=1e-15)


def test_an_entry_says_what_was_recorded_whatever_was_folded():
    b = Build()
    b.tensor("q", 1, 2, 3, 8)
    b.tensor("bias", 1, 1, 3, 3)
    b.scale("s", "q", "x", 0.5)
    b.rope("rope_q", "x", "y", output_scale=3.0)
    b.scale("t", "y", "z", 7.0)
    b.sdpa("attn", "z", "q", "q", attn_scale=0.25, right_bound=0, ports={"bias": "bias"})
    entry = contract(b, "o").entries["attn"]
    assert entry.attention == Sdpa(attn_scale=0.25, right_bound=0)
    assert entry.q_chain == (7.0, Turn(Rope(8, 0, output_scale=3.0)), 0.5)
    assert entry.k_chain == ()
    assert entry.ports == ("bias",)


def test_a_declined_fold_is_an_entry_that_folds_nothing():
    b = forward(0.25)
    b.sum("plus", ["q_rot", "q_rot"], "x")
    made = contract(b, "o", "x")
    assert (made.entries["attn"].fold, made.entries["attn"].factors) == ("off", (1.0, 1.0))
    assert made.fold == "q"


def test_every_attention_has_an_entry():
    b = rotated()
    b.sdpa("attn", "q_rot", "k_rot", "v", attn_scale=0.25)
    b.sdpa("plain", "q", "k", "v", "o2", attn_scale=0.5)
    made = contract(b, "o", "o2", engines={"attn": "torch", "plain": "reference"})
    assert [(e.fold, e.engine) for e in made.entries.values()] == [
        ("q", "torch"),
        ("off", "reference"),
    ]


def entries(*names: str) -> FoldContract:
    entry = contract(forward(), "o").entries["attn"]
    return FoldContract({n: replace(entry, node=n) for n in names}, "q")


@pytest.mark.parametrize(
    ("names", "node", "want"),
    [
        (["a", "b"], "a", "a"),
        (["a", "b"], "b_backward", "b"),
        (["a"], "whatever", "a"),
        (["a", "a_backward"], "a_backward", "a"),
    ],
)
def test_which_entry_a_backward_node_belongs_to(names: list[str], node: str, want: str):
    assert entries(*names).entry_for(node).node == want


def test_a_node_without_an_entry():
    with pytest.raises(FoldContractError) as caught:
        entries("a", "b").entry_for("c")
    assert "sdpa_backward 'c'" in str(caught.value)
    assert "call it 'a' or 'a_backward', 'b' or 'b_backward'" in str(caught.value)
    assert isinstance(caught.value, GraphError)


# A backward as recorded, and one folded by hand


def folded(fold: str, log2: bool, a: float = 0.25, **settings: Any) -> Build:
    """The backward graph as the fold would leave it, written by hand."""
    q, k, attn_scale, is_log2 = moved(fold, log2, a)
    b = Build(fold="auto", **settings)
    b.tensor("q_rot", 2, 6, 5, 8), b.tensor("k_rot", 2, 2, 7, 8), b.tensor("v", 2, 3, 7, 4)
    grads = {"dQ": "dq_rot", "dK": "dk_rot", "dV": "dv"}
    attrs = {"attn_scale": attn_scale, "softmax_input_is_log2": is_log2}
    b.sdpa_backward("attn", "q_rot", "k_rot", "v", grads, **attrs)
    b.rope_backward("rope_q_b", "dq_rot", "dq", output_scale=q)
    b.rope_backward("rope_k_b", "dk_rot", "dk", output_scale=k)
    return b


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_both_forms_become_the_same_graph(fold: str, log2: bool):
    made = contract(forward(0.25, fold=fold, fold_log2=log2), "o")
    recorded = backward(0.25, fold="auto", contract=made).graph("dq", "dk", "dv")
    by_hand = folded(fold, log2, contract=made).graph("dq", "dk", "dv")
    results = [pipeline.run(g)[-1].graph for g in (recorded, by_hand)]
    assert nodes(results[0]) == nodes(results[1])
    q, k, attn_scale, is_log2 = moved(fold, log2, 0.25)
    attention, pair = results[0].nodes
    assert (attention.attrs.attn_scale, attention.attrs.softmax_input_is_log2) == (
        attn_scale,
        is_log2,
    )
    assert [p.output_scale for p in pair.attrs.parts] == pytest.approx([q, k], rel=1e-15)


def test_a_backward_that_folded_attn_scale_alone_is_finished():
    made = contract(forward(0.25, fold="q", fold_log2=True), "o")
    done = folded("q", True, contract=made).graph("dq", "dk", "dv")
    half = folded("q", False, contract=made).graph("dq", "dk", "dv")
    assert nodes(pipeline.run(half)[-1].graph) == nodes(pipeline.run(done)[-1].graph)


@pytest.mark.parametrize("off", [1 + 1e-13, 1 - 1e-13])
def test_scales_agree_to_1e_12(off: float):
    made = contract(forward(0.3), "o")
    for b in (backward(0.3 * off, fold="auto"), folded("q", False, 0.3 * off)):
        b.settings["contract"] = made
        assert pipeline.run(b.graph("dq", "dk", "dv"))


@pytest.mark.parametrize(
    "settings", [{"fold": "q"}, {"fold": "q", "fold_log2": True}, {"fold": "auto"}]
)
def test_a_backward_may_ask_for_the_fold_of_its_forward(settings: dict[str, Any]):
    made = contract(forward(0.25, fold="q", fold_log2=True), "o")
    b = backward(0.25, contract=made, **settings)
    assert pipeline.run(b.graph("dq", "dk", "dv"))[-1].graph.node("attn").attrs.attn_scale == 1.0


def test_gradients_that_are_not_asked_for_need_no_rotation():
    made = contract(forward(0.25), "o")
    b = Build(fold="auto", contract=made)
    b.tensor("q_rot", 2, 6, 5, 8), b.tensor("k_rot", 2, 2, 7, 8), b.tensor("v", 2, 3, 7, 4)
    b.sdpa_backward("attn", "q_rot", "k_rot", "v", {"dV": "dv"}, attn_scale=0.25)
    assert nodes(pipeline.run(b.graph("dv"))[-1].graph) == [
        (
            "dv* = sdpa_backward 'attn' "
            "(q=q_rot, k=k_rot, v=v, o=o, dO=do, stats=stats, attn_scale=1)"
        )
    ]


def test_the_gradient_of_angles_is_held_to_the_contract():
    made = contract(forward(0.25), "o")

    def graph(output_scale: float) -> Graph:
        b = backward(0.25, fold="auto", contract=made)
        b.tensor("q", 2, 6, 5, 8)
        op = RopeFreqsGrad(8, 0, output_scale=output_scale)
        b.node("angles", op, {"input": "q", "dY": "dq_rot", "freqs": "freqs"}, {"dfreqs": "df"})
        return b.graph("dq", "dk", "dv", "df")

    after = pipeline.run(graph(1.0))[-1].graph
    assert after.node("angles").attrs.output_scale == 0.25
    with pytest.raises(FoldContractError):
        pipeline.run(graph(1.01))


def reasons(graph: Graph) -> dict[tuple[str, str], str]:
    trace = pipeline.run(graph)
    return {(d.rule, d.node): d.text for t in trace for d in t.decisions if not d.applied}


def test_where_all_is_folded_the_passes_say_so():
    made = contract(forward(0.25, fold="q", fold_log2=True), "o")
    found = reasons(folded("q", True, contract=made).graph("dq", "dk", "dv"))
    assert found == {
        ("fold-attn-scale", "attn"): "the forward's contract leaves no attn_scale to fold here"
    }


def test_in_a_graph_of_both_directions_the_backward_node_decides():
    made = contract(forward(0.25, fold="q"), "o")
    made = replace(made, entries={"bwd": made.entries["attn"]})
    b = joint(0.25, fold="auto", contract=made)
    after, decisions = fold_attn_scale.run(b.graph("o", "dq", "dk", "dv"))
    assert [(d.node, d.applied) for d in decisions] == [("bwd", True), ("attn", False)]
    assert decisions[1].text == "the contract decides, at the backward node"
    assert after.node("attn").attrs.attn_scale == after.node("bwd").attrs.attn_scale == 1.0


# Disagreements

FORWARD: dict[str, Any] = {"attn_scale": 0.25}
ATTRIBUTES = {
    "left_bound": (3, "diagonal_band_left_bound is 3, but None in"),
    "right_bound": (0, "diagonal_band_right_bound is 0, but None in"),
    "bottom_right": (True, "diagonal_alignment=BOTTOM_RIGHT is True, but False in"),
    "alibi": (True, "use_alibi_mask is True, but False in"),
    "padding": (True, "use_padding_mask is True, but False in"),
    "dropout_p": (0.5, "dropout probability is 0.5, but None in"),
    "score_mod": (softcap(2.0), ", but None in"),
    "attn_scale": (0.26, "has attn_scale=0.26"),
    "softmax_input_is_log2": (True, "softmax_input_is_log2=True"),
}


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("field", ATTRIBUTES)
def test_an_attribute_that_differs_is_named(field: str, is_ours: bool):
    """On the backward alone, and on the forward alone."""
    given, text = ATTRIBUTES[field]
    changed = {**FORWARD, field: given}
    f = rotated()
    f.sdpa("attn", "q_rot", "k_rot", "v", **(FORWARD if is_ours else changed))
    b = backward(fold="auto", contract=contract(f, "o"))
    b.nodes[0] = b.nodes[0].with_attrs(**(changed if is_ours else FORWARD))
    with pytest.raises(FoldContractError) as caught:
        pipeline.run(b.graph("dq", "dk", "dv"))
    message = str(caught.value)
    assert "sdpa_backward 'attn'" in message
    assert KEYWORDS.get(field, field) in message
    if is_ours:
        assert text in message


@pytest.mark.parametrize("port", ["bias", "sink_token", "attn_scale"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_an_input_that_only_one_side_has_is_named(port: str, is_ours: bool):
    dims = {"bias": (1, 1, 5, 7), "sink_token": (1, 6, 1, 1), "attn_scale": (1, 1, 1, 1)}

    def with_port(b: Build, index: int) -> None:
        b.tensor("extra", *dims[port])
        node = b.nodes[index]
        b.nodes[index] = replace(node, inputs={**node.inputs, port: "extra"})

    f = forward(0.25)
    if not is_ours:
        with_port(f, 2)
    b = backward(0.25, fold="auto", contract=contract(f, "o"))
    if is_ours:
        with_port(b, 0)
    with pytest.raises(FoldContractError, match=f"{port} is given in the") as caught:
        pipeline.run(b.graph("dq", "dk", "dv"))
    has = "backward" if is_ours else "forward"
    assert f"{port} is given in the {has}" in str(caught.value)


ROTATIONS: dict[str, Any] = {
    "output_scale": 1.01,
    "rope_dim": 4,
    "rope_offset": 4,
    "attention_factor": 1.1,
    "interleaved": True,
    "interleaved_output": True,
    "inverse": True,
    "table_layout": "full",
    "half_width": True,
    "numerics": "hf",
    "angle_precision": "exact",
}


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("field", ROTATIONS)
def test_a_rotation_that_differs_is_refused(field: str, side: str):
    b = backward(0.25, fold="auto", contract=contract(forward(0.25), "o"))
    for i, node in enumerate(b.nodes):
        if node.name == f"rope_{side}_b":
            changes = {"rope_dim": 4} if field == "rope_offset" else {}
            b.nodes[i] = node.with_attrs(**changes, **{field: ROTATIONS[field]})
            if field in ("rope_dim", "rope_offset", "half_width"):
                b.tensor("freqs4", 16, 1, 1, 4)
                b.nodes[i] = replace(b.nodes[i], inputs={**node.inputs, "freqs": "freqs4"})
    with pytest.raises(FoldContractError, match="does not agree") as caught:
        pipeline.run(b.graph("dq", "dk", "dv"))
    assert "every rope_backward must have the attributes of its rope" in str(caught.value)
    if field == "output_scale":
        wanted = 0.25 if side == "q" else 1
        assert f"d{side.upper()} scaled by 1.01" in str(caught.value)
        assert f"d{side.upper()} scaled by {wanted}" in str(caught.value)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (("q", False), ("symmetric", False)),
        (("q", True), ("q", False)),
        (("symmetric", True), ("symmetric", False)),
        (("q", False), ("off", False)),
    ],
)
def test_a_backward_folded_otherwise_is_refused(mine: Any, theirs: Any):
    made = contract(forward(0.25, fold=theirs[0], fold_log2=theirs[1]), "o")
    b = folded(*mine, contract=made)
    with pytest.raises(FoldContractError, match="does not agree"):
        pipeline.run(b.graph("dq", "dk", "dv"))


@pytest.mark.parametrize(
    "settings",
    [{"fold": "symmetric"}, {"fold": "off"}, {"fold": "q", "fold_log2": True}, {"fold_log2": True}],
)
def test_settings_that_differ_from_the_forwards_are_refused(settings: dict[str, Any]):
    made = contract(forward(0.25, fold="q"), "o")
    b = backward(0.25, contract=made, **{"fold": "auto", **settings})
    with pytest.raises(FoldContractError, match="differs from the forward's fold='q'") as caught:
        pipeline.run(b.graph("dq", "dk", "dv"))
    assert "leave both out here" in str(caught.value)


def test_a_gradient_that_could_not_return_the_scale_is_refused():
    """dQ bound as it is, or read by something else, would lack the factor."""
    made = contract(forward(0.25, fold="q", fold_log2=True), "o")
    b = backward(0.25, fold="auto", contract=made)
    b.nodes = [n for n in b.nodes if n.name != "rope_q_b"]
    with pytest.raises(FoldContractError, match="'dq_rot' is not read by a rope_backward"):
        pipeline.run(b.graph("dq_rot", "dk", "dv"))
    b = backward(0.25, fold="auto", contract=made)
    b.tensor("extra", 2, 6, 5, 8), b.sum("plus", ["dq_rot", "extra"], "x")
    with pytest.raises(FoldContractError, match="'x' is a visible sum of 'dq_rot'"):
        pipeline.run(b.graph("dq", "dk", "dv", "x"))


def test_1_over_ln_2_that_cannot_return_is_refused():
    made = contract(forward(1.0, fold="q", fold_log2=True), "o")
    b = backward(1.0, fold="auto", contract=made)
    b.nodes = [n for n in b.nodes if n.name != "rope_q_b"]
    with pytest.raises(FoldContractError, match="folded 1/ln 2, but here"):
        pipeline.run(b.graph("dq_rot", "dk", "dv"))
