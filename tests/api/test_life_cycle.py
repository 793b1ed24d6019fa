"""FE's life cycle: every order of its steps, what is frozen when, and what is done on demand."""

import inspect
from typing import Any

import pytest
import torch

import ropegraph
from ropegraph import GraphError, build_plan_policy, heur_mode
from tests.api.graphs import F32, X, attention, buffers, new, rotation, run

STEPS = ("validate", "build_operation_graph", "create_execution_plans", "check_support",
         "build_plans", "build", "get_workspace_size")  # fmt: skip


def test_the_steps_in_order():
    g = attention()
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([heur_mode.A, heur_mode.FALLBACK])
    g.check_support()
    g.build_plans(build_plan_policy.HEURISTICS_CHOICE)
    assert g.get_workspace_size() > 0
    assert set(run(g)) == {"o", "stats"}


@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize("second", [*STEPS, "execute"])
def test_a_step_does_what_is_missing_before_it(first: str, second: str):
    want = run(attention())
    g = attention()
    getattr(g, first)()
    if second != "execute":
        getattr(g, second)()
    got = run(g)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_execute_before_build_builds():
    """C45: FE does so on demand."""
    g = rotation()
    pack = {"x": torch.ones(X), "f": torch.zeros(5, 1, 1, 8), "y": torch.full(X, torch.nan)}
    g.execute(pack)
    assert torch.equal(pack["y"], pack["x"])


def test_steps_may_be_repeated():
    g = attention()
    for _ in range(2):
        for step in STEPS:
            getattr(g, step)()
    plan = g.plan
    g.build([heur_mode.B], build_plan_policy.ALL)
    assert g.plan is plan, "planning is done once"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda g: g.tensor(X), "cannot add a tensor"),
        (lambda g: g.tensor_like(torch.ones(X)), "cannot add a tensor"),
        (lambda g: g.scale(g.find_tensor("q"), 2.0), "cannot record scale"),
        (lambda g: g.sdpa(*(g.find_tensor(n) for n in "qkv")), "cannot record sdpa after"),
        (lambda g: g.find_tensor("q").set_name("x"), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_uid(7), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_dim(X), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_stride((1, 1, 1, 1)), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_data_type(F32), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q_rot").set_output(True), "cannot change tensor 'q_rot'"),
        (lambda g: g.find_tensor("q_rot").set_saved(True), "cannot change tensor 'q_rot'"),
        (lambda g: g.find_tensor("q_rot").set_is_virtual(False), "cannot change tensor 'q_rot'"),
        (lambda g: g.find_tensor("q").set_ragged_offset(None), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_ragged_offset_multiplier(2), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_is_pass_by_value(True), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_alignment_value(16), "cannot change tensor 'q'"),
        (lambda g: g.find_tensor("q").set_reordering_type(None), "cannot change tensor 'q'"),
    ],
)
def test_a_graph_is_frozen_from_validate_on(step: str, action: Any, text: str):
    g = attention()
    getattr(g, step)()
    before = str(g)
    # create_execution_plans and check_support are build_operation_graph, build_plans is build.
    closing = {"validate": "validate", "get_workspace_size": "get_workspace_size"}
    by = closing.get(step, "build" if step.startswith("build") else "build_operation_graph")
    if step == "build_operation_graph":
        by = step
    with pytest.raises(GraphError) as caught:
        action(g)
    assert text in str(caught.value)
    assert f"after {by}(); " in str(caught.value)
    assert "record everything first, or start a new graph" in str(caught.value)
    assert str(g) == before


