"""Gradients of attention, and the small ops, of the reference engine."""

from math import inf, log, nan

import pytest
import torch

from ropegraph.engines.reference.buffers import round_once
from ropegraph.ir.ops import (
    Rope,
    Scale,
    SdpaBackward,
    Sum,
)
from ropegraph.ir.score_mod import softcap
from ropegraph.testing import oracle
from ropegraph.testing.inputs import normal
from tests.engines.rows import F64, forward_results
from tests.engines.steps import run


@pytest.mark.parametrize("is_log2", [False, True])
def test_every_gradient_is_that_of_the_oracle(is_log2):
    b, h_q, s_q, s_kv, d_qk, d_v = 2, 4, 5, 6, 4, 3
    q, k, v = (
        normal(dim, F64, layout, seed=n)
        for n, (dim, layout) in enumerate(
            (
                ((b, h_q, s_q, d_qk), "bshd"),
                ((b, 2, s_kv, d_qk), "gapped"),
                ((b, 1, s_kv, d_v), "packed_qkv"),
            )
        )
    )
    bias = normal((1, h_q, 1, s_kv), F64, seed=5)
    sink = normal((1, h_q, 1, 1), F64, seed=6)
    d_o = normal((b, h_q, s_q, d_v), F64, "bshd", seed=7)
    shared = {"attn_scale": 0.3, "right_bound": 1, "softmax_input_is_log2": is_log2}
    attrs = SdpaBackward(**shared, score_mod=softcap(1.5), alibi=True)
    inputs = {"q": q, "k": k, "v": v, **forward_results(q, k, v), "dO": d_o}
    inputs |= {"bias": bias, "sink_token": sink}
    got = run(attrs, inputs, ["dQ", "dK", "dV", "dBias", "dSink_token"])
    leaves = [oracle.leaf(x) for x in (q, k, v, bias, sink)]
    o, _ = oracle.attention(
        *leaves[:3],
        attn_scale=0.3,
        keep=oracle.band(s_q, s_kv, right=1),
        bias=leaves[3] + oracle.alibi(h_q, s_q, s_kv),
        score_mod=lambda x: 1.5 * torch.tanh(x / 1.5),
        sink=leaves[4],
        softmax_input_is_log2=is_log2,
    )
    for grad, want in zip(got.values(), oracle.gradients(o, leaves, d_o), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-11, atol=1e-12)


def test_fully_masked_and_padded_rows_have_no_gradient():
    b, h, s, d = 1, 1, 4, 2
    q, k, v, d_o = (normal((b, h, s, d), F64, seed=n) for n in range(4))
    q[:, :, 3:], d_o[:, :, 3:], k[:, :, 2:], v[:, :, 2:] = nan, nan, nan, nan
    lengths = {
        "seq_len_q": torch.full((1, 1, 1, 1), 3),
        "seq_len_kv": torch.full((1, 1, 1, 1), 2),
    }
    attrs = SdpaBackward(0.5, right_bound=0, bottom_right=True, padding=True)
    inputs = {"q": q, "k": k, "v": v, **forward_results(q, k, v), "dO": d_o, **lengths}
    got = run(attrs, inputs, ["dQ", "dK", "dV"])
    assert all(torch.isfinite(grad).all() for grad in got.values())
    assert not got["dQ"][0, 0, 0].any()
    assert not got["dQ"][0, 0, 3].any()
    assert not got["dK"][0, 0, 2:].any()
    assert not got["dV"][0, 0, 2:].any()
    assert got["dQ"][0, 0, 2].any()


def test_a_folded_scale_gives_the_gradients_of_the_table():
    # Seed table, Q-only with log2: q carries a / ln 2, and its adjoint multiplies by it again.
    q, k, v, d_o = (normal((1, 2, 5, 4), F64, seed=n) for n in range(4))
    a, k2 = 0.3, 1 / log(2)
    plain = run(
        SdpaBackward(a),
        {"q": q, "k": k, "v": v, **forward_results(q, k, v), "dO": d_o},
        ["dQ", "dK", "dV"],
    )
    folded = run(
        SdpaBackward(1.0, softmax_input_is_log2=True),
        {"q": a * k2 * q, "k": k, "v": v, **forward_results(q, k, v), "dO": d_o},
        ["dQ", "dK", "dV"],
    )
    torch.testing.assert_close(a * k2 * folded["dQ"], plain["dQ"], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(folded["dK"], plain["dK"], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(folded["dV"], plain["dV"], rtol=1e-12, atol=1e-13)


def test_scale_and_sum():
    x, y = normal((1, 2, 3, 4), F64, "bshd", seed=1), normal((1, 2, 3, 4), F64, seed=2)
    assert torch.equal(run(Scale(0.3), {"input": x}, ["output"])["output"], 0.3 * x)
    assert torch.equal(run(Sum(), {"0": x, "1": y, "2": y}, ["output"])["output"], x + y + y)


def test_io_types_do_not_narrow_the_computation():
    x = normal((1, 2, 9, 8), torch.bfloat16, seed=1)
    angles = oracle.angles(9, 8)
    freqs = angles.reshape(9, 1, 1, 4)
    got = run(Rope(8, 0, 0.3, half_width=True), {"input": x, "freqs": freqs}, ["output"])
    want = round_once(oracle.rope(x, angles, output_scale=0.3), torch.bfloat16)
    assert torch.equal(got["output"], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_once(dtype):
    eps = torch.finfo(dtype).eps
    # just beyond a tie: through fp32 it becomes the tie, which goes to even, downwards
    over = torch.tensor([1 + eps / 2 + 2.0**-40, -1 - eps / 2 - 2.0**-40], dtype=F64)
    assert round_once(over, dtype).tolist() == [1 + eps, -1 - eps]
    under = torch.tensor([1 + 1.5 * eps - 2.0**-40, 1 + 1.5 * eps], dtype=F64)
    assert round_once(under, dtype).tolist() == [1 + eps, 1 + 2 * eps]
    special = torch.tensor([inf, -inf, 0.0, 1e300, 1e-300], dtype=F64)
    assert round_once(special, dtype).tolist() == [inf, -inf, 0.0, inf, 0.0]
    assert round_once(torch.tensor([nan], dtype=F64), dtype).isnan().all()
