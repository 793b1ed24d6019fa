"""Faults found by using the API as nobody planned to, each with what is right instead."""

import json

import numpy as np
import pytest
import torch

import ropegraph as rg
from ropegraph import FoldContractError, GraphError, PositionError
from ropegraph.compat import neuron
from ropegraph.testing import oracle

DIM = (1, 1, 5, 8)
F32 = torch.float32


def table() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.rand(5, 1, 1, 8)


def two_rotations(op: str = "rope") -> rg.pygraph:
    g = rg.pygraph(io_data_type=F32)
    x, f = g.tensor(DIM, name="x"), g.tensor((5, 1, 1, 8), name="f")
    for name, scale in (("a", 1.0), ("c", 2.0)):
        getattr(g, op)(x, f, scale, name=f"turn_{name}").set_output(True).set_name(name)
    return g


@pytest.mark.parametrize("op", ["rope", "rope_backward"])
@pytest.mark.parametrize("over", ["a", "c"])
def test_in_place_where_both_parts_of_a_launch_read(op: str, over: str):
    g = two_rotations(op)
    assert len(g.plan.steps) == 1
    x = torch.ones(DIM)
    pack = {"x": x, "f": table(), "a": torch.empty(DIM), "c": torch.empty(DIM), over: x}
    with pytest.raises(GraphError, match="shares memory with that of 'x'"):
        g.execute(pack)
    assert bool((x == 1).all())


def lone() -> rg.pygraph:
    g = rg.pygraph(io_data_type=F32)
    x, f = g.tensor(DIM, name="x"), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f, name="turn").set_output(True).set_name("y")
    return g


def test_a_leaf_that_starts_to_require_grad_between_two_calls():
    g, x = lone(), torch.ones(DIM)
    g.execute({"x": x, "f": table(), "y": x})
    before = x.clone()
    x.requires_grad_()
    with pytest.raises(GraphError, match="leaf tensor that requires grad"):
        g.execute({"x": x, "f": table(), "y": x})
    assert torch.equal(x.detach(), before)


def test_in_place_is_one_data_type():
    g = rg.pygraph(io_data_type=F32)
    x, f = g.tensor(DIM, name="x"), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f).set_output(True).set_name("y").set_data_type(torch.float16)
    store = torch.ones(DIM)
    half = store.view(torch.float16).view(-1)[:40].view(DIM)
    with pytest.raises(GraphError, match="shares memory"):
        g.execute({"x": store, "f": table(), "y": half})


def test_memory_that_is_taken_away_between_two_calls():
    g = lone()
    pack = {"x": torch.ones(DIM), "f": table(), "y": torch.empty(DIM)}
    g.execute(pack)
    pack["x"].untyped_storage().resize_(0)
    with pytest.raises(GraphError, match="'x' is bound to a Tensor that has no memory"):
        g.execute(pack)


def test_numpy_with_negative_strides():
    g = lone()
    reversed_view = np.ones(DIM, np.float32)[:, :, ::-1]
    with pytest.raises(GraphError, match="'x': its buffer has negative strides"):
        g.execute({"x": reversed_view, "f": table(), "y": torch.empty(DIM)})
    with pytest.raises(GraphError, match="negative strides"):
        rg.pygraph().tensor_like(reversed_view)


def handmade(fold: str, visible: bool) -> tuple[rg.pygraph, rg.pygraph]:
    g = rg.pygraph(io_data_type=torch.float64)
    q, k, v = (g.tensor(DIM, name=n) for n in "qkv")
    f = g.tensor((5, 1, 1, 8), data_type=F32, name="f")
    q2, k2 = g.rope(q, f).set_saved(True), g.rope(k, f).set_saved(True)
    o, _ = g.sdpa(q2, k2, v, 0.3, name="attn")
    o.set_output(True)
    b = rg.pygraph(io_data_type=torch.float64, fold=fold, fold_contract=g.fold_contract)
    names = ("q2", "k2", "v", "o", "do", "stats")
    t = {n: b.tensor((1, 1, 5, 1) if n == "stats" else DIM, name=n) for n in names}
    f = b.tensor((5, 1, 1, 8), data_type=F32, name="f")
    dq2, dk2, _ = b.sdpa_backward(*t.values(), attn_scale=0.3, name="attn")
    dq2.set_output(visible).set_name("dq2")
    b.rope_backward(dq2, f).set_output(True)
    b.rope_backward(dk2, f).set_output(True)
    return g, b


