"""sdpa in torch against values worked out by hand: faults that other libraries have had."""

from math import exp, log, tanh

import pytest
import torch
from torch import Tensor

from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.engines.torch_executor.logits import alibi_slopes
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.ir.score_mod import softcap
from tests.engines.steps import run

F64 = torch.float64
INF = float("inf")


def column(*numbers: float) -> Tensor:
    """Keys or values one wide: [1, 1, s, 1]."""
    return torch.tensor(numbers, dtype=F64).view(1, 1, -1, 1)


def rows(op: Sdpa, q: Tensor, k: Tensor, v: Tensor, **more: Tensor) -> list[float]:
    return run(op, {"q": q, "k": k, "v": v, **more}, ["O"], TorchExecutor())["O"].flatten().tolist()


def uniform(op: Sdpa, s_q: int, v: Tensor, **more: Tensor) -> list[float]:
    """O for q = k = 0: means of the values that a row sees."""
    b = v.shape[0]
    q = torch.zeros(b, 1, s_q, 1, dtype=F64)
    return rows(op, q, torch.zeros_like(v), v, **more)


def test_causal_corners() -> None:
    """C42."""
    right, left = Sdpa(right_bound=0, bottom_right=True), Sdpa(right_bound=0)
    v = column(1, 2, 3, 4)
    assert uniform(right, 1, v) == pytest.approx([2.5])
    assert uniform(right, 2, v) == pytest.approx([2.0, 2.5])
    assert uniform(right, 4, column(1, 2)) == pytest.approx([0, 0, 1, 1.5])
    assert uniform(left, 1, v) == pytest.approx([1])
    assert uniform(left, 2, v) == pytest.approx([1, 1.5])
    assert uniform(left, 4, column(1, 2)) == pytest.approx([1, 1.5, 1.5, 1.5])
    lengths = {
        "seq_len_q": torch.ones(2, 1, 1, 1, dtype=torch.int32),
        "seq_len_kv": torch.tensor([4, 2], dtype=torch.int32).view(2, 1, 1, 1),
    }
    padded = Sdpa(right_bound=0, bottom_right=True, padding=True)
    assert uniform(padded, 1, v.expand(2, 1, 4, 1), **lengths) == pytest.approx([2.5, 1.5])


def test_window_counts_the_diagonal() -> None:
    v = column(1, 2, 4, 8)
    assert uniform(Sdpa(left_bound=1, right_bound=0), 4, v) == pytest.approx([1, 2, 4, 8])
    assert uniform(Sdpa(left_bound=2, right_bound=0), 4, v) == pytest.approx([1, 1.5, 3, 6])


def test_scale_leaves_bias_alone() -> None:
    """C27."""
    bias = torch.tensor([0, log(3)], dtype=F64).view(1, 1, 1, 2)
    for op in (Sdpa(attn_scale=0.5), Sdpa(attn_scale=0.5, softmax_input_is_log2=True)):
        assert uniform(op, 1, column(0, 1), bias=bias) == pytest.approx([0.75])


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_scale_is_applied_once(dtype: torch.dtype, causal: bool) -> None:
    """C31: q = 1s, k = (1s, 0s), v = (1, 0), every row of a long sequence seeing both keys."""
    for scale, want in ((0.5, 0.88080), (1.0, 0.98201), (0.0, 0.5), (-0.5, 0.11920)):
        for s in (1, 600) if causal else (1,):
            q = torch.ones(1, 1, s, 4, dtype=dtype)
            k = torch.stack([torch.ones(4), torch.zeros(4)]).to(dtype).view(1, 1, 2, 4)
            v = torch.tensor([1.0, 0.0]).to(dtype).view(1, 1, 2, 1).expand(1, 1, 2, 4)
            op = Sdpa(attn_scale=scale, right_bound=1 if causal else None)
            got = run(op, {"q": q, "k": k, "v": v}, ["O", "Stats"], TorchExecutor())
            tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-5
            assert got["O"].flatten().tolist() == pytest.approx([want] * (4 * s), abs=tolerance)
            stats = log(exp(4 * scale) + 1)
            assert got["Stats"].flatten().tolist() == pytest.approx([stats] * s, abs=1e-5)


