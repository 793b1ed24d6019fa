"""The fold table: what each setting records, and that no setting changes a result."""

from dataclasses import replace
from math import log, sqrt

import pytest
import torch

import ropegraph
from ropegraph.testing.budget import assert_within, relative, rounding
from tests.numerics.attention import (
    FOLDS,
    Case,
    attention,
    data,
    execute,
    expected,
    forward,
    run,
    scales,
)

INV_LN2 = 1 / log(2)
ENGINES = ("torch", "reference")

# Head widths with their rotated width, and the scales that folding moves.
WIDTHS = ((64, 0), (96, 64), (192, 64))
SCALES = (0.3, None)

EXTRAS = {
    "plain": {},
    "causal": {"right": 0},
    "bias": {"bias": (1, 6, 5, 7)},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": True},
    "everything": {
        "bias": (2, 1, 5, 7),
        "softcap": 2.0,
        "sink": True,
        "alibi": True,
        "right": 1,
        "left": 4,
        "lengths": ((5, 3), (4, 7)),
    },
}


def case_of(width: tuple[int, int], scale: float | None, extra: str = "plain") -> Case:
    d, r = width
    attn_scale = 1 / sqrt(d) if scale is None else scale
    return Case(d_qk=d, r=r, attn_scale=attn_scale, **EXTRAS[extra])


def table_row(fold: str, log2: bool, a: float) -> tuple[float, float, float, bool]:
    """The row of the fold table: rope_q, rope_k, attn_scale, softmax_input_is_log2."""
    k2 = INV_LN2 if log2 else 1.0
    if fold == "off":
        return 1.0, 1.0, a, False
    if fold == "symmetric":
        return k2 * sqrt(a), sqrt(a), 1.0, log2
    return k2 * a, 1.0, 1.0, log2


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("extra", ["plain", "everything"])
def test_scales_are_those_of_the_table(fold, log2, width, scale, extra):
    case = case_of(width, scale, extra)
    case = replace(case, q_scale=1.5, k_scale=-0.7)
    g = forward(case, data(case), fold=fold, fold_log2=log2)
    backward = g.backward_graph(["o"], ["q", "k", "v"])
    q, k, attn_scale, is_log2 = table_row(fold, log2, case.attn_scale)
    want = {"rope_q": 1.5 * q, "rope_k": -0.7 * k}
    got = scales(g)
    assert got.pop("attn") == (pytest.approx(attn_scale, rel=1e-15), is_log2)
    assert got == pytest.approx(want, rel=1e-15)
    got = scales(backward)
    assert got.pop("attn_backward") == (pytest.approx(attn_scale, rel=1e-15), is_log2)
    assert got == pytest.approx({f"{n}_backward": x for n, x in want.items()}, rel=1e-15)
    assert len(g.plan.steps) == 2
    assert len(backward.plan.steps) == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_fold_equals_the_unfused_run(engine, extra, width, scale):
    case = case_of(width, scale, extra)
    given = data(case)
    unfused = run(case, given, fold="off", engines=engine)
    for name, want in expected(case, given).items():
        assert_within(unfused[name], want, relative(want, 1e-12), f"{name}, off against fp64")
    for fold, log2 in FOLDS[1:]:
        folded = run(case, given, fold=fold, fold_log2=log2, engines=engine)
        for name in ("o", "stats", *(n for n in unfused if n.startswith("d"))):
            limit = relative(unfused[name], 1e-12)
            assert_within(folded[name], unfused[name], limit, f"{name}, fold={fold} log2={log2}")


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("is_folded", [False, True])
def test_a_hand_made_backward_follows_the_contract(fold, log2, is_folded):
    case = replace(case_of((96, 64), 0.3, "everything"), q_scale=1.5, k_scale=0.7)
    given = data(case)
    unfused = run(case, given, fold="off")
    g = forward(case, given, fold=fold, fold_log2=log2)
    for name in ("q_rot", "k_rot"):
        g.find_tensor(name).set_saved(True)
    results = execute(g, given)
    q, k, attn_scale, is_log2 = table_row(fold, log2, 0.3) if is_folded else (1.0, 1.0, 0.3, False)
    backward = ropegraph.pygraph(io_data_type=case.dtype, fold_contract=g.fold_contract)
    names = ("q_rot", "k_rot", "v", "o", "do", "stats", "freqs", "bias", "sink", "len_q", "len_kv")
    t = {n: backward.tensor_like(x, name=n) for n, x in (given | results).items() if n in names}
    keywords = attention(case, t) | {"attn_scale": attn_scale, "softmax_input_is_log2": is_log2}
    dq_rot, dk_rot, dv = backward.sdpa_backward(
        t["q_rot"], t["k_rot"], t["v"], t["o"], t["do"], t["stats"], name="attn", **keywords
    )
    dq = backward.rope_backward(dq_rot, t["freqs"], 1.5 * q, 64, name="rope_q")
    dk = backward.rope_backward(dk_rot, t["freqs"], 0.7 * k, 64, name="rope_k")
    for tensor, name in ((dq, "dq"), (dk, "dk"), (dv, "dv")):
        tensor.set_output(True).set_name(name)
    got = execute(backward, given | results)
    for name, grad in got.items():
        assert_within(grad, unfused[name], relative(unfused[name], 1e-12), name)
    assert len(backward.plan.steps) == 2


