"""rmsnorm in graphs: what is recorded, refused, derived, folded, launched; values by autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph
from ropegraph import GraphError, norm_forward_phase
from ropegraph.testing import oracle
from ropegraph.testing.budget import assert_within, budget
from tests.api.graphs import F32, F64, buffers, new, outputs

TRAINING = norm_forward_phase.TRAINING
BF16 = torch.bfloat16


def attention(norm_first: bool = True, whole: bool = False, **options: Any) -> ropegraph.pygraph:
    """q, k, v, wq, wk, f -> o: the QK-norm of Qwen3, or of OLMo2 with ``whole``."""
    dtype = options.pop("dtype", F64)
    g = new(io_data_type=dtype, **options.pop("settings", {}))
    q, k, v = (g.tensor((2, h, 5, 8), name=n) for n, h in (("q", 6), ("k", 2), ("v", 2)))
    f = g.tensor((7, 1, 1, 8), data_type=F32, name="f")
    made: list[Any] = []
    for x, n, h in ((q, "q", 6), (k, "k", 2)):
        w = g.tensor((1, h if whole else 1, 1, 8), name=f"w{n}")
        norm = {"epsilon": 1e-3, "zero_centered": n == "k", "name": f"norm_{n}"}
        if norm_first:
            y, _ = g.rmsnorm(TRAINING, x, w, **norm)
            made.append(g.rope(y, f, name=f"rope_{n}", output_scale=1.3))
        else:
            r = g.rope(x, f, name=f"rope_{n}", output_scale=1.3)
            made.append(g.rmsnorm(TRAINING, r, w, **norm)[0])
    o, _ = g.sdpa(*made, v, attn_scale=0.3, name="attn")
    o.set_output(True).set_name("o")
    return g


def by_hand(pack: dict[str, Tensor], norm_first: bool, whole: bool) -> dict[str, Tensor]:
    """o and the gradients, in fp64 by autograd of the plain formula."""
    leaves = {n: oracle.leaf(pack[n]) for n in ("q", "k", "v", "wq", "wk")}

    def turned(x: Tensor) -> Tensor:
        return oracle.rope(x, pack["f"][:5, 0, 0, :4], output_scale=1.3)

    def normed(x: Tensor, w: Tensor) -> Tensor:
        axes = (1, 3) if whole else (3,)
        return x * (x.square().mean(axes, keepdim=True) + 1e-3).rsqrt() * w

    def made(n: str) -> Tensor:
        w = leaves[f"w{n}"] + float(n == "k")
        return turned(normed(leaves[n], w)) if norm_first else normed(turned(leaves[n]), w)

    o, _ = oracle.attention(made("q"), made("k"), leaves["v"], attn_scale=0.3)
    grads = oracle.gradients(o, list(leaves.values()), pack["do"])
    return {"o": o.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def run(g: ropegraph.pygraph, b: ropegraph.pygraph) -> dict[str, Tensor]:
    """Forward and backward on the same numbers."""
    pack = buffers(g)
    g.execute(pack)
    back = buffers(b)
    back |= {n: pack[n] for n in back if n in pack}
    b.execute(back)
    return pack | back


@pytest.mark.parametrize("fold", ["off", "auto", "q", "symmetric"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_values_gradients_and_launches(norm_first: bool, whole: bool, fold: str):
    g = attention(norm_first, whole, settings={"fold": fold})
    b = g.backward_graph(["o"], ["q", "k", "v", "wq", "wk"])
    assert (len(g.plan.steps), len(b.plan.steps)) == (2, 2)
    found = run(g, b)
    for name, want in by_hand(found, norm_first, whole).items():
        torch.testing.assert_close(found[name], want, rtol=1e-10, atol=1e-12, msg=name)
    is_folded = norm_first and fold != "off"
    assert any(d.applied for d in g.fold_decisions if d.rule == "fold-attn-scale") is is_folded
    kept = {n for n in b.saved if n not in ("v", "o", "f", "attn::Stats")}
    made = {
        f"{'rope' if norm_first else 'norm'}_{n}::{'OUT_0' if norm_first else 'Y'}" for n in "qk"
    }
    assert kept == {"q", "k", "wq", "wk", *made, *(f"norm_{n}::inv_variance" for n in "qk")}


def test_rounding_of_bf16():
    g = attention(dtype=BF16)
    b = g.backward_graph(["o"], ["q", "k", "v", "wq", "wk"])
    found = run(g, b)
    want = by_hand(found, True, False)
    peer = attention(dtype=BF16, settings={"engines": "torch", "fold": "off"})
    found_too = run(peer, peer.backward_graph(["o"], ["q", "k", "v", "wq", "wk"]))
    for name, exact in want.items():
        assert_within(found[name], exact, budget(exact, found_too[name], BF16), name)


def test_unfused_it_means_the_same():
    g, seen = attention(), attention()
    seen.find_tensor("norm_q::Y").set_output(True)
    seen.find_tensor("norm_k::Y").set_output(True)
    packs = buffers(g), buffers(seen)
    assert [len(x.plan.steps) for x in (g, seen)] == [2, 4]
    assert {d.text for d in seen.fold_decisions if d.rule == "fuse-norm-rope"} == {
        f"'norm_{n}::Y' is a visible output or saved" for n in "qk"
    }
    g.execute(packs[0])
    shared = {n: x for n, x in packs[0].items() if n in ("q", "k", "v", "wq", "wk", "f")}
    seen.execute(packs[1] | shared)
    torch.testing.assert_close(packs[1]["o"], packs[0]["o"], rtol=1e-12, atol=1e-13)


def test_only_what_is_asked_for():
    g = attention()
    b = g.backward_graph(["o"], ["wq"])
    assert set(b.plan.graph.outputs) == {"dwq"}
    found = run(g, b)
    want = by_hand(found, True, False)["dwq"]
    torch.testing.assert_close(found["dwq"], want, rtol=1e-10, atol=1e-12)
    g = attention()
    found = run(g, g.backward_graph(["o"], ["k"]))
    torch.testing.assert_close(found["dk"], by_hand(found, True, False)["dk"])


def test_alone_with_a_hand_made_backward():
    g = new(io_data_type=F64)
    x, w = g.tensor((2, 3, 5, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    y, inverse = g.rmsnorm(TRAINING, x, w)
    assert inverse is not None
    grad = g.tensor((2, 3, 5, 8), name="dy")
    dx, dw, none = g.rmsnorm_backward(grad, x, w, inverse)
    assert none is None
    for tensor, name in ((y, "y"), (dx, "dx"), (dw, "dw")):
        tensor.set_output(True).set_name(name)
    pack = buffers(g)
    g.execute(pack)
    a, b = oracle.leaf(pack["x"]), oracle.leaf(pack["w"])
    want = a * (a.square().mean(3, keepdim=True) + 1e-6).rsqrt() * b
    da, db = oracle.gradients(want, (a, b), pack["dy"])
    for name, exact in (("y", want), ("dx", da), ("dw", db)):
        torch.testing.assert_close(outputs(g, pack)[name], exact.detach())


def test_inference_gives_no_statistics_and_unread_ones_are_not_computed():
    g = new()
    x, w = g.tensor((2, 3, 5, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    y, inverse = g.rmsnorm(norm_forward_phase.INFERENCE, x, w, name="n")
    assert inverse is None
    y.set_output(True).set_name("y")
    with pytest.raises(GraphError, match="'n' gives no inv_variance; record it with"):
        g.backward_graph(["y"], ["x"])
    g = new()
    x, w = g.tensor((2, 3, 5, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    g.rmsnorm(TRAINING, x, w)[0].set_output(True)
    assert list(g.plan.steps[0].node.outputs) == ["Y"]


def test_packed_sequences_and_positions():
    """Rows of no sequence are zero, and give the weight nothing."""
    g = new(io_data_type=F64)
    x, w = g.tensor((1, 3, 6, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    f = g.tensor((6, 1, 1, 8), data_type=F32, name="f")
    bounds = g.tensor((4,), data_type=torch.int32, name="bounds")
    y, _ = g.rmsnorm(TRAINING, x, w)
    g.rope(y, f, cu_seqlens=bounds).set_output(True).set_name("y")
    b = g.backward_graph(["y"], ["x", "w"])
    assert len(g.plan.steps) == len(b.plan.steps) == 1
    pack = buffers(g) | {"bounds": torch.tensor([0, 2, 2, 5], dtype=torch.int32)}
    g.execute(pack)
    back = buffers(b)
    back |= {n: pack[n] for n in back if n in pack}
    b.execute(back)
    a, c = oracle.leaf(pack["x"]), oracle.leaf(pack["w"])
    n = a * (a.square().mean(3, keepdim=True) + 1e-6).rsqrt() * c
    table = pack["f"][:, 0, 0, :4]
    turned = [oracle.rope(n[:, :, i:j], table[: j - i]) for i, j in ((0, 2), (2, 5))]
    want = torch.cat([*turned, torch.zeros(1, 3, 1, 8, dtype=F64)], 2)
    da, dc = oracle.gradients(want, (a, c), back["dy"])
    for name, exact in (("y", want), ("dx", da), ("dw", dc)):
        torch.testing.assert_close((pack | back)[name], exact.detach(), msg=name)


def test_a_wrong_position_leaves_nothing_half_written():
    g = new()
    x, w = g.tensor((1, 3, 5, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    f, ids = g.tensor((5, 1, 1, 8), name="f"), g.tensor((1, 5), data_type=torch.int32, name="ids")
    y, inverse = g.rmsnorm(TRAINING, x, w)
    assert inverse is not None
    inverse.set_output(True).set_name("inverse")
    g.rope(y, f, position_ids=ids).set_output(True).set_name("y")
    pack = buffers(g) | {"ids": torch.tensor([[0, 1, 2, 3, 9]], dtype=torch.int32)}
    with pytest.raises(ropegraph.PositionError):
        g.execute(pack)
    assert bool(pack["y"].isnan().all())
    assert bool(pack["inverse"].isnan().all())


def test_a_scale_node_behind_the_rotation_folds_into_it():
    g = new(io_data_type=F64)
    x, w = g.tensor((2, 3, 5, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    f = g.tensor((5, 1, 1, 8), data_type=F32, name="f")
    y = g.rope(g.rmsnorm(TRAINING, x, w)[0], f)
    g.scale(y, 0.7).set_output(True).set_name("y")
    assert len(g.plan.steps) == 1
    assert "output_scale=0.7" in str(g.plan.graph)


def test_serialized_keyed_verified_and_explained():
    g = attention()
    again = new(io_data_type=F64).deserialize(g.serialize())
    assert again.serialize() == g.serialize()
    assert again.key == g.key
    b = g.backward_graph(["o"], ["q", "wq"])
    pack = run(g, b)
    found = g.verify({n: x for n, x in pack.items() if n in g.plan.graph.values})
    assert found.is_ok, str(found)
    lines = g.explain().splitlines()
    assert any(
        line.split() == ["rope_q", "output_scale=1.3", "output_scale=0.39"] for line in lines
    )
    text = g.to_mermaid("lowered")
    assert "norm_rope_pair" in text
    assert ":::scaled" in text


def refused(text: str, method: str = "rmsnorm", **changed: Any) -> None:
    g = new()
    x, w = g.tensor((2, 3, 5, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    given: dict[str, Any] = {"input": x, "scale": w, "name": "n"}
    if method == "rmsnorm":
        given["norm_forward_phase"] = TRAINING
    else:
        given |= {"grad": x, "inv_variance": g.tensor((2, 3, 5, 1), name="i")}
    with pytest.raises(GraphError) as caught:
        getattr(g, method)(**given | changed)
    assert str(caught.value).startswith(f"{method} 'n': ")
    assert text in str(caught.value)
    assert not g.recorder.nodes


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"bias": torch.zeros(1, 1, 1, 8)}, "bias=tensor("),
        ({"epsilon": -1e-6}, "epsilon=-1e-06 is negative; use 0 or more"),
        ({"epsilon": torch.tensor(1e-6)}, "epsilon is a tensor; it is fixed at build"),
        ({"epsilon": ropegraph.pygraph().tensor([1])}, "epsilon is a tensor; it is fixed at build"),
        ({"epsilon": float("nan")}, "epsilon=nan is not finite"),
        ({"norm_forward_phase": "training"}, "use norm_forward_phase.TRAINING or INFERENCE"),
        ({"norm_forward_phase": torch.ones(2)}, "use norm_forward_phase.TRAINING or INFERENCE"),
        ({"zero_centered": 1}, "zero_centered=1; use True or False"),
        ({"eps": 1e-6}, "eps=1e-06 is no argument here; did you mean epsilon?"),
        ({"scale": torch.ones(1, 1, 1, 4)}, "scale is [1, 1, 1, 4] for input [2, 3, 5, 8]"),
        ({"scale": 2.0}, "scale=2.0 is not a tensor of this graph or a torch tensor"),
        ({"compute_data_type": torch.int32}, "compute_data_type="),
    ],
)
def test_what_is_refused(changed: dict[str, Any], text: str):
    refused(text, **changed)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"has_dbias": True}, "has_dbias=True, but rmsnorm has no bias here; use False"),
        ({"grad": torch.ones(2, 3, 5, 4)}, "grad is [2, 3, 5, 4]; use [2, 3, 5, 8]"),
        ({"inv_variance": torch.ones(2, 1, 5, 1)}, "use [2, 3, 5, 1]"),
        ({"epsilon": 1e-6}, "epsilon=1e-06 is no argument here"),
    ],
)
def test_what_the_backward_refuses(changed: dict[str, Any], text: str):
    refused(text, "rmsnorm_backward", **changed)


def test_ragged_data_and_gradients_of_statistics_are_refused():
    g = new()
    offset = g.tensor((3, 1, 1, 1), data_type=torch.int32, name="starts")
    x = g.tensor((2, 3, 5, 8), name="x").set_ragged_offset(offset)
    g.rmsnorm(TRAINING, x, g.tensor((1, 1, 1, 8), name="w"), name="n")[0].set_output(True)
    with pytest.raises(GraphError, match=r"pack the sequences into .* and give rope cu_seqlens"):
        g.validate()
    g = new()
    x, w = g.tensor((2, 3, 5, 8), name="x"), g.tensor((1, 1, 1, 8), name="w")
    _, inverse = g.rmsnorm(TRAINING, x, w, name="n")
    assert inverse is not None
    inverse.set_output(True).set_name("i")
    with pytest.raises(GraphError, match="inv_variance of rmsnorm 'n' has no gradient"):
        g.backward_graph(["i"], ["x"])


@pytest.mark.parametrize("change", ["epsilon", "zero_centered", "scale", "order"])
def test_the_key_changes_with_every_setting(change: str):
    def key(changed: str) -> str:
        g = new()
        x, f = g.tensor((2, 3, 5, 8), name="x"), g.tensor((5, 1, 1, 8), name="f")
        w = g.tensor((1, 3 if changed == "scale" else 1, 1, 8), name="w")
        options = {"epsilon": 1e-5} if changed == "epsilon" else {}
        options |= {"zero_centered": True} if changed == "zero_centered" else {}
        if changed == "order":
            y = g.rmsnorm(TRAINING, g.rope(x, f), w)[0]
        else:
            y = g.rope(g.rmsnorm(TRAINING, x, w, **options)[0], f)
        y.set_output(True)
        return g.key

    assert key(change) != key("")


@pytest.mark.parametrize("over_heads", [False, True])
def test_statistics_lie_in_memory_as_the_rows_do(over_heads: bool) -> None:
    """So those of heads side by side are side by side; a stride that is set stays."""
    g = new(io_data_type=F32)
    x = g.tensor(dim=[2, 3, 5, 8], stride=[120, 8, 24, 1], name="x")
    w = g.tensor(dim=[1, 3 if over_heads else 1, 1, 8], name="w")
    _, inverse = g.rmsnorm(TRAINING, x, w)
    assert inverse is not None
    b, h, s, _ = inverse.get_dim()
    assert list(inverse.get_stride()) == ([5, 5, 1, 1] if over_heads else [15, 1, 3, 1])
    inverse.set_output(True).set_name("inverse").set_stride([h * s, s, 1, 1])
    g.build()
    data = torch.randn(2, 5, 3, 8).transpose(1, 2)
    pack = {**g.allocate(), "x": data, "w": torch.ones(w.get_dim())}
    assert pack["inverse"].is_contiguous()
    pack["inverse"].fill_(torch.nan)
    g.execute(pack)
    axes = (1, 3) if over_heads else (3,)
    want = (data.double().square().mean(axes, keepdim=True) + 1e-6).rsqrt()
    assert torch.allclose(pack["inverse"].double(), want, rtol=1e-6)
    assert pack["inverse"].shape == (b, h, s, 1)
