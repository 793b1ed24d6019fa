"""Values and gradients beside fp64 formulas that torch differentiates; and what has none."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.functional import attention, building, eager, qkv_attention, rope
from ropegraph.functional.kept import Kept
from ropegraph.testing import oracle
from ropegraph.testing.budget import assert_within
from tests.functional.cases import (
    CASES,
    CAUSAL,
    F64,
    H_KV,
    H_Q,
    B,
    Case,
    D,
    S,
    expected,
    heads,
    result,
    table,
)  # fmt: skip


def check(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...]) -> None:
    do = torch.randn(want.shape, dtype=F64, generator=torch.Generator().manual_seed(7))
    assert_within(got, want.detach(), 1e-12, "o")
    gradients = torch.autograd.grad(got, inputs, do.to(got.dtype))
    for i, (g, w) in enumerate(zip(gradients, oracle.gradients(want, inputs, do), strict=True)):
        assert_within(g, w, 1e-12, f"gradient {i}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_q_k_and_v(case: Case) -> None:
    inputs = heads(F64, s_kv=case.s_kv)
    check(result(case, *inputs), expected(case, *inputs), inputs)


@pytest.mark.parametrize("shape", [(B, H_Q, S, S), (1, 1, S, S), (1, H_Q, 1, S)])
def test_bias_and_sink(shape: tuple[int, ...]) -> None:
    inputs = heads(F64)
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(shape, dtype=F64, generator=g).requires_grad_()
    sink = torch.randn(H_Q, dtype=F64, generator=g).requires_grad_()
    case = Case("", {"is_causal": True}, {"keep": CAUSAL})
    got = result(case, *inputs, bias=bias, sink=sink)
    check(got, expected(case, *inputs, bias=bias, sink=sink), (*inputs, bias, sink))


@pytest.mark.parametrize("options", [{}, {"fold": "symmetric"}, {"recompute_rope": True}])
def test_gradients_turned_in_place(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the workspace holds no gradient."""
    monkeypatch.setattr(building, "Handle", lambda device: None)
    monkeypatch.setattr(building, "_built", getattr(building, "_build"))  # noqa: B009
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    case, inputs = Case("", {"is_causal": True, **options}, {"keep": CAUSAL}), heads(F64)
    check(result(case, *inputs), expected(case, *inputs), inputs)
    (call,) = vars(getattr(eager, "_calls"))["_young"].values()  # noqa: B009
    plan = call._backward
    assert plan.in_place == [("dq_rot", "dq"), ("dk_rot", "dk")]
    assert not plan.graph.plan.workspace


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients_alone(which: tuple[int, ...]) -> None:
    case, everything = CASES[1], heads(F64)
    whole = torch.autograd.grad(result(case, *everything).sum(), everything)
    inputs = [x.detach() for x in everything]
    for i in which:
        inputs[i].requires_grad_()
    grads = torch.autograd.grad(result(case, *inputs).sum(), [inputs[i] for i in which])
    assert all(torch.equal(g, whole[i]) for g, i in zip(grads, which, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradcheck_of_everything_at_once(recompute: bool) -> None:
    q, k, v = (x[:1, :, :5].detach().requires_grad_() for x in heads(F64))
    freqs = table(5).double().requires_grad_()
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(1, H_Q, 5, 5, dtype=F64, generator=g).requires_grad_()
    sink = torch.randn(H_Q, dtype=F64, generator=g).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, freqs: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attention(
            q, k, v, freqs, bias=bias, sink=sink, is_causal=True, enable_gqa=True, softcap=3.0,
            dropout_p=0.3, recompute_rope=recompute,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (q, k, v, freqs, bias, sink), fast_mode=True)


def test_rope_is_differentiable_twice() -> None:
    x = heads(F64)[0][:1, :2, :3].detach().requires_grad_()
    freqs = table(3).double()
    options = {"output_scale": 0.7, "rope_dim": 6, "rope_offset": 4, "interleaved": True}

    def run(x: Tensor) -> Tensor:
        return rope(x, freqs[:, :6], table_layout="first_half", **options) ** 3  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))
    freqs.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: rope(x.detach(), t), (freqs,))


def packed(kind: str) -> tuple[Tensor, tuple[int, int, int], list[Tensor]]:
    """A packed tensor, its split, and q, k and v as views of it."""
    n = H_Q // H_KV
    groups = kind == "groups"
    shape = {"rows": ((H_Q + 2 * H_KV) * D,), "heads": (H_Q + 2 * H_KV, D)}
    g = torch.Generator().manual_seed(0)
    last = (H_KV, (n + 2) * D) if groups else shape[kind]
    x = torch.randn(B, S, *last, dtype=F64, generator=g).requires_grad_()
    if groups:
        q, k, v = x.split((n * D, D, D), dim=-1)
        parts, split = [q.reshape(B, S, H_Q, D), k, v], (n * D, D, D)
    else:
        split = (H_Q, H_KV, H_KV)
        parts = list(x.view(B, S, -1, D).split(split, dim=2))
    return x, split, [part.transpose(1, 2) for part in parts]