@pytest.mark.parametrize("scale", [0.0, -0.5, 0.5])
def test_causal_and_long_with_any_scale(scale: float) -> None:
    """C31: torch's own kernel gives NaN, or in bf16 from 512 rows on wrong finite numbers."""
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.ones(1, 1, 700, 8, dtype=dtype)
        v = torch.arange(700.0).mul(0.01).to(dtype).view(1, 1, 700, 1).expand(1, 1, 700, 8)
        op = Sdpa(attn_scale=scale, right_bound=0)
        got = run(op, {"q": q, "k": q, "v": v}, ["O"], TorchExecutor())["O"][0, 0, :, 0]
        want = v[0, 0, :, 0].double().cumsum(0) / torch.arange(1, 701)
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-5)


def test_sink_joins_the_denominator() -> None:
    """Logits 0 and 0, sink ln 2: weights 1/4, 1/4, 1/2; Stats ln 4; the sink is never scaled."""
    sink = torch.full((1, 1, 1, 1), log(2), dtype=F64)
    inputs = {
        "q": torch.zeros(1, 1, 1, 1, dtype=F64),
        "k": column(0, 0),
        "v": column(1, 3),
        "sink_token": sink,
    }
    got = run(Sdpa(attn_scale=0.1), inputs, ["O", "Stats"], TorchExecutor())
    assert got["O"].item() == pytest.approx(1.0)
    assert got["Stats"].item() == pytest.approx(log(4))
    given = {**inputs, "o": got["O"], "dO": torch.ones_like(got["O"]), "stats": got["Stats"]}
    grad = run(SdpaBackward(attn_scale=0.1), given, ["dSink_token"], TorchExecutor())
    # dO/dsink = -p_sink * O.
    assert grad["dSink_token"].item() == pytest.approx(-0.5)


def test_softcap_comes_after_the_scale() -> None:
    """cap * tanh(scale * q.k / cap): with scale 2 and cap 1, keys 1 and 0, weights by tanh 2."""
    op = Sdpa(attn_scale=2.0, score_mod=softcap(1.0))
    weight = exp(tanh(2)) / (exp(tanh(2)) + 1)
    assert rows(op, column(1), column(1, 0), column(1, 0)) == pytest.approx([weight])


def test_alibi() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(3) == pytest.approx((2**-4, 2**-8, 2**-2))
    assert alibi_slopes(1) == (2.0**-8,)
    # One head of slope 2^-8, row 1 over keys 0 and 1: logits -2^-8 and 0.
    op = Sdpa(alibi=True, right_bound=0)
    got = uniform(op, 2, column(0, 1))
    assert got == pytest.approx([0, 1 / (1 + exp(-(2**-8)))])


def test_log2_puts_ln_2_into_the_gradients_of_q_and_k() -> None:
    base = {"q": column(1), "k": column(1, 0), "v": column(1, 0)}
    plain, log2 = {"attn_scale": log(2)}, {"attn_scale": 1.0, "softmax_input_is_log2": True}
    found: list[dict[str, Tensor]] = []
    for attrs in (plain, log2):
        got = run(Sdpa(**attrs), base, ["O", "Stats"], TorchExecutor())
        given = {**base, "o": got["O"], "dO": column(1), "stats": got["Stats"]}
        got |= run(SdpaBackward(**attrs), given, ["dQ", "dK"], TorchExecutor())
        found.append(got)
    assert found[0]["O"].item() == pytest.approx(2 / 3)
    assert found[0]["dQ"].item() == pytest.approx(log(2) * 2 / 9)
    for port, value in found[0].items():
        torch.testing.assert_close(found[1][port], value, rtol=1e-14, atol=0)
