"""matmul, and a whole prefill as one graph: projection, rotation, attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.testing import oracle
from tests.api.graphs import execute

F64 = torch.float64
B, S, H_Q, H_KV, D, WIDTH = 2, 5, 4, 2, 8, 12


def normal(*dim: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(dim, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("engine", ["torch", "reference"])
@pytest.mark.parametrize(("a", "b"), [(2, 2), (2, 1), (1, 2), (1, 1)])
def test_products_and_their_gradients(a: int, b: int, engine: str) -> None:
    left, right = normal(a, 5, 3), normal(b, 4, 3, seed=1).mT
    g = rg.pygraph(io_data_type=F64, engines=engine)
    c = g.matmul(g.tensor_like(left, name="a"), g.tensor_like(right, name="b"))
    c.set_output(True).set_name("c")
    back = g.backward_graph(["c"], ["a", "b"])
    pack = execute(g, {"a": left, "b": right})
    leaves = [left.clone().requires_grad_(), right.clone().requires_grad_()]
    want = leaves[0] @ leaves[1]
    torch.testing.assert_close(pack["c"], want.detach(), rtol=0, atol=1e-12)
    d_c = normal(*want.shape, seed=2)
    grads = execute(back, {"a": left, "b": right, "dc": d_c})
    for name, wanted in zip(("da", "db"), torch.autograd.grad(want, leaves, d_c), strict=True):
        torch.testing.assert_close(grads[name], wanted, rtol=0, atol=1e-12)


def exact(x: Tensor, weight: Tensor, freqs: Tensor) -> Tensor:
    qkv = (x @ weight).unflatten(2, (-1, D)).transpose(1, 2)
    q, k, v = qkv.split((H_Q, H_KV, H_KV), 1)
    turn = freqs[:, 0, 0].double()
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    k, v = (t.repeat_interleave(H_Q // H_KV, 1) for t in (oracle.rope(k, turn), v))
    return oracle.attention(oracle.rope(q, turn), k, v, attn_scale=0.3, keep=keep)[0]


def checked_prefill(in_place: bool = False, **settings: Any) -> rg.pygraph:
    """Projection, rotation and attention as one graph, right in both directions."""
    x, weight = normal(B, S, WIDTH), normal(1, WIDTH, (H_Q + 2 * H_KV) * D, seed=1)
    freqs = normal(S, 1, 1, D // 2, seed=2).float()
    g = rg.pygraph(io_data_type=F64, **settings)
    qkv = g.matmul(g.tensor_like(x, name="x"), g.tensor_like(weight, name="w"), name="project")
    q, k, v = g.qkv_rope(
        qkv, g.tensor_like(freqs, name="freqs"), split=(H_Q, H_KV, H_KV), half_width=True,
        in_place=in_place, name="turn",
    )  # fmt: skip
    o, _ = g.sdpa(q, k, v, 0.3, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o")
    back = g.backward_graph(["o"], ["x", "w"])
    pack = execute(g, {"x": x, "w": weight, "freqs": freqs})
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    want = exact(*leaves, freqs)
    torch.testing.assert_close(pack["o"], want.detach(), rtol=0, atol=1e-11)
    d_o = normal(*want.shape, seed=3)
    grads = execute(back, {n: pack[n] for n in back.saved} | {"do": d_o})
    for name, wanted in zip(("dx", "dw"), torch.autograd.grad(want, leaves, d_o), strict=True):
        torch.testing.assert_close(grads[name], wanted, rtol=0, atol=1e-10)
    return g


@pytest.mark.parametrize("fold", ["auto", "off", "symmetric"])
def test_a_prefill_is_one_graph(fold: str) -> None:
    g = checked_prefill(fold=fold)
    assert [s.name for s in g.plan.steps] == ["project", "turn_q+turn_k", "attn"]


def test_split_alone() -> None:
    qkv = normal(B, S, (H_Q + 2 * H_KV) * D)
    g = rg.pygraph(io_data_type=F64)
    parts = g.split_qkv(g.tensor_like(qkv, name="qkv"), split=(H_Q, H_KV, H_KV))
    for tensor, name in zip(parts, "qkv", strict=True):
        g.scale(tensor, 2.0).set_output(True).set_name(f"{name}_twice")
    pack = execute(g, {"qkv": qkv})
    heads = qkv.unflatten(2, (-1, D)).transpose(1, 2).split((H_Q, H_KV, H_KV), 1)
    for part, name in zip(heads, "qkv", strict=True):
        torch.testing.assert_close(pack[f"{name}_twice"], 2 * part, rtol=0, atol=0)
    assert len(g.plan.steps) == 3


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((2, 5, 3), (2, 4, 7), r"A \[2, 5, 3\] has 3 columns, but B \[2, 4, 7\] has 4 rows"),
        ((2, 5, 3), (3, 3, 7), "batches of 2 and 3; use one for both, or 1"),
        ((5, 3), (3, 7), r"A \[5, 3\] has 2 dims; use \[b, rows, columns\]"),
    ],
)
def test_shapes_that_do_not_fit(a: Any, b: Any, message: str) -> None:
    g = rg.pygraph(io_data_type=F64)
    with pytest.raises(rg.GraphError, match=message):
        g.matmul(g.tensor(a), g.tensor(b))


def test_arguments_without_a_meaning() -> None:
    g = rg.pygraph(io_data_type=F64)
    a = g.tensor((1, 2, 2))
    with pytest.raises(rg.GraphError, match="padding"):
        g.matmul(a, a, padding=1.0)
    with pytest.raises(rg.GraphError, match="compute_data_type"):
        g.matmul(a, a, compute_data_type=F64)


def test_in_place_in_what_the_graph_makes_is_seen_by_nobody() -> None:
    """Forward and backward decide the fold alike: only what lies in a bound buffer is visible."""
    checked_prefill(in_place=True)


@pytest.mark.parametrize("fold", ["auto", "off", "symmetric"])
def test_a_prefill_with_norms_of_q_and_k_is_one_graph(fold: str) -> None:
    """Projection; norm and rotation of Q and K in one launch, read from packed QKV; attention."""
    given = {"x": normal(B, S, WIDTH), "w": normal(1, WIDTH, (H_Q + 2 * H_KV) * D, seed=1)}
    given |= {f"w_{n}": normal(1, 1, 1, D, seed=i) for i, n in enumerate("qk", start=4)}
    freqs = normal(S, 1, 1, D, seed=2).float()
    g = rg.pygraph(io_data_type=F64, fold=fold)
    t = {name: g.tensor_like(tensor, name=name) for name, tensor in given.items()}
    angles = g.tensor_like(freqs, name="freqs")
    split = g.split_qkv(g.matmul(t["x"], t["w"], name="project"), split=(H_Q, H_KV, H_KV))
    heads = dict(zip("qkv", split, strict=True))
    for n in "qk":
        phase = rg.norm_forward_phase.TRAINING
        normed, _ = g.rmsnorm(phase, heads[n], t[f"w_{n}"], epsilon=1e-6, name=f"norm_{n}")
        heads[n] = g.rope(normed, angles, name=f"rope_{n}")
    o, _ = g.sdpa(heads["q"], heads["k"], heads["v"], 0.3, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o")
    back = g.backward_graph(["o"], list(given))
    pack = execute(g, given | {"freqs": freqs})
    assert [s.name for s in g.plan.steps] == ["project", "norm_q+rope_q+norm_k+rope_k", "attn"]

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    qkv = (leaves["x"] @ leaves["w"]).unflatten(2, (-1, D)).transpose(1, 2)
    q, k, v = qkv.split((H_Q, H_KV, H_KV), 1)
    turn = freqs[:, 0, 0, : D // 2].double()

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        return oracle.rope(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight, turn)

    keys, values = (y.repeat_interleave(H_Q // H_KV, 1) for y in (turned(k, leaves["w_k"]), v))
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    want, _ = oracle.attention(turned(q, leaves["w_q"]), keys, values, attn_scale=0.3, keep=keep)
    torch.testing.assert_close(pack["o"], want.detach(), rtol=0, atol=1e-11)
    d_o = normal(*want.shape, seed=3)
    saved = {n: pack[n] if n in pack else given[n] for n in back.saved}
    grads = execute(back, saved | {"do": d_o})
    wanted = torch.autograd.grad(want, list(leaves.values()), d_o)
    for name, exact_grad in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(grads[f"d{name}"], exact_grad, rtol=0, atol=1e-9)