@pytest.mark.parametrize("kind", ["rows", "heads", "groups"])
@pytest.mark.parametrize("options", [{}, {"recompute_rope": True}, {"fold": "symmetric"}])
def test_packed_qkv(kind: str, options: dict[str, Any]) -> None:
    x, split, parts = packed(kind)
    before = x.detach().clone()
    got = qkv_attention(x, table(), split=split, is_causal=True, **options)
    check(got, expected(CASES[1], *parts), (x,))
    assert torch.equal(x, before)
    assert got.transpose(1, 2).is_contiguous()
    again = qkv_attention(x, table(), split=split, **options)
    assert torch.autograd.grad(again.sum(), x)[0].is_contiguous()


def test_packed_qkv_in_place() -> None:
    x, split, _ = packed("heads")
    y, z = x * 1, x * 1
    version = y._version
    want = qkv_attention(z, table(), split=split, is_causal=True)
    o = qkv_attention(y, table(), split=split, is_causal=True, in_place=True)
    assert torch.equal(o, want)
    assert y._version > version
    assert torch.equal(y[:, :, -H_KV:], z[:, :, -H_KV:])
    assert not torch.equal(y, z)
    (again,) = torch.autograd.grad(o.sum(), x, retain_graph=True)
    assert torch.equal(again, torch.autograd.grad(want.sum(), x)[0])
    with pytest.raises(rg.GraphError, match="qkv was rotated in place, and what read it"):
        (o.sum() + y.sum()).backward()
    with pytest.raises(rg.GraphError, match="leaf tensor that requires grad"):
        qkv_attention(x, table(), split=split, in_place=True)
    with pytest.raises(rg.GraphError, match="give one of the two"):
        qkv_attention(y, table(), split=split, in_place=True, recompute_rope=True)


