"""The oracle against plain torch where torch is right, and the budget against known errors."""

from math import inf, nan

import pytest
import torch
import torch.nn.functional as F

from ropegraph.testing import oracle
from ropegraph.testing.budget import assert_within, budget, rounding
from ropegraph.testing.inputs import LAYOUTS, normal, packed, poisoned, strides

F64 = torch.float64


def test_attention_is_that_of_torch():
    q, k, v = normal((2, 4, 5, 6), F64), normal((2, 2, 7, 6), F64), normal((2, 2, 7, 3), F64)
    bias = normal((1, 4, 5, 7), F64, seed=9)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3, enable_gqa=True)
    got, stats = oracle.attention(q, k, v, attn_scale=0.3, bias=bias)
    torch.testing.assert_close(got, want)
    logits = 0.3 * q @ k.repeat_interleave(2, 1).transpose(2, 3) + bias
    torch.testing.assert_close(stats[..., 0], logits.logsumexp(-1))


def test_rope_is_rotate_half():
    x, angles = normal((2, 3, 5, 8), F64), oracle.angles(5, 8)
    cos, sin = (torch.cat([t, t], -1) for t in (angles.double().cos(), angles.double().sin()))
    turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
    torch.testing.assert_close(oracle.rope(x, angles), x * cos + turned * sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_keeps_the_norm_and_the_relative_position(interleaved):
    q, k = normal((1, 1, 1, 6), F64, seed=1), normal((1, 1, 1, 6), F64, seed=2)

    def score(i: int, j: int) -> float:
        a = oracle.rope(q, oracle.angles(1, 6, start=i), interleaved=interleaved)
        b = oracle.rope(k, oracle.angles(1, 6, start=j), interleaved=interleaved)
        torch.testing.assert_close(a.norm(), q.norm())
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(25, 20), rel=1e-5)


def test_rows_without_keys():
    q = torch.zeros(1, 1, 3, 2, dtype=F64)
    k = oracle.leaf(torch.zeros(1, 1, 2, 2))
    v = oracle.leaf(torch.tensor([[5.0], [6.0]])[None, None])
    keep = oracle.band(3, 2, right=0, bottom_right=True)
    o, stats = oracle.attention(q, k, v, keep=keep)
    assert o.reshape(-1).tolist() == [0, 5, 5.5]
    assert stats[0, 0, 0, 0] == -inf
    grads = oracle.gradients(o, (k, v), torch.ones_like(o))
    assert all(torch.isfinite(g).all() for g in grads)


# In bf16 it would hide: meaning is checked in fp64, bf16 is for where the rounding lies.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_percent_does_not_hide_in_the_budget(dtype):
    x, angles = normal((2, 3, 33, 64), dtype), oracle.angles(33, 64)
    want = oracle.rope(x, angles)
    cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
    turned = torch.cat([-x[..., 32:], x[..., :32]], -1)
    peer = x * cos.to(dtype) + turned * sin.to(dtype)
    allowed = budget(want, peer, dtype)
    assert_within(want.to(dtype), want, rounding(want, dtype) * 1.01)
    assert_within(peer, want, allowed)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_within(1.01 * want, want, allowed)


def test_infinities_must_agree_and_nan_is_an_error():
    want = torch.tensor([-inf, 1.0])
    assert_within(want.clone(), want, 0.1)
    for wrong in ([nan, 1.0], [inf, 1.0], [-inf, nan], [0.0, 1.0]):
        with pytest.raises(AssertionError, match="times the allowed"):
            assert_within(torch.tensor(wrong), want, 0.1, "stats")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_numbers(layout):
    dim = (2, 3, 1, 4)
    x = normal(dim, layout=layout, seed=3)
    assert x.shape == dim
    assert x.stride() == strides(dim, layout)
    plain = normal(dim, seed=3)
    assert torch.equal(x[:1], plain[:1])
    assert layout == "expanded" or torch.equal(x, plain)
    assert poisoned(dim, layout=layout).isnan().all()


def test_packed_sequences_lie_one_after_another():
    rows = [normal((2, n, 3), seed=n) for n in (2, 0, 1)]
    buffer = packed(rows, total=5)
    assert torch.equal(buffer[:2].transpose(0, 1), rows[0])
    assert torch.equal(buffer[2:3].transpose(0, 1), rows[2])
    assert buffer[3:].isnan().all()
