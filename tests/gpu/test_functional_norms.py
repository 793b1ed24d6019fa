"""QK norm by the functions on a GPU: engines, bits of a graph by hand, fp64, a captured step."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench.timing import captured
from ropegraph.functional import attention, cached_attention, eager, qkv_attention
from ropegraph.functional.kept import Kept
from ropegraph.testing import oracle
from tests.gpu.test_functional import (
    H_Q,
    SPLIT,
    B,
    D,
    Inputs,
    S,
    attend,
    check_same,
    gradients,
    heads,
    packed,
    table,
)  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-3


@pytest.fixture(autouse=True)
def needs_cupy() -> None:
    pytest.importorskip("cupy")


def weights(dtype: torch.dtype = F32) -> Inputs:
    g = torch.Generator().manual_seed(9)
    made = (torch.rand(D, generator=g) + 0.5 for _ in "qk")
    return tuple(w.to("cuda", dtype).requires_grad_() for w in made)


def normed(*inputs: Tensor, **options: Any) -> Tensor:
    q, k, v, w_q, w_k = inputs
    return attend(q, k, v, q_norm=w_q, k_norm=w_k, norm_eps=EPS, **options)


def gradient_of_o() -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(B, S, H_Q, D, generator=g).to("cuda", BF16).transpose(1, 2)


def near(got: list[Tensor], want: list[Tensor], most: float = 0.02) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert not bool(g.isnan().any()), i
        assert float((g.double() - w).norm() / w.norm()) < most, i


def exact(inputs: Inputs, do: Tensor) -> list[Tensor]:
    leaves = [oracle.leaf(x) for x in inputs]
    q, k, v, w_q, w_k = leaves
    half, keep = oracle.angles(S, D).cuda(), oracle.band(S, S, right=0).cuda()
    turned = (
        oracle.rope(x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w, half)
        for x, w in ((q, w_q), (k, w_k))
    )
    o, _ = oracle.attention(*turned, v, attn_scale=D**-0.5, keep=keep)
    return [o.detach(), *oracle.gradients(o, leaves, do)]


@pytest.mark.parametrize("weight", [BF16, F32])
@pytest.mark.parametrize("options", [{}, {"recompute_rope": True}, {"fold": "off"}])
def test_a_step_beside_fp64(options: dict[str, Any], weight: torch.dtype) -> None:
    inputs, do = (*heads(), *weights(weight)), gradient_of_o()
    got = gradients(lambda *x: normed(*x, **options), inputs, do)
    near(got, exact(inputs, do))
    assert [g.dtype for g in got[1:]] == [x.dtype for x in inputs]


@pytest.mark.parametrize("kind", ["heads", "packed"])
def test_engines_of_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    w_q, w_k = weights()
    if kind == "heads":
        normed(*heads(), w_q, w_k).sum().backward()
    else:
        qkv_attention(packed(), table(), split=SPLIT, q_norm=w_q, k_norm=w_k).sum().backward()
    (call,) = vars(eager._calls)["_young"].values()
    for plan in (call.plan, call._backward):
        assert sorted(s.engine for s in plan.graph.plan.steps) == ["cuda.rope", "cudnn.sdpa"]
    # what is to be turned back lies in memory of the step, not in a workspace that stays
    assert not call._backward.graph.plan.workspace


def test_the_bits_of_a_graph_by_hand() -> None:
    inputs, do = (*heads(), *weights()), gradient_of_o()
    names = ("q", "k", "v", "q_norm", "k_norm")
    pack = {n: x.detach() for n, x in zip(names, inputs, strict=True)}
    pack |= {n: pack[n].view(1, 1, 1, D) for n in names[3:]}
    pack |= {"freqs": table(), "do": do}
    g = rg.pygraph(io_data_type=BF16)
    t = {n: g.tensor_like(x, name=n) for n, x in pack.items() if n != "do"}
    turned = []
    for x in "qk":
        y, _ = g.rmsnorm(rg.norm_forward_phase.TRAINING, t[x], t[f"{x}_norm"], epsilon=EPS)
        turned.append(g.rope(y, t["freqs"]))
    o, _ = g.sdpa(*turned, t["v"], D**-0.5, use_causal_mask=True)
    o.set_output(True).set_name("o").set_stride(inputs[0].stride())
    back = g.backward_graph(["o"], list(names))
    back.find_tensor("do").set_stride(do.stride())
    for graph in (g, back):
        graph.build()
        out = graph.allocate(device="cuda")
        graph.execute({n: pack[n] for n in graph.lowered.recorded.inputs} | out)
        pack |= out
    got = gradients(normed, inputs, do)
    want = [pack["o"], *(pack[f"d{n}"].view(x.shape) for n, x in zip(names, inputs, strict=True))]
    assert torch.equal(got[0], want[0])
    near(got, [x.double() for x in want])


def test_packed_and_recomputed_give_the_same_bits() -> None:
    inputs, w, x, do = heads(), weights(), packed(), gradient_of_o()
    want = gradients(normed, (*inputs, *w), do)
    again = gradients(lambda *x: normed(*x, recompute_rope=True), (*inputs, *w), do)
    assert torch.equal(again[0], want[0])
    near(again, [t.double() for t in want])
    o, dx, *dw = gradients(
        lambda x, w_q, w_k: qkv_attention(
            x, table(), split=SPLIT, is_causal=True, q_norm=w_q, k_norm=w_k, norm_eps=EPS
        ),
        (x, *w),
        do,
    )
    assert torch.equal(o, want[0])
    parts = [part.transpose(1, 2) for part in dx.split(SPLIT, dim=2)]
    near([*parts, *dw], [t.double() for t in want[1:]])


def test_sequences_packed_in_a_row() -> None:
    bounds = torch.tensor([0, 70, 190], device="cuda", dtype=torch.int32)
    q, k, v = (x.detach()[:1].requires_grad_() for x in heads())
    w = weights()
    o = normed(q, k, v, *w, cu_seqlens=bounds, max_seqlen=128)
    assert not o[:, :, 190:].any()
    for start, end in ((0, 70), (70, 190)):
        alone = normed(*(x.detach()[:, :, start:end].contiguous() for x in (q, k, v)), *w)
        torch.testing.assert_close(o[:, :, start:end], alone, atol=0.02, rtol=0.02)
    grads = torch.autograd.grad(o.sum(), (q, k, v, *w))
    assert all(bool(g.isfinite().all()) for g in grads)


def test_no_angles_and_numerics_of_others() -> None:
    q, k, v = heads()
    w_q, w_k = weights()
    norms = {"q_norm": w_q, "k_norm": w_k, "norm_eps": EPS, "enable_gqa": True}
    by_torch = [
        torch.nn.functional.rms_norm(x.float(), (D,), w, EPS).bfloat16()
        for x, w in ((q, w_q), (k, w_k))
    ]
    freqs = table()
    turn = {"cos": freqs.cos(), "sin": freqs.sin(), "numerics": "hf"}
    for given in ({}, turn):
        got = attention(q, k, v, **norms, **given)
        want = attention(*by_torch, v, enable_gqa=True, **given)
        torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(got.sum(), (q, w_q, w_k)))


@torch.no_grad()
def test_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    inputs, (w_q, w_k) = heads(), weights()
    want = normed(*inputs, w_q, w_k)
    room = [torch.zeros(B, h, S, D, device="cuda", dtype=BF16) for h in SPLIT[1:]]
    rows: list[Tensor] = []
    for i, j in ((0, 150), (150, 151), (151, S)):
        at = torch.full((B,), i, dtype=torch.int32, device="cuda")
        new = (x[:, :, i:j] for x in inputs)
        rows.append(
            cached_attention(*new, *room, at, table(), q_norm=w_q, k_norm=w_k, norm_eps=EPS)
        )
    near([torch.cat(rows, 2)], [want.double()])
    for call in vars(eager._calls)["_young"].values():
        if call.kind.name == "cached_attention":
            engines = [step.engine for step in call.plan.graph.plan.steps]
            assert engines.count("cuda.rope") == len(engines) - 1 == 2


def test_a_whole_step_in_a_cuda_graph() -> None:
    inputs, freqs = (*heads(), *weights()), table()
    q, k, v, w_q, w_k = inputs

    def step() -> list[Tensor]:
        given: dict[str, Any] = {"q_norm": w_q, "k_norm": w_k, "norm_eps": EPS}
        o = attention(q, k, v, freqs, is_causal=True, enable_gqa=True, **given)
        return [o.detach(), *torch.autograd.grad(o, inputs, torch.ones_like(o))]

    graph, made = captured(step)
    with torch.no_grad():
        for x in inputs:
            x.mul_(1.5)
    graph.replay()
    torch.cuda.synchronize()
    got = [x.clone() for x in made]
    want = step()
    check_same(got[:4], want[:4])
    near(got, [x.double() for x in want])