def test_what_others_saved_before_is_noticed() -> None:
    x, split, _ = packed("heads")
    y = x * 1
    other = y.square().sum()
    o = qkv_attention(y, table(), split=split, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (other + o.sum()).backward()


def test_packed_qkv_without_angles() -> None:
    x, split, (q, k, v) = packed("heads")
    want, _ = oracle.attention(q, k, v, attn_scale=D**-0.5)
    check(qkv_attention(x, split=split), want, (x,))


@pytest.mark.parametrize("options", [{}, {"recompute_rope": True}, {"max_seqlen": 9}])
def test_sequences_packed_in_a_row(options: dict[str, Any]) -> None:
    q, k, v = (x[:1].detach().requires_grad_() for x in heads(F64))
    bounds = torch.tensor([0, 0, 9, 9, 15], dtype=torch.int32)  # empty ones; rows 15, 16 are none's
    got = attention(q, k, v, table(), cu_seqlens=bounds, is_causal=True, enable_gqa=True, **options)
    want = torch.zeros(1, H_Q, S, D, dtype=F64)
    for start, end in ((0, 9), (9, 15)):
        own = [x[:, :, start:end] for x in (q, k, v)]
        half = oracle.angles(end - start, D)
        turned = (oracle.rope(x, half) for x in own[:2])
        keep = oracle.band(end - start, end - start, right=0)
        o, _ = oracle.attention(*turned, own[2], attn_scale=D**-0.5, keep=keep)
        want = torch.cat((want[:, :, :start], o, want[:, :, end:]), dim=2)
    check(got, want, (q, k, v))


def test_positions_of_q_and_k() -> None:
    q, k, v = heads(F64, s=3, s_kv=11)
    one = oracle.rope(q, oracle.angles(3, D, start=8))
    want, _ = oracle.attention(one, oracle.rope(k, oracle.angles(11, D)), v, attn_scale=D**-0.5)
    starts = torch.tensor([8, 8])
    got = attention(q, k, v, table(11), start_positions=(starts, None), enable_gqa=True)
    check(got, want, (q, k, v))
    ids = torch.arange(8, 11)[None]
    same = attention(q, k, v, table(11), position_ids=(ids, None), enable_gqa=True)
    assert torch.equal(same, got)


def test_sinks_and_biases_as_a_model_holds_them() -> None:
    q, k, v = heads(torch.bfloat16)
    sink = torch.randn(H_Q, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(S, S, dtype=torch.bfloat16, requires_grad=True)
    o = attention(q, k, v, table(), sink=sink, bias=bias, enable_gqa=True)
    wide = sink.detach().float()[None, :, None, None]
    assert torch.equal(
        o, attention(q, k, v, table(), sink=wide, bias=bias[None, None], enable_gqa=True)
    )
    o.sum().backward()
    assert sink.grad is not None
    assert sink.grad.dtype is torch.bfloat16
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


def test_causal_corners() -> None:
    values = torch.arange(1.0, 5.0).view(1, 1, 4, 1)
    zeros = torch.zeros(1, 1, 4, 8)
    for rows, top, bottom in ((1, [1.0], [2.5]), (2, [1.0, 1.5], [2.0, 2.5])):
        q = zeros[:, :, :rows]
        assert attention(q, zeros, values, is_causal=True).flatten().tolist() == top
        o = attention(q, zeros, values, causal_bottom_right=True)
        assert o.flatten().tolist() == bottom


@pytest.mark.parametrize(("scale", "want"), [(None, 0.88080), (1.0, 0.98201), (0.0, 0.5)])
def test_scale_in_the_habit_of_torch(scale: float | None, want: float) -> None:
    q = torch.ones(1, 1, 1, 4)
    k = torch.stack((torch.ones(4), torch.zeros(4)))[None, None]
    v = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    assert attention(q, k, v, scale=scale).item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_what_has_no_gradient_says_so(name: str) -> None:
    tables = {"cos": table().cos(), "sin": table().sin()}
    tables[name].requires_grad_()
    q, k, v = heads()
    with pytest.raises(rg.GraphError, match=rf"rope: {name} requires grad but has no gradient"):
        rope(q, **tables)
    with pytest.raises(rg.GraphError, match=rf"give {name}.detach\(\)"):
        attention(q, k, v, **tables, enable_gqa=True)
    with torch.no_grad():
        rope(q, **tables)


def test_second_derivatives_are_refused_by_name() -> None:
    q, k, v = heads()
    (dq,) = torch.autograd.grad(
        attention(q, k, v, table(), enable_gqa=True).sum(), q, create_graph=True
    )
    with pytest.raises(rg.GraphError, match="attention has only a first one"):
        torch.autograd.grad(dq.sum(), q)
    x, freqs = q.detach().requires_grad_(), table().requires_grad_()
    (dx,) = torch.autograd.grad(rope(x, freqs).square().sum(), x, create_graph=True)
    with pytest.raises(rg.GraphError, match="freqs require grad"):
        torch.autograd.grad(dx.sum(), x)


def test_transforms_are_refused_by_name() -> None:
    x = heads()[0].detach()
    with pytest.raises(rg.GraphError, match=r"torch\.func has no gradient"):
        torch.func.grad(lambda x: rope(x, table()).sum())(x)
    with pytest.raises(rg.GraphError, match="x has a tangent"):
        torch.func.jvp(lambda x: rope(x, table()), (x,), (x,))
    mapped = torch.vmap(lambda x: rope(x[None], table()))
    with pytest.raises(rg.GraphError, match=r"torch\.func has no gradient"):
        torch.func.grad(lambda x: mapped(x).sum())(x)
    with pytest.raises(rg.GraphError, match=r"torch\.func has no gradient"):
        torch.vmap(torch.func.grad(lambda x: rope(x[None], table()).sum()))(x)
    with pytest.raises(rg.GraphError, match="x has a tangent"):
        torch.func.jvp(mapped, (x,), (x,))


@pytest.mark.parametrize("options", [{}, {"recompute_rope": True}, {"fold": "symmetric"}])
def test_vmap_has_the_gradients_of_a_loop(options: dict[str, Any]) -> None:
    q, k, v = heads(F64)
    many = torch.stack([q, 2 * q, -q]).detach().requires_grad_()

    def run(q: Tensor) -> Tensor:
        o = attention(q, k, v, table(), is_causal=True, enable_gqa=True, **options)
        return rope(o, table())

    weight = torch.randn(3, *q.shape, dtype=F64)
    grads = [
        torch.autograd.grad(made, (many, k, v), weight)
        for made in (torch.vmap(run)(many), torch.stack([run(q) for q in many]))
    ]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "needs is_causal=True"),
        ({"is_causal": True, "causal_bottom_right": True}, "give one"),
        ({"enable_gqa": False}, "enable_gqa=True allows that"),
        ({"scale": torch.ones(())}, "scale is a tensor"),
        ({"fold": "both"}, "fold='both'"),
        ({"dropout_p": 1.0}, "probability=1.0"),
        ({"cos": table()}, "angles are given twice"),
        ({"position_ids": (None,)}, "has 1 entries; use two"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"data is \[1, h, t, d\]"),
        ({"bias": torch.zeros(3, 3)}, "does not broadcast to the logits"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    q, k, v = heads()
    with pytest.raises(rg.GraphError, match=message):
        attention(q, k, v, table(), **{"enable_gqa": True, **options})
