"""QK norm: launches, the bits of graphs by hand, what is kept, caches."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.functional import (
    attention,
    building,
    cached_attention,
    dispatch,
    eager,
    qkv_attention,
)
from ropegraph.functional.kept import Kept
from ropegraph.functional.norm_turn import NORM_ROPE
from tests.functional.cases import F64, H_KV, H_Q, SPLIT, B, D, S, heads, table
from tests.functional.normed import EPS, formula, norm, ours, packed, weights
from tests.functional.test_gradients import check

BF16 = torch.bfloat16


def calls() -> Iterable[eager.Call]:
    return vars(getattr(eager, "_calls"))["_young"].values()  # noqa: B009


def steps(plan: Any) -> list[str]:
    return [step.node.name for step in plan.graph.plan.steps]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and rotations of Q and K are one, forward and backward, weights included."""
    both = "norm_q+rope_q+norm_k+rope_k"
    back = "rope_q_backward+norm_q_backward+rope_k_backward+norm_k_backward"
    q, k, v = heads()
    (w_q, w_k), (x, _) = weights(torch.float32), packed(torch.float32)
    for inputs, run in (
        ((q, k, v, w_q, w_k), ours),
        (
            (x, w_q, w_k),
            lambda x, q, k: qkv_attention(x, table(), split=SPLIT, q_norm=q, k_norm=k),
        ),
    ):
        monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
        torch.autograd.grad(run(*inputs).sum(), inputs)
        (call,) = calls()
        assert steps(call.plan) == [both, "attention"]
        assert steps(call._backward) == ["attention_backward", back]
        monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
        with torch.no_grad():
            run(*inputs)
        (call,) = calls()
        assert steps(call.plan) == [both, "attention"]
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    bounds, row = torch.tensor([0, 9, S]), [t[:1].detach().requires_grad_() for t in (q, k, v)]
    ours(*row, w_q, w_k, cu_seqlens=bounds).sum().backward()
    made = [(steps(c.plan), steps(c._backward)) for c in calls()]
    one = (["norm+rope"], ["rope_backward+norm_backward"])
    assert made == [one, one, (["attention"], ["attention_backward"])]


def by_hand(dtype: torch.dtype, weight: torch.dtype) -> tuple[dict[str, Tensor], int]:
    """o, do and all gradients by two recorded graphs, and their launches."""
    pack = dict(zip("qkv", (x.detach() for x in heads(dtype)), strict=True))
    for name, w in zip(("q_norm", "k_norm"), weights(weight), strict=True):
        pack[name] = w.detach().view(1, 1, 1, D)
    pack["freqs"] = table()[:, None, None]
    g = rg.pygraph(io_data_type=dtype, handle=rg.create_handle())
    t = {n: g.tensor_like(x, name=n) for n, x in pack.items()}
    turned = []
    for x in "qk":
        y, _ = g.rmsnorm(rg.norm_forward_phase.TRAINING, t[x], t[f"{x}_norm"], epsilon=EPS)
        turned.append(g.rope(y, t["freqs"]))
    o, _ = g.sdpa(*turned, t["v"], D**-0.5, use_causal_mask=True)
    o.set_output(True).set_name("o").set_stride(pack["q"].stride())
    back = g.backward_graph(["o"], ["q", "k", "v", "q_norm", "k_norm"])
    for graph in (g, back):
        graph.build()
        if graph is back:
            pack["do"] = torch.linspace(-1, 1, pack["o"].numel()).to(dtype).view(B, S, H_Q, D)
            pack["do"] = pack["do"].transpose(1, 2)
        out = graph.allocate(device="cpu")
        graph.execute({n: pack[n] for n in graph.lowered.recorded.inputs} | out)
        pack |= out
    return pack, len(g.plan.steps) + len(back.plan.steps)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("dtype", "weight"),
    [(torch.float32,) * 2, (BF16, BF16), (BF16, torch.float32), (F64, F64), (F64, torch.float32)],
)
def test_the_bits_of_a_graph_by_hand(
    dtype: torch.dtype, weight: torch.dtype, recompute: bool
) -> None:
    want, launches = by_hand(dtype, weight)
    assert launches == 4
    inputs = (*heads(dtype), *weights(weight))
    o = ours(*inputs, recompute_rope=recompute)
    assert torch.equal(o, want["o"])
    names = ("q", "k", "v", "q_norm", "k_norm")
    for name, x, grad in zip(
        names, inputs, torch.autograd.grad(o, inputs, want["do"]), strict=True
    ):
        assert grad.dtype is x.dtype
        assert torch.equal(grad, want[f"d{name}"].view(x.shape)), name


