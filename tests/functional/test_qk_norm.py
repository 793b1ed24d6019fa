"""QK norm: values and gradients beside a formula in fp64, any types and strides."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.functional import attention, dispatch, qkv_attention, rope
from ropegraph.functional.norm_turn import NORM_ROPE
from ropegraph.testing import budget, oracle
from ropegraph.testing.inputs import placed
from tests.functional.cases import F64, H_KV, H_Q, LENGTHS, SPLIT, B, D, S, heads, table
from tests.functional.normed import EPS, formula, norm, ours, packed, weights
from tests.functional.test_gradients import check
from tests.functional.test_layouts import GRADS

BF16 = torch.bfloat16
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "fold off": ({"fold": "off"}, {}),
    "symmetric": ({"fold": "symmetric", "fold_log2": True}, {}),
    "recompute": ({"recompute_rope": True}, {}),
    "recompute log2": ({"recompute_rope": True, "fold": "symmetric", "fold_log2": True}, {}),
    "scale": ({"scale": -0.7}, {"attn_scale": -0.7}),
    "window": ({"window": 4}, {"keep": oracle.band(S, S, left=4, right=0)}),
    "lengths": (
        {"seq_lens": LENGTHS},
        {"keep": oracle.band(S, S, right=0, len_q=[S, 5], len_kv=[S, 5])},
    ),
    "softcap": ({"softcap": 0.8}, {"score_mod": lambda x: 0.8 * torch.tanh(x / 0.8)}),
    "partial": (
        {"rope_dim": 6, "rope_offset": 0, "freqs": table(S, 6)},
        {"rope": {"rope_offset": 0, "r": 6}},
    ),
    "pairs": (
        {"interleaved": True, "table_layout": "first_half", "attention_factor": 1.2},
        {"rope": {"interleaved": True, "attention_factor": 1.2}},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name: str) -> None:
    mine, theirs = OPTIONS[name]
    inputs = (*heads(F64), *weights())
    check(ours(*inputs, **mine), formula(*inputs, **theirs), inputs)


def test_bias_and_sink() -> None:
    inputs = (*heads(F64), *weights())
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(1, H_Q, S, S, dtype=F64, generator=g).requires_grad_()
    sink = torch.randn(H_Q, dtype=F64, generator=g).requires_grad_()
    got = ours(*inputs, bias=bias, sink=sink)
    check(got, formula(*inputs, bias=bias, sink=sink), (*inputs, bias, sink))


@pytest.mark.parametrize("options", [{}, {"recompute_rope": True}])
def test_without_angles_the_norm_alone(options: dict[str, Any]) -> None:
    inputs = (*heads(F64), *weights())
    q, k, v, w_q, w_k = inputs
    given = {"q_norm": w_q, "k_norm": w_k, "norm_eps": EPS, "is_causal": True, **options}
    want = formula(*inputs, turn=False)
    check(attention(q, k, v, enable_gqa=True, **given), want, inputs)
    x, parts = packed()
    got = qkv_attention(x, split=SPLIT, **given)
    check(got, formula(*parts, w_q, w_k, turn=False), (x, w_q, w_k))
    with pytest.raises(rg.GraphError, match="rope_dim= is given but no angles"):
        attention(q, k, v, enable_gqa=True, rope_dim=4, **given)


@pytest.mark.parametrize("options", [{}, {"recompute_rope": True}, {"fold": "symmetric"}])
def test_packed_qkv(options: dict[str, Any]) -> None:
    (w_q, w_k), (x, parts) = weights(), packed()
    before = x.detach().clone()
    given = {"q_norm": w_q, "k_norm": w_k, "norm_eps": EPS, "is_causal": True, **options}
    for qkv in (x, x.flatten(2)):
        got = qkv_attention(qkv, table(), split=SPLIT, **given)
        check(got, formula(*parts, w_q, w_k), (x, w_q, w_k))
    assert torch.equal(x, before)
    again = qkv_attention(x, table(), split=SPLIT, **given)
    assert torch.autograd.grad(again.sum(), x)[0].is_contiguous()


def test_packed_by_groups_of_a_head_each() -> None:
    w_q, w_k = weights()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, H_KV, 3 * D, dtype=F64, generator=g).requires_grad_()
    parts = [part.transpose(1, 2) for part in x.split(D, dim=-1)]
    got = qkv_attention(
        x, table(), split=(D, D, D), q_norm=w_q, k_norm=w_k, norm_eps=EPS, is_causal=True
    )
    check(got, formula(*parts, w_q, w_k), (x, w_q, w_k))


@pytest.mark.parametrize("options", [{}, {"max_seqlen": 9}, {"recompute_rope": True}])
@pytest.mark.parametrize("turn", [False, True])
def test_sequences_packed_in_a_row(turn: bool, options: dict[str, Any]) -> None:
    q, k, v = (x[:1].detach().requires_grad_() for x in heads(F64))
    inputs = (q, k, v, *weights())
    bounds = torch.tensor([0, 0, 9, 9, 15], dtype=torch.int32)  # empty ones; rows 15, 16 are none's
    given = {"q_norm": inputs[3], "k_norm": inputs[4], "norm_eps": EPS, **options}
    got = attention(
        q, k, v, table() if turn else None, cu_seqlens=bounds, is_causal=True, enable_gqa=True,
        **given,
    )  # fmt: skip
    rows = [torch.zeros(1, H_Q, S - 15, D, dtype=F64)]
    for start, end in ((9, 15), (0, 9)):
        own = (x[:, :, start:end] for x in (q, k, v))
        keep = oracle.band(end - start, end - start, right=0)
        rows.insert(0, formula(*own, *inputs[3:], turn=turn, keep=keep))
    check(got, torch.cat(rows, dim=2), inputs)


def test_sequences_with_positions_of_their_own() -> None:
    q, k, v = (x[:1].detach() for x in heads(F64))
    w = weights()
    bounds, starts = torch.tensor([0, 9, S]), torch.tensor([3, 5])
    options = {"inv_freq": torch.rand(D // 2), "enable_gqa": True, "is_causal": True}
    norms = {"q_norm": w[0], "k_norm": w[1], "norm_eps": EPS}
    got = attention(q, k, v, cu_seqlens=bounds, start_positions=starts, **norms, **options)
    by_hand = (norm(x, y).detach() for x, y in zip((q, k), w, strict=True))
    want = attention(*by_hand, v, cu_seqlens=bounds, start_positions=starts, **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight", [BF16, torch.float32])
def test_bf16_within_budget(weight: torch.dtype) -> None:
    """At least as near to fp64 as torch's norm, rounded, and a rotation."""
    inputs = (*heads(BF16), *weights(weight))
    q, k, v, w_q, w_k = inputs
    leaves = [oracle.leaf(x) for x in inputs]
    want = formula(*leaves)
    peer = attention(
        *(torch.nn.functional.rms_norm(x, (D,), w.to(BF16), EPS) for x, w in ((q, w_q), (k, w_k))),
        v, table(), is_causal=True, enable_gqa=True,
    )  # fmt: skip
    got = ours(*inputs)
    budget.assert_within(got, want.detach(), budget.budget(want.detach(), peer.detach(), BF16), "o")
    do = torch.randn_like(got)
    exact = oracle.gradients(want, leaves, do.double())
    theirs = torch.autograd.grad(peer, inputs, do)
    for i, grad in enumerate(torch.autograd.grad(got, inputs, do)):
        allowed = budget.budget(exact[i], theirs[i], BF16)
        budget.assert_within(grad, exact[i], allowed, f"gradient {i}")


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (4,), (3, 4), (2, 3), (0, 4)])
@pytest.mark.parametrize("recompute", [False, True])
def test_some_gradients_alone(which: tuple[int, ...], recompute: bool) -> None:
    everything = (*heads(F64), *weights())
    whole = torch.autograd.grad(ours(*everything, recompute_rope=recompute).sum(), everything)
    inputs = [x.detach() for x in everything]
    for i in which:
        inputs[i].requires_grad_()
    o = ours(*inputs, recompute_rope=recompute)
    grads = torch.autograd.grad(o.sum(), [inputs[i] for i in which])
    for g, i in zip(grads, which, strict=True):
        torch.testing.assert_close(g, whole[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradcheck_of_everything_at_once(recompute: bool) -> None:
    q, k, v = (x[:1, :, :5].detach().requires_grad_() for x in heads(F64))
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(1, H_Q, 5, 5, dtype=F64, generator=g).requires_grad_()
    sink = torch.randn(H_Q, dtype=F64, generator=g).requires_grad_()

    def run(*given: Tensor) -> Tensor:
        torch.manual_seed(3)
        return ours(
            *given[:5], bias=given[5], sink=given[6], softcap=3.0, dropout_p=0.3, freqs=table(5),
            recompute_rope=recompute,
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (q, k, v, *weights(), bias, sink), fast_mode=True)


@pytest.mark.parametrize("name", GRADS)
def test_any_incoming_gradient_is_as_its_contiguous_copy(name: str) -> None:
    torch.manual_seed(0)
    inputs = (*heads(), *weights(torch.float32))
    o = ours(*inputs)
    grad = GRADS[name](o)
    got = torch.autograd.grad(o, inputs, grad, retain_graph=True)
    assert all(map(torch.equal, got, torch.autograd.grad(o, inputs, grad.contiguous())))


@pytest.mark.parametrize("layout", ["bshd", "packed_qkv", "expanded", "gapped"])
def test_inputs_of_any_strides(layout: str) -> None:
    q, k, v = (placed(x.detach(), layout).requires_grad_() for x in heads())  # type: ignore[arg-type]
    store = torch.randn(D, 3, requires_grad=True)
    odd = [q, k, v, store[:, 0], store[:, 2]]
    plain = [x.detach().clone(memory_format=torch.contiguous_format) for x in odd]
    plain = [x.requires_grad_() for x in plain]
    got, want = ours(*odd), ours(*plain)
    torch.testing.assert_close(got, want)
    do = torch.randn_like(want)
    grads = torch.autograd.grad(got, odd, do), torch.autograd.grad(want, plain, do)
    torch.testing.assert_close(*grads)


def test_a_weight_of_one_number() -> None:
    q, k, v = heads(F64)
    one = torch.tensor([1.5], dtype=F64, requires_grad=True)
    check(ours(q, k, v, one.expand(D), one.expand(D)), formula(q, k, v, one, one), (q, one))


@pytest.mark.parametrize("dim", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_nothing_to_do(dim: tuple[int, ...]) -> None:
    x, w = torch.randn(dim, requires_grad=True), torch.ones(8, requires_grad=True)
    o = attention(x, x, x, table(3, 8), q_norm=w, k_norm=w)
    dx, dw = torch.autograd.grad(o.sum(), (x, w))
    assert dx.shape == o.shape == dim
    assert not dw.any()


def test_autocast_leaves_weights_in_f32() -> None:
    inputs, w = heads(), weights(torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        o = ours(*inputs, *w)
        third = ours(*inputs, *(x.detach().half() for x in w))
    assert torch.equal(o, ours(*(x.bfloat16() for x in inputs), *w))
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(o.sum(), (*inputs, *w)))
    halves = (x.detach().half().bfloat16() for x in w)
    assert torch.equal(third, ours(*(x.bfloat16() for x in inputs), *halves))


def test_rounded_once_after_the_rotation() -> None:
    q, w = heads(BF16)[0].detach(), weights(torch.float32)[0].detach()
    freqs, none = table()[:, None, None], (None,) * 7
    turn = (0, None, False, None, 1.0, False, False, None, "float32", "fp32", EPS, "q_norm")
    got = dispatch.call(NORM_ROPE, (q, w, freqs, *none), turn)
    exact = oracle.rope(norm(q.double(), w.double()), oracle.angles(S, D))
    once = exact.bfloat16()
    twice = rope(torch.nn.functional.rms_norm(q.float(), (D,), w, EPS).bfloat16(), table())
    assert (got == once).double().mean() > 0.99
    assert (twice == once).double().mean() < 0.9


@pytest.mark.parametrize("kind", ["heads", "packed"])
def test_finite_padding_changes_no_gradient(kind: str) -> None:
    made: list[tuple[Tensor, ...]] = []
    w_q, w_k = weights(torch.float32)
    for fill in (0.0, 3e4):
        x, _ = packed(torch.float32)
        with torch.no_grad():
            x[1, 5:] = fill
        given = {"q_norm": w_q, "k_norm": w_k, "norm_eps": EPS, "seq_lens": LENGTHS}
        if kind == "packed":
            o = qkv_attention(x, table(), split=SPLIT, **given)
        else:
            parts = (part.transpose(1, 2) for part in x.split(SPLIT, dim=2))
            o = attention(*parts, table(), enable_gqa=True, **given)
        made.append((o, *torch.autograd.grad(o.cos().sum(), (x, w_q, w_k))))
    assert all(map(torch.equal, *made))
    assert not made[0][1][1, 5:].any()


@pytest.mark.parametrize("recompute", [False, True])
def test_tensors_without_memory(recompute: bool) -> None:
    inputs = [x.to("meta").requires_grad_() for x in (*heads(), *weights(torch.float32))]
    o = ours(*inputs, freqs=table().to("meta"), recompute_rope=recompute)
    assert o.shape == inputs[0].shape
    grads = torch.autograd.grad(o.sum(), inputs)
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    row = [x.detach()[:1] for x in inputs[:3]]
    bounds = torch.tensor([0, S], device="meta")
    o = ours(*row, *inputs[3:], freqs=table().to("meta"), cu_seqlens=bounds)
    assert [g.shape for g in torch.autograd.grad(o.sum(), inputs[3:])] == [(D,), (D,)]
