"""RoPE, rope_hf and the decode rope of Neuron's library, against their documented formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.compat.neuron import RoPE, rope, rope_hf
from ropegraph.errors import GraphError
from tests.compat.te import BF16, F16, F32, F64, dirty_memory, normal, strange_grad

D = 64


def halves(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """out1 = x1 cos - x2 sin, out2 = x2 cos + x1 sin, on the two halves of an axis."""
    x1, x2 = x.chunk(2, dim)
    (c1, c2), (s1, s2) = cos.chunk(2, dim), sin.chunk(2, dim)
    return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), dim)


def native(x: Tensor, cos: Tensor, sin: Tensor, contiguous: bool) -> Tensor:
    """RoPE's formula: pairs are first gathered to halves, and scattered again at the end."""
    if not contiguous:
        x = torch.cat((x[0::2], x[1::2]))
    cos, sin = (torch.cat((t, t))[:, :, None] for t in (cos, sin))
    out = halves(x, cos, sin, 0)
    if not contiguous:
        out = torch.stack(out.chunk(2), dim=1).flatten(0, 1)
    return out


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("shape", [(64, 2, 3, 5), (128, 1, 2, 7)])
def test_RoPE(shape: tuple[int, ...], contiguous: bool) -> None:
    d, b, _, s = shape
    x = normal(*shape).requires_grad_()
    cos, sin = normal(d // 2, b, s, seed=1, dtype=F32), normal(d // 2, b, s, seed=2, dtype=F32)
    with dirty_memory():
        y = RoPE(x, cos, sin, contiguous_layout=contiguous)
    leaf = x.detach().clone().requires_grad_()
    want = native(leaf, cos.double(), sin.double(), contiguous)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    assert y.is_contiguous()
    for dy in strange_grad(y):
        with dirty_memory():
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (wanted,) = torch.autograd.grad(want, leaf, dy, retain_graph=True)
        torch.testing.assert_close(dx, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close((dy * y).sum(), (dx * x).sum(), rtol=1e-12, atol=1e-12)
        assert dx.is_contiguous()
    hint = RoPE(x, cos, sin, False, contiguous, True)
    assert torch.equal(hint, y)


@pytest.mark.parametrize("table", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_RoPE_data_types(dtype: torch.dtype, table: torch.dtype) -> None:
    x = normal(64, 2, 3, 5, dtype=dtype)
    angle = normal(32, 2, 5)
    cos, sin = angle.cos().to(table), angle.sin().to(table)
    got = RoPE(x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0), cos, sin)
    want = native(x.double(), cos.double(), sin.double(), contiguous=True)
    limit = 1.5 * x.abs().max() * (torch.finfo(dtype).eps / 2 + 4 * torch.finfo(F32).eps)
    assert got.dtype is dtype
    assert (got.double() - want).abs().max() <= limit


X, COS = normal(64, 2, 3, 5), normal(32, 2, 5, dtype=F32)
ROPE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shards": ({"lnc_shard": True}, "use False, which rotates all of it"),
    "dims": ({"x_in": X[0]}, "has 3 dims; use [d_head, B, n_heads, S]"),
    "d_head": ({"x_in": X[:32]}, "has d_head=32; use 64 or 128"),
    "no batch": ({"x_in": X[:, :0]}, "is empty"),
    "no heads": ({"x_in": X[:, :, :0]}, "is empty"),
    "no tokens": ({"x_in": X[..., :0]}, "is empty"),
    "full width": ({"cos": normal(64, 2, 5)}, "cos is [64, 2, 5]; use [32, 2, 5]"),
    "sin": ({"sin": COS[..., :4]}, "sin is [32, 2, 4]; use [32, 2, 5]"),
    "table dims": ({"sin": COS[0]}, "has 2 dims; use [d_head / 2, B, S]"),
    "types": ({"sin": COS.bfloat16()}, "cos is torch.float32 but sin is torch.bfloat16"),
    "flag": ({"contiguous_layout": 2}, "contiguous_layout=2; use True or False"),
}


@pytest.mark.parametrize("case", ROPE_REFUSED)
def test_what_RoPE_does_not_take(case: str) -> None:
    changed, text = ROPE_REFUSED[case]
    with pytest.raises(GraphError) as caught:
        RoPE(**{"x_in": X, "cos": COS, "sin": COS, **changed})
    assert text in str(caught.value), caught.value


# rope_hf


def hf_case(per_batch: bool, rows: int = 130) -> dict[str, Tensor]:
    """Tables of which no two columns are alike."""
    lead = (2, rows) if per_batch else (rows,)
    return {
        "q": normal(2, 3, 128, 10),
        "k": normal(2, 1, 128, 10, seed=1),
        "cos": normal(*lead, 10, seed=2, dtype=F32),
        "sin": normal(*lead, 10, seed=3, dtype=F32),
    }


def hf(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (
        (t if t.dim() == 3 else t[None])[:, None, : x.shape[2]].to(x.dtype) for t in (cos, sin)
    )
    return halves(x, cos, sin, 3)


def hf_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """dx1 = dy1 cos1 + dy2 sin2, dx2 = dy2 cos2 - dy1 sin1: the sines of the partner."""
    cos, sin = (
        (t if t.dim() == 3 else t[None])[:, None, : dy.shape[2]].to(dy.dtype) for t in (cos, sin)
    )
    (g1, g2), (c1, c2), (s1, s2) = (t.chunk(2, 3) for t in (dy, cos, sin))
    return torch.cat((g1 * c1 + g2 * s2, g2 * c2 - g1 * s1), 3)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
def test_rope_hf(per_batch: bool, cached: bool) -> None:
    given = hf_case(per_batch)
    q, k, cos, sin = given.values()
    tables: dict[str, Any] = {"cos": cos, "sin": sin}
    if cached:
        tables = {"rope_cache": torch.cat((cos, sin), dim=-1)}
    leaves = [x.clone().requires_grad_() for x in (q, k)]
    with dirty_memory():
        made = rope_hf(*leaves, **tables)
        grads = [strange_grad(y)[1] for y in made]
        got = torch.autograd.grad(made, leaves, grads)
        direct = rope_hf(*grads, **tables, backward=True)
    for x, y, dy, dx, raw in zip(leaves, made, grads, got, direct, strict=True):
        torch.testing.assert_close(y, hf(x, cos, sin), rtol=0, atol=1e-12)
        torch.testing.assert_close(dx, hf_backward(dy, cos, sin), rtol=0, atol=1e-12)
        assert torch.equal(dx, raw)
        torch.testing.assert_close((dy * y).sum(), (dx * x).sum(), rtol=1e-12, atol=1e-12)
        assert y.is_contiguous()
        assert dx.is_contiguous()


def test_rope_hf_into_buffers() -> None:
    q, k, cos, sin = hf_case(per_batch=True).values()
    want = rope_hf(q, k, cos=cos, sin=sin)
    store = torch.full((2, 128, 4, 10), math.nan, dtype=F64)
    q_out, k_out = store.transpose(1, 2).split((3, 1), dim=1)
    made = rope_hf(q, k, q_out, k_out, cos, sin)
    assert made[0] is q_out
    assert made[1] is k_out
    back = [torch.full_like(x, math.nan) for x in (q, k)]
    rope_hf(q, k, *back, cos, sin, None, True)
    for got, wanted in zip((q_out, k_out), want, strict=True):
        assert torch.equal(got, wanted)
    for got, x in zip(back, (q, k), strict=True):
        torch.testing.assert_close(got, hf_backward(x, cos, sin), rtol=0, atol=1e-12)
    leaf = q.clone().requires_grad_()
    made = rope_hf(leaf, k, torch.empty_like(q), torch.empty_like(k), cos, sin)
    (dx,) = torch.autograd.grad(made[0].sum(), leaf)
    torch.testing.assert_close(dx, hf_backward(torch.ones_like(q), cos, sin), rtol=0, atol=1e-12)
    same = q.clone()
    rope_hf(same, k, same, torch.empty_like(k), cos, sin)  # in place
    assert torch.equal(same, want[0])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_rope_hf_data_types(dtype: torch.dtype) -> None:
    given = hf_case(per_batch=False)
    angle = normal(128, 10)
    q, k = (given[n].to(dtype) for n in "qk")
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for x, y in zip((q, k), rope_hf(q, k, cos=cos, sin=sin), strict=True):
        want = hf(x.double(), cos, sin)
        limit = 1.5 * x.abs().max() * (torch.finfo(dtype).eps / 2 + 4 * torch.finfo(F32).eps)
        assert y.dtype is dtype
        assert (y.double() - want).abs().max() <= limit


HF = hf_case(per_batch=False)
CACHE = torch.cat((HF["cos"], HF["sin"]), dim=-1)
HF_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q dims": ({"q": HF["q"][0]}, "q [3, 128, 10] has 3 dims; use [B, heads, S, D]"),
    "k dims": ({"k": HF["k"][0]}, "k [1, 128, 10] has 3 dims"),
    "width of k": ({"k": HF["k"][..., :8]}, "differ in B, S or D"),
    "batch of k": ({"k": HF["k"][:1]}, "differ in B, S or D"),
    "length": (
        {"q": HF["q"][:, :, :100], "k": HF["k"][:, :, :100]},
        "S=100 of q [2, 3, 100, 10] is no multiple of 128; pad to 128",
    ),
    "both": ({"rope_cache": CACHE}, "rope_cache and cos, sin both hold the tables"),
    "neither": ({"cos": None, "sin": None}, "no tables; give cos= and sin=, or rope_cache="),
    "one": ({"sin": None}, "no tables"),
    "width of cos": ({"cos": CACHE}, "cos is [130, 20]; use [S', 10] or [2, S', 10]"),
    "width of the cache": (
        {"cos": None, "sin": None, "rope_cache": HF["cos"]}, "rope_cache is [130, 10]; use [S', 20]"
    ),
    "rows": ({"cos": HF["cos"][:127]}, "with S' at least 128"),
    "batch of cos": ({"cos": HF["cos"].expand(3, 130, 10)}, "cos is [3, 130, 10]"),
    "shapes": ({"sin": HF["sin"][:128]}, "cos [130, 10] and sin [128, 10] differ"),
    "one buffer": ({"q_out": HF["q"].clone()}, "one of q_out and k_out is given"),
    "no buffer": ({"q_out": "q", "k_out": HF["k"]}, "q_out='q' is no torch tensor"),
    "buffers": ({"q_out": HF["cos"], "k_out": HF["sin"]}, "give the tables as cos= and sin="),
    "flag": ({"backward": 1}, "backward=1; use True or False"),
}  # fmt: skip


@pytest.mark.parametrize("case", HF_REFUSED)
def test_what_rope_hf_does_not_take(case: str) -> None:
    changed, text = HF_REFUSED[case]
    with pytest.raises(GraphError) as caught:
        rope_hf(**{**HF, **changed})
    assert text in str(caught.value), caught.value


# decode


@pytest.mark.parametrize("precision", ["float32", "exact"])
@pytest.mark.parametrize("column", [True, False])
def test_decode(precision: str, column: bool) -> None:
    b, n, s = 3, 2, 2
    x = normal(b, n, s, D).requires_grad_()
    inv_freqs = 10000.0 ** (-torch.arange(0, D, 2, dtype=F32) / D)
    position = torch.tensor([[0, 1], [131072, 131073], [9_000_001, 9_000_002]], dtype=torch.int32)
    if precision == "exact":
        half = position[:, None, :, None].double() * inv_freqs.double()
    else:
        half = (position[:, None, :, None].float() * inv_freqs).double()
    angle = torch.cat((half, half), dim=-1)
    given = inv_freqs[:, None] if column else inv_freqs
    with dirty_memory():
        y = rope(x, given, position, D**-0.5, precision)
    leaf = x.detach().clone().requires_grad_()
    want = D**-0.5 * halves(leaf, angle.cos(), angle.sin(), 3)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    dy = strange_grad(y)[0]
    got, wanted = torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(want, leaf, dy)[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_decode_of_strided_heads(dtype: torch.dtype) -> None:
    x = normal(2, 1, 3, D, dtype=dtype).transpose(1, 2)
    inv_freqs, position = 10000.0 ** (-torch.arange(0, D, 2) / D), torch.tensor([[5], [-1]])
    got = rope(x, inv_freqs, position)
    assert torch.equal(got, rope(x.contiguous(), inv_freqs, position))
    half = (position[:, None, :, None].float() * inv_freqs).double()
    angle = torch.cat((half, half), dim=-1)
    want = halves(x.double(), angle.cos(), angle.sin(), 3)
    limit = 1.5 * x.abs().max() * (torch.finfo(dtype).eps / 2 + 4 * torch.finfo(F32).eps)
    assert (got.double() - want).abs().max() <= limit


DECODE: dict[str, Any] = {
    "x": normal(2, 3, 1, D),
    "inv_freqs": normal(32, 1, dtype=F32),
    "pos_ids": torch.zeros(2, 1).int(),
}
DECODE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dims": ({"x": normal(2, 3, D)}, "has 3 dims; use [B, heads, S, d]"),
    "width": ({"x": normal(2, 3, 1, 96)}, "has d=96; use a multiple of 64"),
    "inv_freqs": ({"inv_freqs": normal(64, dtype=F32)}, "[64]; use torch.float32 [32, 1]"),
    "type": ({"inv_freqs": normal(32)}, "inv_freqs is torch.float64 [32]"),
    "positions": ({"pos_ids": torch.zeros(2, 2).int()}, "pos_ids is [2, 2]; use [2, 1]"),
    "position type": ({"pos_ids": torch.zeros(2, 1)}, "position_ids is fp32; use int32"),
    "scale": ({"output_scale": math.inf}, "output_scale=inf is not finite"),
    "no precision": ({"angle_precision": ["exact"]}, "use one of 'float32', 'exact'"),
    "precision": ({"angle_precision": "half"}, "use one of 'float32', 'exact'"),
}


@pytest.mark.parametrize("case", DECODE_REFUSED)
def test_what_decode_does_not_take(case: str) -> None:
    changed, text = DECODE_REFUSED[case]
    with pytest.raises(GraphError) as caught:
        rope(**{**DECODE, **changed})
    assert text in str(caught.value), caught.value


def test_gradients_of_gradients_and_inputs_left_alone() -> None:
    x = normal(2, 1, 1, D).requires_grad_()
    inv_freqs, position = normal(32, dtype=F32), torch.tensor([[3], [1]])
    before = x.detach().clone()
    (dx,) = torch.autograd.grad((rope(x, inv_freqs, position) ** 2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(ddx, torch.full_like(x, 2.0))  # of |R x|^2 = |x|^2
    assert torch.equal(x, before)
