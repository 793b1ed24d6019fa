"""C27 and C31: a scale multiplies q.k once and nothing else, wherever it was folded."""

from math import exp, log

import pytest
import torch

import ropegraph
from ropegraph.testing.budget import assert_within, relative
from tests.numerics.attention import FOLDS, Case, data, execute, expected, forward, run

F64 = torch.float64
ENGINES = ("torch", "reference")
EVERYWHERE = pytest.mark.parametrize(("fold", "log2"), FOLDS)
ON_BOTH = pytest.mark.parametrize("engine", ENGINES)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: dict[str, object],
    dtype: torch.dtype = F64,
    **keywords: object,
) -> dict[str, torch.Tensor]:
    """o and stats of sdpa over rope(q) and rope(k), all angles 0."""
    given = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    given["freqs"] = torch.zeros(max(q.shape[2], k.shape[2]), 1, 1, q.shape[3])
    extra = {n: x for n, x in keywords.items() if isinstance(x, torch.Tensor)}
    g = ropegraph.pygraph(io_data_type=dtype, **settings)
    t = {n: g.tensor_like(x, name=n) for n, x in {**given, **extra}.items()}
    keywords = {n: t.get(n, x) for n, x in keywords.items()}
    q_rot, k_rot = (g.rope(t[n], t["freqs"]) for n in ("q", "k"))
    o, stats = g.sdpa(q_rot, k_rot, t["v"], **keywords)
    o.set_output(True).set_name("o")
    stats.set_output(True).set_name("stats")
    return execute(g, {**given, **extra})


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=F64).reshape(1, 1, -1, 1)


@EVERYWHERE
@ON_BOTH
@pytest.mark.parametrize("attn_scale", [0.5, 0.3, -2.0])
def test_a_bias_is_not_scaled(fold, log2, engine, attn_scale):
    settings = {"fold": fold, "fold_log2": log2, "engines": engine}
    zero, keys = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)
    bias = torch.tensor([0.0, log(3)], dtype=F64).reshape(1, 1, 1, 2)
    got = attend(zero, keys, column(0, 1), settings, attn_scale=attn_scale, bias=bias)
    # times the scale it would be 0.6340, raw under exp2 0.6817
    assert float(got["o"]) == pytest.approx(0.75, rel=1e-12)
    assert float(got["stats"]) == pytest.approx(log(4), rel=1e-12)


@EVERYWHERE
@ON_BOTH
def test_a_sink_is_not_scaled(fold, log2, engine):
    settings = {"fold": fold, "fold_log2": log2, "engines": engine}
    sink = torch.full((1, 1, 1, 1), log(2), dtype=F64)
    zero, keys = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)
    got = attend(zero, keys, column(1, 3), settings, attn_scale=0.5, sink_token=sink)
    assert float(got["o"]) == pytest.approx(1.0, rel=1e-12)
    assert float(got["stats"]) == pytest.approx(log(4), rel=1e-12)


@EVERYWHERE
@ON_BOTH
def test_alibi_is_not_scaled(fold, log2, engine):
    settings = {"fold": fold, "fold_log2": log2, "engines": engine}
    zero, keys = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)
    got = attend(
        zero,
        keys,
        column(0, 1),
        settings,
        attn_scale=0.5,
        use_alibi_mask=True,
        diagonal_band_right_bound=0,
    )
    # one head: slope 2^-8, and row 1 is one step from key 0
    assert got["o"].flatten().tolist() == pytest.approx([0, 1 / (1 + exp(-(2.0**-8)))], rel=1e-12)


@EVERYWHERE
@ON_BOTH
def test_a_score_mod_sees_the_scaled_natural_logit(fold, log2, engine):
    settings = {"fold": fold, "fold_log2": log2, "engines": engine}
    q, k = torch.ones(1, 1, 1, 4), torch.stack([torch.ones(4), torch.zeros(4)])[None, None]
    seen = attend(
        q,
        k,
        column(1, 0),
        settings,
        attn_scale=0.5,
        score_mod=lambda g, s: g.min(s, 1.5),
    )
    # 0.5 * 4 = 2 is capped to 1.5
    assert float(seen["stats"]) == pytest.approx(log(exp(1.5) + 1), rel=1e-12)


