"""C26: every setting of the forward that changes numbers reaches the backward, or is refused."""

from dataclasses import fields, replace

import pytest
import torch

import ropegraph
from ropegraph.dtypes import DType
from ropegraph.engines.reference.dropout import drop_factors
from ropegraph.errors import FoldContractError
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import KEYWORDS, Attention, Rope, RopeBackward, Rotation, SdpaBackward
from ropegraph.ir.score_mod import softcap
from ropegraph.passes import pipeline
from ropegraph.testing import oracle
from ropegraph.testing.budget import assert_within, relative
from ropegraph.testing.inputs import normal
from tests.numerics.attention import FOLDS, Case, data, execute, expected, forward, run

F64 = torch.float64
ENGINES = ("torch", "reference")

SETTINGS = {
    "attn_scale": {"attn_scale": -1.7},
    "left bound": {"left": 3},
    "right bound": {"right": 1},
    "causal, bottom right": {"right": 0, "bottom_right": True},
    "window, bottom right": {"left": 3, "right": 0, "bottom_right": True},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi": True},
    "bias": {"bias": (1, 6, 1, 7)},
    "sink": {"sink": True},
    "padding": {"lengths": ((5, 2), (3, 7))},
    "padding, bottom right": {"lengths": ((5, 2), (3, 7)), "right": 0, "bottom_right": True},
    "partial rotation": {"r": 4, "rope_offset": 1},
    "scales of the user": {"q_scale": -2.0, "k_scale": 0.25},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_derived_backward_has_every_setting(engine, setting):
    case = Case(**SETTINGS[setting])
    given = data(case)
    want = expected(case, given)
    for fold, log2 in (("off", False), ("auto", False), ("q", True)):
        got = run(case, given, fold=fold, fold_log2=log2, engines=engine)
        for name in want:
            assert_within(got[name], want[name], relative(want[name], 1e-11), f"{name}, {fold}")


# One other value for every attribute of attention: a new attribute needs its line here.
ATTENTION = {
    "attn_scale": 0.31,
    "left_bound": 4,
    "right_bound": 1,
    "bottom_right": True,
    "alibi": True,
    "padding": True,
    "dropout_p": 0.5,
    "score_mod": softcap(2.0),
    "softmax_input_is_log2": True,
    "compute": DType.FLOAT,
}
# Likewise for a rotation. rope_dim goes with half_width, so that the table still fits.
ROTATION = {
    "rope_dim": {"rope_dim": 4, "half_width": True},
    "rope_offset": {"rope_offset": 1},
    "output_scale": {"output_scale": 0.9},
    "attention_factor": {"attention_factor": 1.1},
    "interleaved": {"interleaved": True},
    "interleaved_output": {"interleaved_output": True},
    "inverse": {"inverse": True},
    "angles": {"angles": "cos_sin"},
    "half_width": {"rope_dim": 4, "half_width": True},
    "table_layout": {"table_layout": "full"},
    "angle_precision": {"angle_precision": "exact"},
    "numerics": {"numerics": "hf"},
    "cp_size": {"cp_size": 2},
    "cp_rank": {"cp_rank": 1},
    "compute": {"compute": DType.FLOAT},
}


def recorded_backward(fold: str, log2: bool) -> Graph:
    """A backward graph as recorded, with the contract of its forward."""
    # Even lengths and a long table: cp_size=2 fits them as well.
    case = Case(right=0, d_qk=4, r=2, rope_offset=2, s_q=4, s_kv=6)
    given = data(case)
    given["freqs"] = given["freqs"].repeat(2, 1, 1, 1)
    g = forward(case, given, fold=fold, fold_log2=log2)
    return g.backward_graph(["o"], ["q", "k", "v"]).lowered.recorded


def test_the_lists_name_every_attribute():
    assert set(ATTENTION) == {f.name for f in fields(Attention)}
    # head_groups says where heads lie in memory, and changes no number.
    assert set(ROTATION) == {f.name for f in fields(Rotation)} - {"head_groups"}


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("name", ATTENTION)
def test_any_other_attribute_of_attention_is_refused(fold, log2, name):
    graph = recorded_backward(fold, log2)
    pipeline.run(graph)
    node = next(n for n in graph.nodes if isinstance(n.attrs, SdpaBackward))
    changed = graph.edited([node.with_attrs(**{name: ATTENTION[name]})])
    with pytest.raises(FoldContractError, match=f"'attn_backward'.*{KEYWORDS.get(name, name)}"):
        pipeline.run(changed)


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("name", ROTATION)
@pytest.mark.parametrize("side", ["rope_q", "rope_k"])
def test_any_other_attribute_of_a_rotation_is_refused(fold, log2, name, side):
    # The table is two columns wide: r = 2 at full width and r = 4 at half width both read it.
    graph = recorded_backward(fold, log2)
    node = graph.node(f"{side}_backward")
    assert isinstance(node.attrs, RopeBackward)
    change = ROTATION[name]
    if "half_width" in change:
        change = {**change, "rope_offset": 0}
    with pytest.raises(FoldContractError, match="'attn_backward'"):
        pipeline.run(graph.edited([node.with_attrs(**change)]))


@pytest.mark.parametrize("port", ["bias", "sink"])
def test_an_input_that_only_one_side_has_is_refused(port):
    case = Case(bias=(1, 6, 5, 7) if port == "bias" else None, sink=port == "sink")
    graph = forward(case, data(case)).backward_graph(["o"], ["q"]).lowered.recorded
    node = next(n for n in graph.nodes if isinstance(n.attrs, SdpaBackward))
    name = "bias" if port == "bias" else "sink_token"
    ports = {p: v for p, v in node.inputs.items() if p != name}
    with pytest.raises(FoldContractError, match=f"{name} is given in the forward"):
        pipeline.run(graph.edited([replace(node, inputs=ports)]))


def test_the_forward_and_backward_rotations_have_the_same_attributes():
    assert {f.name for f in fields(Rope)} == {f.name for f in fields(RopeBackward)}


def with_dropout(
    given: dict[str, torch.Tensor], seed: object, offset: object, **settings: object
) -> ropegraph.pygraph:
    """sdpa with dropout behind a rotated Q and K: outputs o, and what a backward needs."""
    g = ropegraph.pygraph(io_data_type=F64, **settings)
    t = {n: g.tensor_like(given[n], name=n) for n in ("q", "k", "v", "freqs")}
    q, k = (g.rope(t[n], t["freqs"], half_width=True, name=f"rope_{n}") for n in ("q", "k"))
    o, _ = g.sdpa(q, k, t["v"], 0.3, dropout=(0.5, seed, offset), name="attn")
    o.set_output(True).set_name("o")
    return g


def one_key(s_q: int = 64, d_v: int = 8) -> dict[str, torch.Tensor]:
    """One key with v = 1: every row of O is the dropout factor of its only weight."""
    return {
        "q": normal((1, 2, s_q, 4), F64, seed=1),
        "k": normal((1, 2, 1, 4), F64, seed=2),
        "v": torch.ones(1, 2, 1, d_v, dtype=F64),
        "freqs": oracle.angles(s_q, 4).reshape(s_q, 1, 1, 2),
        "do": torch.ones(1, 2, s_q, d_v, dtype=F64),
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_the_backward_drops_what_the_forward_dropped(engine, fold, log2):
    given = one_key()

    def both(seed: int, offset: int) -> dict[str, torch.Tensor]:
        g = with_dropout(given, seed, offset, fold=fold, fold_log2=log2, engines=engine)
        backward = g.backward_graph(["o"], ["q", "k", "v"])
        results = execute(g, given)
        return results | execute(backward, {**given, **results})

    got = both(11, 5)
    assert set(got["o"].unique().tolist()) == {0.0, 2.0}
    assert torch.equal(got["o"], got["o"][..., :1].expand_as(got["o"]))
    assert torch.equal(got["dv"], got["o"].sum(dim=2, keepdim=True))
    again = both(11, 5)
    assert all(torch.equal(got[name], again[name]) for name in got)
    assert not torch.equal(both(11, 6)["o"], got["o"])
    assert not torch.equal(both(12, 5)["o"], got["o"])


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_has_the_gradients_of_its_mask(engine):
    given = {
        "q": normal((2, 4, 5, 4), F64, seed=1),
        "k": normal((2, 2, 7, 4), F64, seed=2),
        "v": normal((2, 1, 7, 3), F64, seed=3),
        "freqs": oracle.angles(7, 4).reshape(7, 1, 1, 2),
        "do": normal((2, 4, 5, 3), F64, seed=4),
        "seed": torch.full((1, 1, 1, 1), 2**40 + 3),
        "offset": torch.full((1, 1, 1, 1), 2**33 + 9),
    }
    g = ropegraph.pygraph(io_data_type=F64, fold="q", engines=engine)
    t = {n: g.tensor_like(x, name=n) for n, x in given.items() if n != "do"}
    q, k = (g.rope(t[n], t["freqs"], half_width=True) for n in ("q", "k"))
    o, _ = g.sdpa(q, k, t["v"], 0.3, dropout=(0.4, t["seed"], t["offset"]), name="attn")
    o.set_output(True).set_name("o")
    backward = g.backward_graph(["o"], ["q", "k", "v"])
    results = execute(g, given)
    results |= execute(backward, {**given, **results})
    leaves = [oracle.leaf(given[n]) for n in ("q", "k", "v")]
    q, k = (oracle.rope(x, oracle.angles(7, 4)[: x.shape[2]]) for x in leaves[:2])
    drop = drop_factors(0.4, 2**40 + 3, 2**33 + 9, (2, 4, 5, 7))
    want, _ = oracle.attention(q, k, leaves[2], attn_scale=0.3, drop=drop)
    assert_within(results["o"], want, relative(want, 1e-12), "o")
    grads = oracle.gradients(want, leaves, given["do"])
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert_within(results[name], grad, relative(grad, 1e-11), name)


def test_a_backward_with_dropout_runs_where_its_mask_was_drawn():
    given = one_key()
    g = with_dropout(given, 1, 2, engines="reference")
    assert [s.engine for s in g.backward_graph(["o"], ["v"]).plan.steps] == ["reference"]
    backward = ropegraph.pygraph(io_data_type=F64, fold_contract=g.fold_contract)
    t = {n: backward.tensor_like(given[n]) for n in ("q", "k", "v", "do")}
    o, stats = backward.tensor_like(given["do"]), backward.tensor((1, 2, 64, 1))
    *_, dv = backward.sdpa_backward(
        t["q"], t["k"], t["v"], o, t["do"], stats, 0.3, dropout=(0.5, 1, 2), name="attn"
    )
    dv.set_output(True)
    with pytest.raises(ropegraph.UnsupportedError, match="drew its dropout mask on 'reference'"):
        backward.build()


@pytest.mark.parametrize("asks", ["argument", "torch, around the forward alone"])
def test_two_runs_of_a_deterministic_backward_give_the_same_bits(asks):
    case = Case(b=2, h_q=4, h_k=2, h_v=1, s_q=65, s_kv=65, dtype=torch.float32, right=0)
    given = data(case)
    wants = asks != "argument"
    was = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(wants)
        g = forward(case, given)
        for name in ("q_rot", "k_rot"):
            g.find_tensor(name).set_saved(True)
        results = execute(g, given)
    finally:
        torch.use_deterministic_algorithms(was)
    backward = ropegraph.pygraph(io_data_type=case.dtype, fold_contract=g.fold_contract)
    names = ("q_rot", "k_rot", "v", "o", "do", "stats", "freqs")
    t = {n: backward.tensor_like((given | results)[n], name=n) for n in names}
    *grads, dv = backward.sdpa_backward(
        *(t[n] for n in names[:-1]),
        attn_scale=0.3,
        use_causal_mask=True,
        use_deterministic_algorithm=not wants,
        name="attn",
    )
    for tensor, name in zip(grads, ("dq", "dk"), strict=True):
        backward.rope_backward(tensor, t["freqs"]).set_output(True).set_name(name)
    dv.set_output(True).set_name("dv")
    first, second = (execute(backward, given | results) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