def test_auto_changes_no_gradient_that_the_caller_sees():
    handmade("auto", visible=False)[1].build()
    with pytest.raises(FoldContractError, match=r"'dq2' is a visible output .* fold='q' in this"):
        handmade("auto", visible=True)[1].build()
    handmade("q", visible=True)[1].build()


def test_a_backward_that_an_explicit_fold_forbids_is_refused_when_it_is_asked_for():
    for fold in ("auto", "q"):
        g = rg.pygraph(io_data_type=F32, fold=fold)
        q, k, v = (g.tensor(DIM, name=n) for n in "qkv")
        f = g.tensor((5, 1, 1, 8), name="f")
        q2 = g.rope(q, f).set_output(True).set_name("q2")
        o, _ = g.sdpa(q2, g.rope(k, f), v, 0.3, name="attn")
        o.set_output(True).set_name("o")
        if fold == "auto":
            g.backward_graph(["o", "q2"], ["q", "k"]).build()
        else:
            with pytest.raises(FoldContractError, match="record the forward with fold='auto'"):
                g.backward_graph(["o", "q2"], ["q", "k"])


def wrapped() -> tuple[rg.Graph, rg.pygraph]:
    inputs = ["q", "k", "v", "f"]
    with rg.Graph(io_data_type=F32, inputs=inputs, outputs=["o", "attn::Stats"]) as g:
        q, k, v = (g.tensor(DIM, name=n) for n in "qkv")
        f = g.tensor((5, 1, 1, 8), name="f")
        o, _ = g.sdpa(g.rope(q, f, name="rq"), g.rope(k, f, name="rk"), v, 0.3, name="attn")
        o.set_output(True).set_name("o")
        backward = g.backward_graph([o], [q])
    return g, backward


def test_graph_and_backward_graph_together():
    g, backward = wrapped()
    torch.manual_seed(0)
    q, k, v = (torch.randn(DIM) for _ in range(3))
    o, stats = g(q, k, v, table())
    pack = g({"q": q, "k": k, "v": v, "f": table()})
    assert torch.equal(pack["o"], o)
    assert torch.equal(pack["attn::Stats"], stats)
    made = {n: pack[n] for n in backward.saved} | {"do": torch.ones(DIM), "dq": torch.empty(DIM)}
    backward.execute(made)
    leaf = q.double().requires_grad_()
    turn = table()[:, 0, 0, :4].double()
    rotated = oracle.rope(leaf, turn), oracle.rope(k.double(), turn)
    want = oracle.attention(*rotated, v.double(), attn_scale=0.3)[0].sum()
    (grad,) = torch.autograd.grad(want, leaf)
    torch.testing.assert_close(made["dq"].double(), grad, atol=1e-5, rtol=1e-5)


def test_graph_called_with_two_buffers_for_one_tensor():
    g, _ = wrapped()
    pack = {"q": torch.ones(DIM), "rq::input": torch.zeros(DIM)}
    with pytest.raises(GraphError, match="'q' is given two buffers, the second by 'rq::input'"):
        g(pack | {"k": torch.ones(DIM), "v": torch.ones(DIM), "f": table()})


def test_graph_keeps_a_number_given_when_recording_and_ignores_what_execute_ignores():
    with rg.Graph(io_data_type=F32) as g:
        q = g.tensor(DIM, name="q")
        o, _ = g.sdpa(q, q, q, torch.tensor(0.5), name="attn")
        o.set_output(True).set_name("o")
    pack = g({"q": torch.ones(DIM), None: None, 77: torch.ones(1)})
    torch.testing.assert_close(pack["o"], torch.ones(DIM))