@pytest.mark.parametrize("options", [{}, {"fold": "symmetric"}, {"recompute_rope": True}])
@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize("kind", ["heads", "packed", "weights"])
def test_gradients_beside_the_workspace(
    kind: str, turn: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the workspace holds no gradient; none is turned in its own buffer."""
    monkeypatch.setattr(building, "Handle", lambda device: None)
    monkeypatch.setattr(building, "_built", getattr(building, "_build"))  # noqa: B009
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    (w_q, w_k), (x, parts) = weights(), packed()
    freqs = table() if turn else None
    given = {"q_norm": w_q, "k_norm": w_k, "norm_eps": EPS, "is_causal": True, **options}
    if kind == "packed":
        got = qkv_attention(x, freqs, split=SPLIT, **given)
    else:
        parts = [part.detach().requires_grad_(kind == "heads") for part in parts]
        got = attention(*parts, freqs, enable_gqa=True, **given)
    inputs = {"heads": (*parts, w_q, w_k), "packed": (x, w_q, w_k), "weights": (w_q, w_k)}
    check(got, formula(*parts, w_q, w_k, turn=turn), inputs[kind])
    (call,) = calls()
    plan = call._backward
    assert plan is not None
    assert [name for name, _ in plan.beside] == ["dq_rot", "dk_rot"]
    assert not plan.in_place
    assert not plan.graph.plan.workspace


def test_what_is_kept_for_the_backward() -> None:
    q, k, v = heads()
    w_q, w_k = weights(torch.float32)
    kept: list[Tensor] = []
    rows = [(B, H_Q, S, 1), (B, H_Q, S, 1), (B, H_KV, S, 1)]  # stats, and 1 / rms of q and of k
    given = [(S, 1, 1, D), q.shape, k.shape, v.shape, w_q.shape, w_k.shape]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        for options, made in (
            ({}, [q.shape, q.shape, k.shape]),  # o, the rotated q and k
            ({"recompute_rope": True}, [q.shape]),
        ):
            kept.clear()
            ours(q, k, v, w_q, w_k, **options)
            assert sorted(tuple(x.shape) for x in kept) == sorted([*given, *rows, *made])
            held = {x.data_ptr() for x in kept}
            assert {x.data_ptr() for x in (q, k, v, w_q, w_k)} < held


def test_the_roundings_of_hugging_face_are_kept_apart() -> None:
    """Bit-exact numerics fuse with nothing: the norm is rounded, then the rotation's own way."""
    q, k, v = heads(BF16)
    w_q, w_k = weights(BF16)
    turn = {"cos": table().cos(), "sin": table().sin(), "numerics": "hf", "enable_gqa": True}
    got = attention(q, k, v, q_norm=w_q, k_norm=w_k, norm_eps=EPS, **turn)
    rounded = (norm(x.double(), w.double()).bfloat16() for x, w in ((q, w_q), (k, w_k)))
    assert torch.equal(got, attention(*rounded, v, **turn))
    inputs = (q, k, v, w_q, w_k)
    assert all(x.isfinite().all() for x in torch.autograd.grad(got.sum(), inputs))


def test_caches_row_after_row_launches_and_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    q, k, v = (x.detach() for x in heads())
    w_q, w_k = (w.detach() for w in weights(torch.float32))
    norms = {"q_norm": w_q, "k_norm": w_k, "norm_eps": EPS}
    want = ours(q, k, v, w_q, w_k)
    k_cache, v_cache = (torch.zeros(B, H_KV, S + 2, D) for _ in "kv")
    rows: list[Tensor] = []
    for i, j in ((0, 7), (7, 8), (8, S)):
        at = torch.full((B,), i, dtype=torch.int32)
        new = (x[:, :, i:j] for x in (q, k, v))
        rows.append(cached_attention(*new, k_cache, v_cache, at, table(S + 2), **norms))
    torch.testing.assert_close(torch.cat(rows, 2), want)
    freqs, none = table()[:, None, None], (None,) * 4
    turn = (0, None, False, None, 1.0, False, False, None, "float32", "fp32", EPS, "k_norm")
    turned = dispatch.call(NORM_ROPE, (k, w_k, freqs, *none, *none[1:]), turn)
    assert torch.equal(k_cache[:, :, :S], turned)
    assert torch.equal(v_cache[:, :, :S], v)
    for c in calls():
        if c.kind.name == "cached_attention":
            both = "norm_q+rope_q+norm_k+rope_k"
            assert steps(c.plan) == [both, "keep_k+keep_v", "attention"]
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    bare = (torch.zeros(B, H_KV, S, D) for _ in "kv")
    o = cached_attention(q, k, v, *bare, torch.zeros(B, dtype=torch.int32), **norms)
    torch.testing.assert_close(
        o, attention(q, k, v, is_causal=True, enable_gqa=True, **norms), rtol=1e-5, atol=1e-5
    )
    (made,) = (c for c in calls() if c.kind.name == "cached_attention")
    assert sorted(steps(made.plan)) == ["attention", "keep_k+keep_v", "norm_k", "norm_q"]
