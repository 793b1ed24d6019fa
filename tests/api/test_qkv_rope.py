"""qkv_rope: packed QKV in every layout, forward and backward, in place, folded, and refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.compile import lower
from ropegraph.ir.ops import RopePair
from ropegraph.lowering.engine import Device
from ropegraph.testing import oracle
from tests.api.graphs import execute

F64 = torch.float64
B, S, D = 2, 5, 8


def freqs(seed: int = 0) -> Tensor:
    half = torch.randn(S, D // 2, generator=torch.Generator().manual_seed(seed))
    return torch.cat((half, half), dim=-1)[:, None, None, :].contiguous()


class Layout:
    """One way to pack QKV, and the plain slices that it means."""

    def __init__(self, heads: tuple[int, int, int], by_groups: bool, sbhd: bool) -> None:
        self.heads, self.by_groups = heads, by_groups
        h_q, h_k, _ = heads
        n = h_q // h_k
        dim = (B, S, h_k, (n + 2) * D) if by_groups else (B, S, sum(heads), D)
        self.split = (n * D, D, D) if by_groups else heads
        made = torch.randn(dim, dtype=F64, generator=torch.Generator().manual_seed(1))
        self.qkv = made.transpose(0, 1).contiguous().transpose(0, 1) if sbhd else made

    def parts(self, qkv: Tensor) -> list[Tensor]:
        """q, k and v as new tensors [b, h, s, d]."""
        axis = 3 if self.by_groups else 2
        found = qkv.split(self.split, axis)
        if self.by_groups:
            found = [x.reshape(B, S, -1, D) for x in found]
        return [x.transpose(1, 2).clone() for x in found]


LAYOUTS = {
    "heads": ((6, 2, 2), False, False),
    "heads, sbhd": ((6, 2, 2), False, True),
    "heads of three kinds": ((6, 3, 2), False, False),
    "groups of one head": ((2, 2, 2), True, False),
    "one group": ((3, 1, 1), True, True),
    "groups": ((6, 2, 2), True, False),
    "groups, sbhd": ((6, 2, 2), True, True),
}


def layout(name: str) -> Layout:
    return Layout(*LAYOUTS[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_rotated_and_split(name: str) -> None:
    case = layout(name)
    q_freqs, k_freqs = freqs(0), freqs(1)
    g = rg.pygraph(io_data_type=F64)
    made = g.qkv_rope(
        g.tensor_like(case.qkv, name="qkv"),
        g.tensor_like(q_freqs, name="fq"),
        k_freqs=g.tensor_like(k_freqs, name="fk"),
        split=case.split,
        q_output_scale=0.3,
        k_output_scale=1.7,
    )
    for x, n in zip(made, "qkv", strict=True):
        x.set_output(True).set_name(f"{n}_out")
    before = case.qkv.clone()
    pack = execute(g, {"qkv": case.qkv, "fq": q_freqs, "fk": k_freqs})
    q, k, v = case.parts(case.qkv)
    turn = [t[:, 0, 0, : D // 2].double() for t in (q_freqs, k_freqs)]
    for n, want in (
        ("q", 0.3 * oracle.rope(q, turn[0])),
        ("k", 1.7 * oracle.rope(k, turn[1])),
        ("v", v),
    ):
        torch.testing.assert_close(pack[f"{n}_out"], want, rtol=0, atol=1e-12)
    assert torch.equal(case.qkv, before)


def attention(case: Layout, in_place: bool = False, **settings: Any) -> rg.pygraph:
    g = rg.pygraph(io_data_type=F64, **settings)
    q, k, v = g.qkv_rope(
        g.tensor_like(case.qkv, name="qkv"),
        g.tensor_like(freqs(), name="freqs"),
        split=case.split,
        in_place=in_place,
        name="turn",
    )
    o, _ = g.sdpa(q, k, v, 0.4, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o")
    return g


def exact(case: Layout, qkv: Tensor) -> Tensor:
    q, k, v = case.parts(qkv)
    turn = freqs()[:, 0, 0, : D // 2].double()
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    n = q.shape[1]
    k, v = (x.repeat_interleave(n // x.shape[1], 1) for x in (oracle.rope(k, turn), v))
    return oracle.attention(oracle.rope(q, turn), k, v, attn_scale=0.4, keep=keep)[0]


@pytest.mark.parametrize("fold", ["auto", "off", "symmetric"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_and_its_gradient(name: str, fold: str) -> None:
    case = layout(name)
    g = attention(case, fold=fold)
    back = g.backward_graph(["o"], ["qkv"])
    assert [s.node.name for s in g.plan.steps] == ["turn_q+turn_k", "attn"]
    assert len(back.plan.steps) == 2
    pack = execute(g, {"qkv": case.qkv, "freqs": freqs()})
    leaf = case.qkv.clone().requires_grad_()
    want = exact(case, leaf)
    torch.testing.assert_close(pack["o"], want.detach(), rtol=0, atol=1e-12)
    d_o = torch.randn(want.shape, dtype=F64, generator=torch.Generator().manual_seed(3))
    grads = execute(back, {n: pack[n] for n in back.saved} | {"do": d_o})
    (wanted,) = torch.autograd.grad(want, leaf, d_o)
    torch.testing.assert_close(grads["dqkv"], wanted, rtol=0, atol=1e-12)
    assert grads["dqkv"].stride() == case.qkv.stride()


ONE_LEVEL = [n for n in LAYOUTS if n not in ("groups", "groups, sbhd")]


@pytest.mark.parametrize("name", ONE_LEVEL)
def test_in_place(name: str) -> None:
    case = layout(name)
    want = exact(case, case.qkv)
    parts = case.parts(case.qkv)
    qkv = case.qkv.clone()
    version = qkv._version
    g = attention(case, in_place=True)
    back = g.backward_graph(["o"], ["qkv"])
    pack = execute(g, {"qkv": qkv, "freqs": freqs()})
    assert qkv._version > version
    torch.testing.assert_close(pack["o"], want, rtol=0, atol=1e-12)
    q, k, v = case.parts(qkv)
    turn = freqs()[:, 0, 0, : D // 2].double()
    # What the caller sees keeps its scale: attn_scale is not folded into it.
    torch.testing.assert_close(q, oracle.rope(parts[0], turn), rtol=0, atol=1e-12)
    torch.testing.assert_close(k, oracle.rope(parts[1], turn), rtol=0, atol=1e-12)
    assert torch.equal(v, parts[2])
    assert "visible" in g.explain()
    leaf = case.qkv.clone().requires_grad_()
    d_o = torch.randn(want.shape, dtype=F64)
    grads = execute(back, {n: pack[n] for n in back.saved} | {"do": d_o})
    (wanted,) = torch.autograd.grad(exact(case, leaf), leaf, d_o)
    torch.testing.assert_close(grads["dqkv"], wanted, rtol=0, atol=1e-12)


def test_in_place_asked_for_with_a_fold() -> None:
    case = layout("heads")
    qkv = case.qkv.clone()
    g = attention(case, in_place=True, fold="q")
    back = g.backward_graph(["o"], ["qkv"])
    pack = execute(g, {"qkv": qkv, "freqs": freqs()})
    torch.testing.assert_close(pack["o"], exact(case, case.qkv), rtol=0, atol=1e-12)
    turn = freqs()[:, 0, 0, : D // 2].double()
    q = case.parts(case.qkv)[0]
    torch.testing.assert_close(case.parts(qkv)[0], 0.4 * oracle.rope(q, turn), rtol=0, atol=1e-12)
    leaf = case.qkv.clone().requires_grad_()
    d_o = torch.randn(pack["o"].shape, dtype=F64)
    grads = execute(back, {n: pack[n] for n in back.saved} | {"do": d_o})
    (wanted,) = torch.autograd.grad(exact(case, leaf), leaf, d_o)
    torch.testing.assert_close(grads["dqkv"], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["groups", "groups, sbhd"])
def test_in_place_with_heads_in_two_levels(name: str) -> None:
    """No strides merge the heads of Q: it is rotated where it lies, for who reads qkv."""
    case = layout(name)
    qkv = case.qkv.clone()
    g = rg.pygraph(io_data_type=F64)
    q, _, _ = g.qkv_rope(
        g.tensor_like(qkv, name="qkv"), g.tensor_like(freqs(), name="freqs"), split=case.split,
        q_output_scale=0.3, in_place=True,
    )  # fmt: skip
    assert q.get_dim() == [B, 2, 3, S, D]
    execute(g, {"qkv": qkv, "freqs": freqs()})
    turn = freqs()[:, 0, 0, : D // 2].double()
    (q0, k0, v0), (q1, k1, v1) = case.parts(case.qkv), case.parts(qkv)
    torch.testing.assert_close(q1, 0.3 * oracle.rope(q0, turn), rtol=0, atol=1e-12)
    torch.testing.assert_close(k1, oracle.rope(k0, turn), rtol=0, atol=1e-12)
    assert torch.equal(v1, v0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_launch_of_the_kernel(name: str) -> None:
    """Forward, backward and in place, planned for a GPU that need not be here."""
    case = layout(name)
    qkv, device = case.qkv.bfloat16(), Device("cuda", 0, 90)

    def rotated(*, in_place: bool) -> rg.pygraph:
        g = rg.pygraph(io_data_type=torch.bfloat16)
        t = g.tensor_like(qkv, name="qkv"), g.tensor_like(freqs(), name="freqs")
        made = g.qkv_rope(*t, split=case.split, in_place=in_place, name="turn")
        for x, n in zip(made, "qkv" if not in_place else "", strict=False):
            x.set_output(True).set_name(f"{n}_out")
        return g

    g = rotated(in_place=False)
    back = g.backward_graph(["q_out", "k_out", "v_out"], ["qkv"])
    one_copy = ["turn_split"], ["turn_split_backward"]  # V where it is bound, dV
    for graph, others in zip((g, back, rotated(in_place=True)), (*one_copy, []), strict=True):
        steps = lower(graph._look(), device, None).plan.steps
        kernels = [step.node for step in steps if step.engine == "cuda.rope"]
        assert len(kernels) == 1
        assert isinstance(kernels[0].attrs, RopePair)
        assert [step.name for step in steps if step.engine != "cuda.rope"] == others


def test_in_place_is_refused_where_it_would_do_harm() -> None:
    case = layout("heads")
    g = attention(case, in_place=True)
    leaf = case.qkv.clone().requires_grad_()
    o = torch.empty(B, 6, S, D, dtype=F64)
    with pytest.raises(rg.GraphError, match="'qkv' is rotated in place, but it is a leaf"):
        g.execute({"qkv": leaf, "freqs": freqs(), "o": o})
    room = torch.zeros(B * S * 16 * D, dtype=F64)
    pack = {"qkv": room[: B * S * 10 * D].view(B, S, 10, D), "freqs": freqs()}
    pack["o"] = room[8 : 8 + o.numel()].view(o.shape)
    with pytest.raises(rg.GraphError, match="shares memory with that of"):
        g.execute(pack)
    g = rg.pygraph(io_data_type=F64)
    qkv = g.tensor_like(case.qkv, name="qkv")
    q, _, _ = g.qkv_rope(qkv, g.tensor_like(freqs()), split=case.split, in_place=True)
    q.set_output(True)
    with pytest.raises(rg.GraphError, match="is in place and has no buffer of its own"):
        g.build()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_backward_by_hand(name: str) -> None:
    case = layout(name)
    parts = case.parts(case.qkv)
    d_q, d_k, d_v = (torch.randn(x.shape, dtype=F64) for x in parts)
    g = rg.pygraph(io_data_type=F64)
    made = g.qkv_rope_backward(
        *(g.tensor_like(x, name=n) for n, x in (("dq", d_q), ("dk", d_k), ("dv", d_v))),
        g.tensor_like(freqs(), name="freqs"),
        split=case.split,
        by_groups=case.by_groups,
        q_output_scale=0.3,
        k_output_scale=1.7,
    )
    made.set_stride(case.qkv.stride()).set_output(True).set_name("dqkv")
    pack = execute(g, {"dq": d_q, "dk": d_k, "dv": d_v, "freqs": freqs()})
    leaf = case.qkv.clone().requires_grad_()
    q, k, v = case.parts(leaf)
    turn = freqs()[:, 0, 0, : D // 2].double()
    outputs = (0.3 * oracle.rope(q, turn), 1.7 * oracle.rope(k, turn), v)
    (wanted,) = torch.autograd.grad(outputs, leaf, (d_q, d_k, d_v))
    torch.testing.assert_close(pack["dqkv"], wanted, rtol=0, atol=1e-12)


def test_a_gradient_that_is_missing_is_zero() -> None:
    case = layout("heads")
    g = rg.pygraph(io_data_type=F64)
    q, _, _ = g.qkv_rope(
        g.tensor_like(case.qkv, name="qkv"), g.tensor_like(freqs(), name="freqs"), split=case.split
    )
    q.set_output(True).set_name("q")
    back = g.backward_graph(["q"], ["qkv"])
    d_q = torch.randn(B, S, 6, D, dtype=F64).transpose(1, 2)
    grads = execute(back, {"dq": d_q, "freqs": freqs()})
    assert torch.equal(grads["dqkv"][:, :, 6:], torch.zeros(B, S, 4, D, dtype=F64))
    assert grads["dqkv"][:, :, :6].abs().min() > 0


def test_a_packed_tensor_made_by_the_graph_itself() -> None:
    """Its parts lie in the arena."""
    case = layout("heads")
    g = rg.pygraph(io_data_type=F64)
    qkv = g.scale(g.tensor_like(case.qkv, name="x"), 2.0)
    q, k, v = g.qkv_rope(qkv, g.tensor_like(freqs(), name="freqs"), split=case.split)
    o, _ = g.sdpa(q, k, v, 0.4, use_causal_mask=True)
    o.set_output(True).set_name("o")
    pack = execute(g, {"x": case.qkv, "freqs": freqs()})
    torch.testing.assert_close(pack["o"], exact(case, 2 * case.qkv), rtol=0, atol=1e-12)


def test_a_serialized_graph_is_the_same_graph() -> None:
    case = layout("heads")
    g = attention(case, in_place=True)
    again = rg.pygraph().deserialize(g.serialize())
    assert again.key == g.key
    qkv = case.qkv.clone()
    pack = execute(again, {"qkv": qkv, "freqs": freqs()})
    torch.testing.assert_close(pack["o"], exact(case, case.qkv), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dim", "split", "by_groups", "message"),
    [
        ((2, 5, 10, 8), (6, 2, 3), None, r"split=\[6, 2, 3\] of the 10 heads"),
        ((2, 5, 10, 8), (6, 2), None, "three numbers"),
        ((2, 5, 2, 40), (24, 8, 8), False, r"split=\[24, 8, 8\] of the 2 heads"),
        ((2, 5, 2, 40), (24, 6, 10), None, "one of k and one of v"),
        ((2, 5, 40, 40), (24, 8, 8), None, "by_groups=True or False"),
        (
            (2, 5, 81),
            (6, 2, 2),
            None,
            r"adds up to 10; give numbers of heads, whose sum divides 81",
        ),
        ((2, 5, 80), (48, 16, 16), None, r"adds up to all channels; give numbers of heads"),
    ],
)
def test_what_does_not_fit(dim: Any, split: Any, by_groups: Any, message: str) -> None:
    g = rg.pygraph(io_data_type=F64)
    x, t = g.tensor(dim, name="qkv"), g.tensor((5, 1, 1, 8), data_type="float32")
    with pytest.raises(rg.GraphError, match=message):
        g.qkv_rope(x, t, split=split, by_groups=by_groups)
    assert not g.recorder.nodes


class Packed:
    """A graph in which qkv_rope, or its adjoint, is recorded."""

    def __init__(self, is_backward: bool) -> None:
        self.graph = rg.pygraph(io_data_type=F64)
        self.table = self.graph.tensor((5, 1, 1, 8), data_type="float32")
        heads = (6, 2, 2) if is_backward else ()
        self.grads = [self.graph.tensor((2, h, 5, 8)) for h in heads]
        self.packed = self.graph.tensor((2, 5, 10, 8))

    def record(self, **more: Any) -> None:
        if self.grads:
            self.graph.qkv_rope_backward(*self.grads, self.table, split=(6, 2, 2), **more)
        else:
            self.graph.qkv_rope(self.packed, self.table, split=(6, 2, 2), **more)


SCALES = "is no argument here; did you mean q_output_scale or k_output_scale?"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output_scale": 0.5}, f"output_scale= {SCALES}"),
        ({"head_groups": 2}, "head_groups= is no argument here"),
        ({"k_name": "k"}, "k_name= is no argument here"),
        ({"name": torch.ones(2)}, "name=tensor"),
    ],
)
@pytest.mark.parametrize("is_backward", [False, True])
def test_keywords_of_rope_that_are_set_otherwise(
    changed: dict[str, Any], message: str, is_backward: bool
) -> None:
    given = Packed(is_backward)
    with pytest.raises(rg.GraphError, match=re.escape(message)):
        given.record(**changed)
    assert not given.graph.recorder.nodes


@pytest.mark.parametrize("name", ["", "turn"])
@pytest.mark.parametrize("wrong", [{"inverted": True}, {"k_inverse": 3}])
@pytest.mark.parametrize("is_backward", [False, True])
def test_what_is_refused_leaves_the_graph_as_it_was(
    name: str, wrong: dict[str, Any], is_backward: bool
) -> None:
    """So that the same call works once it is right, under the same name."""
    given = Packed(is_backward)
    with pytest.raises(rg.GraphError):
        given.record(name=name, **wrong)
    assert not given.graph.recorder.nodes
    given.record(name=name)


def test_every_way_to_pack_has_a_key_of_its_own() -> None:
    def key(**options: Any) -> str:
        g = rg.pygraph(io_data_type=F64)
        x = g.tensor(options.pop("dim", (2, 5, 10, 8)), name="qkv")
        t = g.tensor((5, 1, 1, 8), data_type="float32", name="freqs")
        q, k, v = g.qkv_rope(x, t, **{"split": (6, 2, 2), "name": "turn", **options})
        o, _ = g.sdpa(q, k, v, name="attn") if len(q.get_dim()) == 4 else (q, None)
        o.set_output(True)
        return g.key

    found = [
        key(),
        key(split=(6, 3, 1)),
        key(in_place=True),
        key(dim=(2, 5, 2, 40), split=(24, 8, 8)),
        key(dim=(2, 5, 5, 24), split=(8, 8, 8)),
        key(k_output_scale=2.0),
        key(q_output_scale=2.0),
    ]
    assert len(set(found)) == len(found)
    assert key() == found[0]


def test_a_copy_of_v_does_not_rewrite_qkv() -> None:
    """The split copies V alone: Q and K are read where they lie, also from a leaf."""
    case = layout("groups")
    qkv = case.qkv.clone().requires_grad_()
    g = rg.pygraph(io_data_type=F64)
    made = g.qkv_rope(
        g.tensor_like(qkv, name="qkv"), g.tensor_like(freqs(), name="freqs"), split=case.split
    )
    for x, n in zip(made, "qkv", strict=True):
        x.set_output(True).set_name(f"{n}_out")
    version = qkv._version
    pack = execute(g, {"qkv": qkv, "freqs": freqs()})
    assert not g.plan.graph.rewritten
    assert qkv._version == version
    assert torch.equal(pack["v_out"], case.parts(case.qkv)[2])


def test_a_leaf_is_refused_again_after_another_tensor_of_its_form() -> None:
    case = layout("heads")
    g = attention(case, in_place=True)
    o = torch.empty(B, S, 6, D, dtype=F64).transpose(1, 2)
    o = torch.empty_strided(o.shape, g.find_tensor("o").get_stride(), dtype=F64)
    leaf = case.qkv.clone().requires_grad_()
    for _ in range(2):
        with pytest.raises(rg.GraphError, match="is a leaf"):
            g.execute({"qkv": leaf, "freqs": freqs(), "o": o})
        g.execute({"qkv": leaf * 1, "freqs": freqs(), "o": o})
    assert torch.equal(leaf.detach(), case.qkv)


@pytest.mark.parametrize("engine", ["torch", "reference"])
@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize("s", [1, 4])
def test_every_engine_takes_it_apart_and_puts_it_together(
    engine: str, by_groups: bool, s: int
) -> None:
    """Heads side by side as a projection leaves them, one token, one group: V is inside qkv."""
    split = (2 * D, D, D) if by_groups else (2, 1, 1)
    qkv = torch.randn((1, s, 1, 4 * D) if by_groups else (1, s, 4 * D), dtype=F64)
    g = rg.pygraph(engines=(engine,))
    made = g.qkv_rope(
        g.tensor_like(qkv, name="qkv"), g.tensor_like(freqs(), name="freqs"), split=split
    )
    for x, n in zip(made, "qkv", strict=True):
        x.set_output(True).set_name(f"{n}_out")
    back = g.backward_graph(["q_out", "k_out", "v_out"], ["qkv"])
    pack = execute(g, {"qkv": qkv, "freqs": freqs()})
    leaf = qkv.clone().requires_grad_()
    parts = leaf.view(1, s, 4, D).transpose(1, 2).split((2, 1, 1), dim=1)
    turn = freqs()[:s, 0, 0, : D // 2].double()
    wants = [oracle.rope(parts[0], turn), oracle.rope(parts[1], turn), parts[2]]
    grads = {
        f"d{n}_out": torch.randn(x.shape, dtype=F64) for n, x in zip("qkv", wants, strict=True)
    }
    (wanted,) = torch.autograd.grad(wants, leaf, list(grads.values()))
    for n, want in zip("qkv", wants, strict=True):
        torch.testing.assert_close(pack[f"{n}_out"], want.detach(), rtol=0, atol=1e-12)
    for name, x in grads.items():
        back.find_tensor(name).set_stride(x.stride())
    dqkv = execute(back, {**grads, "freqs": freqs()})["dqkv"]
    torch.testing.assert_close(dqkv, wanted, rtol=0, atol=1e-12)


def test_heads_in_two_levels_do_not_reach_attention() -> None:
    g = rg.pygraph(io_data_type=F64)
    x = g.tensor((2, 5, 2, 48), name="qkv")  # two groups of four heads of Q
    t = g.tensor((5, 1, 1, 8), data_type="float32", name="freqs")
    q, k, v = g.qkv_rope(x, t, split=[32, 8, 8], in_place=True)
    said = r"q \[2, 2, 4, 5, 8\] has 5 dims; use .*heads in two levels are rotated into a tensor"
    with pytest.raises(rg.GraphError, match=said):
        g.sdpa(q, k, v, name="attn")
