"""QK norm: what does not fit, and what the functions answer."""

from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.functional import (
    attention,
    cached_attention,
    qkv_attention,
)
from tests.functional.cases import H_KV, SPLIT, B, D, S, heads, table
from tests.functional.normed import ours, packed, weights

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "q alone": ({"k_norm": None}, "q_norm is given but k_norm is not; give both, or neither"),
    "k alone": ({"q_norm": None}, "k_norm is given but q_norm is not"),
    "width": ({"q_norm": torch.ones(D + 1)}, rf"q_norm is \[{D + 1}\]; use \[{D}\]"),
    "axes": ({"k_norm": torch.ones(1, D)}, rf"k_norm is \[1, {D}\]; use \[{D}\]"),
    "type": ({"k_norm": torch.ones(D).half()}, r"k_norm is torch.float16 but q is torch.float32"),
    "number": ({"q_norm": 1.0}, "q_norm is float, no tensor"),
    "negative": ({"norm_eps": -1e-6}, "norm_eps=-1e-06 is negative; use 0 or more"),
    "tensor": ({"norm_eps": torch.ones(())}, "norm_eps is a tensor"),
    "none": ({"norm_eps": None}, "norm_eps=None is not a number"),
    "neither": (
        {"q_norm": None, "k_norm": None, "norm_eps": 1e-3},
        "norm_eps=0.001 speaks of q_norm and k_norm, which are not given",
    ),
}


def test_second_derivatives_are_refused_by_name() -> None:
    q, k, v = (x[:1].detach().requires_grad_() for x in heads())
    w = weights(torch.float32)
    (dw,) = torch.autograd.grad(ours(q, k, v, *w).sum(), w[:1], create_graph=True)
    with pytest.raises(rg.GraphError, match="attention has only a first one"):
        torch.autograd.grad(dw.sum(), q)
    o = ours(q, k, v, *w, cu_seqlens=torch.tensor([0, S]))
    (dw,) = torch.autograd.grad(o.sum(), w[:1], create_graph=True)
    with pytest.raises(rg.GraphError, match="norm_rope has only a first one"):
        torch.autograd.grad(dw.sum(), q)


def test_no_gradient_of_freqs_beside_norms() -> None:
    w, freqs = weights(torch.float32), table().requires_grad_()
    with pytest.raises(rg.GraphError, match=r"freqs requires grad, which it has not beside q_norm"):
        ours(*heads(), *w, freqs=freqs)
    with pytest.raises(rg.GraphError, match=r"qkv_attention: freqs requires grad.*detach it"):
        qkv_attention(packed(torch.float32)[0], freqs, split=SPLIT, q_norm=w[0], k_norm=w[1])
    with torch.no_grad():
        ours(*heads(), *w, freqs=freqs)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    changes, match = MISTAKES[name]
    q, k, v = (x.detach() for x in heads())
    norms = {"q_norm": torch.ones(D), "k_norm": torch.ones(D), **changes}
    with pytest.raises(rg.GraphError, match=f"^attention: {match}|^{match}"):
        attention(q, k, v, table(), enable_gqa=True, **norms)
    if name != "neither":
        one = [x[:1] for x in (q, k, v)]
        with pytest.raises(rg.GraphError, match=f"^attention: {match}|^{match}"):
            attention(*one, table(), enable_gqa=True, cu_seqlens=torch.tensor([0, S]), **norms)
    with pytest.raises(rg.GraphError, match=f"^qkv_attention: {match}|^{match}"):
        qkv_attention(packed(torch.float32)[0].detach(), table(), split=SPLIT, **norms)
    room, at = torch.zeros(B, H_KV, S, D), torch.zeros(B, dtype=torch.int32)
    with pytest.raises(rg.GraphError, match=f"^cached_attention: {match}|^{match}"):
        cached_attention(q, k, v, room, room.clone(), at, table(), **norms)


def test_what_packed_heads_cannot_do() -> None:
    norms = {"q_norm": torch.ones(8), "k_norm": torch.ones(8)}
    with pytest.raises(rg.GraphError, match=r"in_place writes over the q and k .* leave in_place"):
        qkv_attention(torch.randn(2, 6, 32), split=(2, 1, 1), in_place=True, **norms)
    with pytest.raises(rg.GraphError, match=r"q_norm and k_norm with qkv .* use split by heads"):
        qkv_attention(
            torch.randn(2, 6, 2, 32), table(6, 8), split=(16, 8, 8), by_groups=True, **norms
        )
    room, at = torch.zeros(2, 1, 6, 8), torch.zeros(2, dtype=torch.int32)
    x, leaf = torch.randn(2, 1, 2, 8), torch.ones(8, requires_grad=True)
    with pytest.raises(rg.GraphError, match="q_norm requires grad, but nothing has a gradient"):
        cached_attention(x, x, x, room, room.clone(), at, q_norm=leaf, k_norm=leaf)