def test_ragged_offsets_that_cut_a_row():
    g = rg.pygraph(io_data_type=F32)
    at = g.tensor((3, 1, 1, 1), data_type=torch.int32, name="at")
    x = g.tensor((2, 2, 3, 8), (48, 8, 16, 1), name="x", ragged_offset=at)
    g.rope(x, g.tensor((3, 1, 1, 8), name="f")).set_output(True).set_name("y")
    y = torch.zeros(96)
    pack = {"x": torch.ones(96), "f": torch.zeros(3, 1, 1, 8), "y": y}
    offsets = torch.tensor([0, 24, 48], dtype=torch.int32)
    with pytest.raises(PositionError, match="sequence 0 of 'x' reaches from offset 0 to 24"):
        g.execute(pack | {"at": offsets.view(3, 1, 1, 1)})
    assert bool((y == 0).all())


def test_an_output_over_the_offsets_of_a_ragged_tensor():
    g = rg.pygraph(io_data_type=F32)
    at = g.tensor((2, 1, 1, 1), data_type=torch.int32, name="at")
    x = g.tensor((1, 1, 3, 8), name="x", ragged_offset=at)
    g.rope(x, g.tensor((3, 1, 1, 8), name="f"), name="turn").set_output(True).set_name("y")
    y = torch.zeros(24)
    y.view(torch.int32)[:2] = torch.tensor([0, 24], dtype=torch.int32)
    pack = {"x": torch.ones(24), "f": torch.zeros(3, 1, 1, 8), "y": y}
    with pytest.raises(GraphError, match=r"'y' .* shares memory with that of 'at'"):
        g.execute(pack | {"at": y.view(torch.int32)[:2].view(2, 1, 1, 1)})


def test_messages_that_say_what_works():
    g = rg.pygraph(io_data_type=F32)
    x = g.tensor((1, 1, 5, 7), name="x")
    with pytest.raises(GraphError, match=r"rope_dim=9 .* use an even one from 2 to 6"):
        g.rope(x, g.tensor((5, 1, 1, 9), name="f"), rope_dim=9)
    q = g.tensor(DIM, name="q")
    with pytest.raises(GraphError, match=r"sdpa 'attn': score_mod failed: .* graph.mul"):
        g.sdpa(q, q, q, score_mod=lambda graph, s: s * 2, name="attn")
    with pytest.raises(GraphError, match="not a serialized ropegraph graph"):
        rg.pygraph().deserialize("[" * 100_000)
    assert json.loads(lone().serialize())["format"] == "ropegraph"


@pytest.mark.parametrize("argument", ["output_scale", "attention_factor"])
def test_a_negative_zero_is_the_zero_that_it_equals(argument: str):
    """A plan that is kept by its attributes serves both."""
    made: list[torch.Tensor] = []
    keys: set[str] = set()
    for zero in (0.0, -0.0):
        g = rg.pygraph(io_data_type=F32)
        x, f = g.tensor(DIM, name="x"), g.tensor((5, 1, 1, 8), name="f")
        g.rope(x, f, **{argument: zero}).set_output(True).set_name("y")
        made.append(torch.empty(DIM))
        g.execute({"x": torch.ones(DIM), "f": torch.zeros(5, 1, 1, 8), "y": made[-1]})
        keys.add(g.key)
    assert len(keys) == 1
    assert made[0].view(torch.int32).equal(made[1].view(torch.int32))


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_the_sign_of_a_zero_does_not_depend_on_who_came_first(first: float):
    x, freqs = torch.ones(1, 1, 1, 64), torch.ones(32)
    at = torch.zeros(1, 1, dtype=torch.int64)
    for scale in (first, -first):
        assert not neuron.rope(x, freqs, at, output_scale=scale).view(torch.int32).any()