@EVERYWHERE
@ON_BOTH
@pytest.mark.parametrize(
    "extra",
    [
        {"bias": (2, 6, 5, 7), "right": 0},
        {"bias": (1, 1, 1, 7), "alibi": True, "right": 0},
        {"bias": (1, 1, 5, 7), "softcap": 1.0, "sink": True},
    ],
)
def test_gradients_of_terms_in_natural_units(fold, log2, engine, extra):
    case = Case(attn_scale=0.4, **extra)
    given = data(case)
    got = run(case, given, fold=fold, fold_log2=log2, engines=engine)
    for name, want in expected(case, given).items():
        assert_within(got[name], want, relative(want, 1e-11), name)


# attn_scale -> O: q = 1s and keys 1s and 0s of four channels, so the logits are 4 s and 0.
ONCE = {0.5: 0.88080, 1.0: 0.98201, 0.0: 0.5, -0.5: 0.11920, None: 0.98201}


@EVERYWHERE
@ON_BOTH
@pytest.mark.parametrize(
    ("attn_scale", "on_host"),
    [*((a, True) for a in ONCE), *((a, False) for a in ONCE if a is not None)],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_scale_is_applied_once(fold, log2, engine, attn_scale, is_causal, on_host):
    given = attn_scale if on_host else torch.full((1, 1, 1, 1), attn_scale)
    settings = {"fold": fold, "fold_log2": log2, "engines": engine}
    q = torch.ones(1, 1, 2, 4)
    k = torch.stack([torch.ones(4), torch.zeros(4)])[None, None]
    keywords = {"attn_scale": given, "use_causal_mask": is_causal}
    got = attend(q, k, column(1, 0), settings, **keywords)["o"].flatten().tolist()
    # twice it would be 0.73106 for 0.5, and with 1 / ln 2 under natural exp 0.94712
    assert got == pytest.approx(
        [1.0 if is_causal else ONCE[attn_scale], ONCE[attn_scale]], abs=1e-5
    )


@EVERYWHERE
@pytest.mark.parametrize("attn_scale", ONCE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_long_causal_row_with_any_scale(fold, log2, attn_scale, dtype):
    # torch's own kernel gives NaN, or from 512 rows on wrong finite numbers, for a scale <= 0.
    s = 520
    even = (torch.arange(s) % 2 == 0).double()
    k = even.reshape(1, 1, s, 1).expand(1, 1, s, 4)
    settings = {"fold": fold, "fold_log2": log2}
    got = attend(
        torch.ones(1, 1, s, 4),
        k,
        even.reshape(1, 1, s, 1),
        settings,
        dtype,
        attn_scale=attn_scale,
        use_causal_mask=True,
    )["o"].flatten()
    ones = even.cumsum(0)
    weight = exp(4 * (1.0 if attn_scale is None else attn_scale))
    want = ones * weight / (ones * weight + torch.arange(1, s + 1) - ones)
    # The scaled Q is rounded to the io type; the logit is at most 4.
    assert_within(got, want, 4 * torch.finfo(dtype).eps, f"attn_scale={attn_scale}")


@EVERYWHERE
@ON_BOTH
@pytest.mark.parametrize("attn_scale", [-0.5, 0.0, None, 1.0])
def test_gradients_are_those_of_the_unscaled_inputs(fold, log2, engine, attn_scale):
    case = Case(attn_scale=attn_scale, right=0)
    given = data(case)
    got = run(case, given, fold=fold, fold_log2=log2, engines=engine)
    for name, want in expected(case, given).items():
        assert_within(got[name], want, relative(want, 1e-11) + 1e-15, name)
    if attn_scale == 0.0:
        assert not got["dq"].any()
        assert not got["dk"].any()


@EVERYWHERE
@ON_BOTH
def test_stats_of_one_engine_feed_the_backward_of_the_other(fold, log2, engine):
    other = next(e for e in ENGINES if e != engine)
    case = Case(attn_scale=0.3, sink=True, right=0)
    given = data(case)
    settings = {"fold": fold, "fold_log2": log2}
    here, there = (forward(case, given, **settings, engines=e) for e in (engine, other))
    for g in (here, there):
        backward = g.backward_graph(["o"], ["q", "k", "v", "sink"])
    got = execute(here, given)
    got |= execute(backward, {**given, **got})
    for name, want in expected(case, given).items():
        assert_within(got[name], want, relative(want, 1e-11), name)