@pytest.mark.parametrize("changed", ["attn_scale", "rope_q", "rope_k", "log2", "right", "softcap"])
def test_a_backward_that_disagrees_is_refused(changed):
    case = case_of((64, 0), 0.3, "plain")
    given = data(case)
    g = forward(case, given, fold="q", fold_log2=True)
    backward = ropegraph.pygraph(io_data_type=case.dtype, fold_contract=g.fold_contract)
    t = {n: backward.tensor_like(given[n], name=n) for n in ("q", "k", "v", "freqs", "do")}
    o = backward.tensor_like(given["do"], name="o")
    stats = backward.tensor((2, 6, 5, 1), name="stats")
    keywords = {
        "attn_scale": 0.3,
        "softmax_input_is_log2": changed == "log2",
        "diagonal_band_right_bound": 0 if changed == "right" else None,
        "softcap": 2.0 if changed == "softcap" else None,
    }
    if changed == "attn_scale":
        keywords["attn_scale"] = 0.3 * (1 + 1e-10)
    dq, dk, _ = backward.sdpa_backward(
        t["q"], t["k"], t["v"], o, t["do"], stats, name="attn", **keywords
    )
    backward.rope_backward(dq, t["freqs"], 1.01 if changed == "rope_q" else 1.0).set_output(True)
    backward.rope_backward(dk, t["freqs"], 1.01 if changed == "rope_k" else 1.0).set_output(True)
    with pytest.raises(ropegraph.FoldContractError, match="attn"):
        backward.build()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("extra", ["causal", "everything"])
@pytest.mark.parametrize("width", WIDTHS)
def test_rounding_stays_within_twice_that_of_the_unfused_run(dtype, extra, width):
    """Unfused, position 0 and the channels that pass through are exact; folded, they round once."""
    case = replace(case_of(width, None, extra), dtype=dtype, s_q=33, s_kv=37, d_v=64)
    if case.bias is not None:
        case = replace(case, bias=(2, 1, 33, 37), lengths=((33, 21), (30, 37)))
    given = data(case)
    exact = expected(case, given)
    unfused = run(case, given, fold="off")
    for fold, log2 in FOLDS[1:]:
        folded = run(case, given, fold=fold, fold_log2=log2)
        for name, want in exact.items():
            one = rms(rounding(want, dtype))
            error, allowed = (rms(x[name].double() - want) for x in (folded, unfused))
            assert error <= 2 * (allowed + one), f"{name}, fold={fold} log2={log2}"


def rms(x: torch.Tensor) -> float:
    """The root of the mean square: unlike the largest of few errors, it does not depend on luck."""
    return float(torch.where(torch.isfinite(x), x, 0.0).square().mean().sqrt())