LOOKS: dict[str, Any] = {
    "explain": lambda g: g.explain(),
    "recorded": lambda g: g.to_mermaid(),
    "lowered": lambda g: g.to_mermaid("lowered"),
    "plan": lambda g: g.plan,
    "decisions": lambda g: g.fold_decisions,
    "why_not": lambda g: g.why_not("torch"),
    "serialize": lambda g: g.serialize(),
    "key": lambda g: g.key,
    "text": str,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_is_no_end_and_shows_what_is_there(look: str):
    g = attention()
    before = LOOKS[look](g)
    g.find_tensor("stats").set_output(True)
    g.find_tensor("q_rot").set_output(True)
    fresh = attention()
    fresh.find_tensor("stats").set_output(True)
    fresh.find_tensor("q_rot").set_output(True)
    after = LOOKS[look](g)
    assert after == LOOKS[look](fresh)
    if look not in ("why_not", "plan"):
        assert after != before
    g.backward_graph(["o"], ["q", "k", "v"]).build()
    g.build()


def test_looking_at_a_graph_does_not_freeze_or_change_it():
    g = new(io_data_type=torch.float16)
    x, f = g.tensor(X, name="x"), g.tensor((5, 1, 1, 8), name="f")
    y = g.rope(x, f).set_output(True)
    text = str(g)
    assert "x: fp16" in text
    assert (x.get_data_type(), y.get_data_type()) == (ropegraph.data_type.NOT_SET,) * 2
    x.set_data_type(F32)
    assert "OUT_0*: fp32" in str(g)
    g.validate()
    assert y.get_data_type() is ropegraph.data_type.FLOAT


def test_a_failed_validate_leaves_the_graph_open():
    g = new()
    x = g.tensor(X, name="x")
    y = g.scale(x, 2.0)
    with pytest.raises(GraphError, match="has no output"):
        g.build()
    y.set_output(True)
    assert len(g.plan.steps) == 1


def test_the_positional_order_of_fe():
    names = [
        "name",
        "io_data_type",
        "intermediate_data_type",
        "compute_data_type",
        "handle",
        "sm_count",
        "sm_version",
        "kernel_cache",
        "device_property",
        "is_dynamic_shape_enabled",
        "is_override_shape_enabled",
        "cuda_graph_retention",
    ]
    parameters = inspect.signature(ropegraph.pygraph).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == names
    handle = ropegraph.create_handle()
    given = ("mine", F32, F32, torch.float64, handle, 132, 90, None, None, False, False, None)
    g = ropegraph.pygraph(*given)
    x, f = g.tensor(X), g.tensor((5, 1, 1, 8))
    g.rope(x, f).set_output(True)
    assert str(g).startswith("graph 'mine' ")
    assert "compute=fp64" in str(g)


@pytest.mark.parametrize(
    ("method", "want"),
    [
        ("tensor", ["dim", "stride", "data_type", "is_virtual", "is_pass_by_value",
                    "ragged_offset", "reordering_type", "name", "uid", "ragged_offset_multiplier",
                    "alignment_value"]),
        ("tensor_like", ["template", "name", "is_virtual"]),
        ("rope", ["input", "freqs", "output_scale", "rope_dim", "compute_data_type", "name"]),
        ("rope_backward", ["dY", "freqs", "output_scale", "rope_dim", "compute_data_type", "name"]),
        ("sdpa", ["q", "k", "v", "attn_scale"]),
        ("sdpa_backward", ["q", "k", "v", "o", "dO", "stats", "attn_scale"]),
        ("scale", ["input", "scale", "compute_data_type", "name"]),
        ("mul", ["a", "b", "compute_data_type", "name"]),
        ("execute", ["variant_pack", "workspace", "handle"]),
    ],
)  # fmt: skip
def test_methods_take_what_fe_takes_in_its_order(method: str, want: list[str]):
    parameters = inspect.signature(getattr(ropegraph.pygraph, method)).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[1:] == want


def test_what_a_plan_says():
    g = attention(settings={"fold": "q"})
    assert len(g.plan.steps) == 2
    assert "rope_q+rope_k" in str(g.plan)
    assert f"workspace {g.get_workspace_size()} bytes on cpu" in str(g.plan)
    explained = g.explain()
    assert "fold=q" in explained
    assert "3 nodes recorded, 2 launches on cpu" in explained
    assert "attn_scale 0.3 moved to rope_q (0.3)" in explained
    assert [d.applied for d in g.fold_decisions] == [True, True]
    assert g.fold_contract.entries["attn"].fold == "q"
    assert "flowchart" in g.to_mermaid()
    assert ":::scaled" in g.to_mermaid("lowered")
    with pytest.raises(GraphError, match="stage='drawn'; use one of 'recorded', 'lowered'"):
        g.to_mermaid("drawn")


def test_explain_says_why_not():
    g = attention(settings={"fold": "q"})
    q_rot = g.find_tensor("q_rot")
    g.scale(q_rot, 2.0, name="cache").set_output(True)
    text = g.explain()
    assert "fold-attn-scale did not, at attn: 'q_rot' is also read by 'cache'" in text


def test_explain_names_rotations_with_plus_signs():
    g = new()
    q, f = g.tensor(X, name="q"), g.tensor((5, 1, 1, 8), name="f")
    a, b = g.rope(q, f, name="q+1"), g.rope(q, f, name="k+2")
    g.sdpa(a, b, q, name="attn")[0].set_output(True)
    lines = [line.split() for line in g.explain().split("\n")]
    assert ["q+1", "output_scale=1", "the", "same"] in lines
    assert ["k+2", "output_scale=1", "the", "same"] in lines


def test_serialize_round_trip():
    g = attention(settings={"fold": "symmetric", "fold_log2": True, "compute_data_type": "double"})
    g.find_tensor("o").set_uid(3)
    g.find_tensor("q_rot").set_saved(True)
    back = ropegraph.pygraph().deserialize(g.serialize())
    assert str(back) == str(g)
    assert back.key == g.key
    assert back.serialize() == g.serialize()
    want, got = run(g), run(back)
    assert all(torch.equal(got[n], want[n]) for n in want)
    with pytest.raises(GraphError, match="deserialize needs a new, empty graph"):
        back.deserialize(g.serialize())
    with pytest.raises(GraphError, match="the checksum does not match"):
        ropegraph.pygraph().deserialize(g.serialize().replace(b"0.3", b"0.4"))


def test_a_serialized_graph_keeps_the_numbers_it_was_recorded_with():
    g = new()
    q = g.tensor((1, 2, 4, 8), name="q")
    g.sdpa(q, q, q, dropout=(0.5, 1234, 7), name="attn")[0].set_output(True).set_name("o")
    back = ropegraph.pygraph().deserialize(g.serialize())
    pack = {"q": torch.randn(1, 2, 4, 8), "o": torch.full((1, 2, 4, 8), torch.nan)}
    got = {**pack, "o": pack["o"].clone()}
    g.execute(pack)
    back.execute(got)
    assert torch.equal(pack["o"], got["o"])


def test_a_serialized_backward_keeps_its_contract_and_what_it_needs():
    g = attention(settings={"fold": "q"})
    b = g.backward_graph(["o"], ["q", "k", "v"])
    back = ropegraph.pygraph().deserialize(b.serialize())
    assert back.saved == b.saved
    assert back.plan.graph == b.plan.graph
    assert set(buffers(back)) == set(buffers(b))
