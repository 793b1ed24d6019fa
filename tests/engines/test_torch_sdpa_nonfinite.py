"""NaN and Inf in sdpa in torch: a struck-out slot never passes one on, a seen slot always does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.ir.score_mod import Instruction, Ref, ScoreProgram, softcap
from ropegraph.testing.budget import assert_within, relative
from tests.engines.sdpa_cases import Case, backward, expected, forward

NAN, INF = float("nan"), float("inf")
CAUSAL = {"right_bound": 0}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def run_both(case: Case, inputs: dict[str, Tensor], d_o: Tensor) -> dict[str, Tensor]:
    got = forward(case, inputs)
    return got | backward(case, inputs, got["O"], got["Stats"], d_o)


BANDS: dict[str, Case] = {
    # Under each of them no row sees key 8.
    "causal": Case(attrs=CAUSAL),
    "causal, widths differ": Case(attrs=CAUSAL, d_v=3),
    "causal, groups": Case(attrs=CAUSAL, h_q=6, h_k=2, h_v=3),
    "window": Case(attrs={"left_bound": 3, "right_bound": 1}),
    "sink": Case(attrs=CAUSAL, sink=True),
    "softcap": Case(
        attrs=CAUSAL, score_mod=softcap(0.7), score_fn=lambda s: 0.7 * torch.tanh(s / 0.7)
    ),
    "alibi": Case(attrs={**CAUSAL, "alibi": True}),
    "bias": Case(attrs=CAUSAL, bias=(1, 4, 7, 9)),
    "padding": Case(len_q=[7, 5], len_kv=[8, 6]),
    "padding, bottom right": Case(
        len_q=[7, 5], len_kv=[8, 6], attrs={**CAUSAL, "bottom_right": True}
    ),
}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_keys_that_nobody_sees(name: str, dtype: torch.dtype, bad: float) -> None:
    case = replace(BANDS[name], dtype=dtype)
    clean, d_o = case.inputs(), case.d_o()
    want = run_both(case, clean, d_o)
    for ports in ("k", "v", "kv"):
        given = {p: x.clone() for p, x in clean.items()}
        for port in ports:
            given[port][:, :, 8:] = bad
        got = run_both(case, given, d_o)
        for port, value in want.items():
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
            size = max(1.0, relative(value, 1.0))
            assert_within(got[port], value, tolerance * size, f"{ports} {port}")


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "bias", "sink"])
def test_rows_that_see_nothing_of_a_key(name: str, bad: float) -> None:
    """NaN in q and dO of row 0 reaches what row 0 sees, and no other row of dK and dV."""
    case = BANDS[name]
    clean, d_o = case.inputs(), case.d_o()
    want = run_both(case, clean, d_o)
    given = {p: x.clone() for p, x in clean.items()}
    given["q"][:, :, 0] = bad
    spoilt = d_o.clone()
    spoilt[:, :, 0] = bad
    got = run_both(case, given, spoilt)
    seen = case.visible()[0, 0, 0]
    for port in ("dK", "dV"):
        assert_within(got[port][:, :, ~seen], want[port][:, :, ~seen], 1e-12, port)
        assert bool(got[port][:, :, seen].isnan().any())
    assert_within(got["O"][:, :, 1:], want["O"][:, :, 1:], 1e-12)
    assert_within(got["dQ"][:, :, 1:], want["dQ"][:, :, 1:], 1e-12)
    if bad is NAN:  # Inf may also make every logit -Inf, and then the row sees nothing
        assert bool(got["O"][:, :, 0].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_seen_nan_arrives(dtype: torch.dtype) -> None:
    for attrs in ({}, CAUSAL, {"left_bound": 3, "right_bound": 0}):
        case = Case(attrs=attrs, s_q=9, dtype=dtype, h_q=2)
        given, d_o = case.inputs(), case.d_o()
        given["v"][0, 0, 4, 1] = NAN
        got = run_both(case, given, d_o)
        seen = case.visible()[0, 0, :, 4]
        assert bool(got["O"][0, 0, seen, 1].isnan().all())
        assert not got["O"][0, 0, ~seen].isnan().any()
        assert not got["O"][0, 0, :, 2].isnan().any()
        assert not got["O"][:, 1].isnan().any()


def test_infinite_values_keep_their_sign() -> None:
    case = Case(b=1, h_q=1, h_k=1, h_v=1, s_q=9, s_kv=9, attrs=CAUSAL)
    given = case.inputs()
    given["v"][0, 0, 3] = torch.tensor([INF, -INF, NAN, INF, 1.0])
    given["v"][0, 0, 5] = torch.tensor([INF, INF, 1.0, 1.0, -INF])
    o = forward(case, given)["O"][0, 0]
    assert bool(o[:3].isfinite().all())
    for row in (3, 4):
        assert o[row, 0] == INF
        assert o[row, 1] == -INF
        assert o[row, 2].isnan()
        assert bool(o[row, 4].isfinite())
    for row in range(5, 9):
        assert o[row, 0] == INF
        assert o[row, 1].isnan()
        assert o[row, 3] == INF
        assert o[row, 4] == -INF


def test_bias_of_minus_infinity_strikes_out() -> None:
    for dtype in DTYPES:
        case = Case(bias=(1, 1, 7, 9), dtype=dtype)
        clean, d_o = case.inputs(), case.d_o()
        clean["bias"][..., 6:] = -INF
        clean["bias"][0, 0, 2] = -INF
        want = run_both(case, clean, d_o)
        assert not want["O"][:, :, 2].any()
        assert bool((want["Stats"][:, :, 2] == -INF).all())
        assert not any(x.isnan().any() for x in want.values())
        given = {p: x.clone() for p, x in clean.items()}
        given["k"][:, :, 6:] = NAN
        given["v"][:, :, 6:] = NAN
        got = run_both(case, given, d_o)
        for port, value in want.items():
            assert_within(got[port], value, 1e-5, port)


def test_score_mod_that_strikes_out() -> None:
    """binary_select with -Inf where the row is odd or the column above 6."""
    program = ScoreProgram(
        (
            Instruction("gen_index", (), 2),
            Instruction("mod", (Ref(0), 2.0)),
            Instruction("gen_index", (), 3),
            Instruction("cmp_gt", (Ref(2), 6.0)),
            Instruction("logical_or", (Ref(1), Ref(3))),
            Instruction("tanh", (Ref(-1),)),
            Instruction("binary_select", (-INF, Ref(5), Ref(4))),
        ),
        Ref(6),
    )

    def fn(scores: Tensor) -> Tensor:
        odd = (torch.arange(scores.shape[2]) % 2 == 1)[:, None]
        return torch.where(odd | (torch.arange(scores.shape[3]) > 6), -INF, scores.tanh())

    case = Case(score_mod=program, score_fn=fn)
    clean, d_o = case.inputs(), case.d_o()
    want = expected(case, clean, d_o)
    given = {p: x.clone() for p, x in clean.items()}
    for inputs in (clean, given):
        got = run_both(case, inputs, d_o)
        for port, value in want.items():
            assert_within(got[port], value.nan_to_num(0, -INF, -INF), 1e-12, port)
        given["k"][:, :, 7:] = NAN
        given["v"][:, :, 7:] = INF


@pytest.mark.parametrize("sink", [False, True])
def test_rows_that_see_nothing(sink: bool) -> None:
    case = Case(s_q=9, s_kv=4, sink=sink, attrs={"right_bound": 0, "bottom_right": True})
    inputs, d_o = case.inputs(), case.d_o()
    inputs["q"][:, :, :5] = NAN
    d_o[:, :, :5] = NAN
    got = run_both(case, inputs, d_o)
    assert not got["O"][:, :, :5].any()
    assert not got["dQ"][:, :, :5].any()
    lse = inputs["sink_token"].view(1, 4, 1) if sink else torch.tensor(-INF)
    torch.testing.assert_close(got["Stats"][:, :, :5, 0], lse.double().expand(2, 4, 5))
    assert not any(x.isnan().any() for x in got.values())


def test_backward_takes_infinite_stats_of_either_sign() -> None:
    """Another engine may hand over +Inf for a row that sees nothing."""
    for case in (Case(), Case(attrs=CAUSAL), Case(attrs={"left_bound": 2}), Case(h_q=2)):
        for value in (INF, -INF):
            inputs, d_o = case.inputs(), case.d_o()
            got = forward(case, inputs)
            got["Stats"][:, :, 3] = value
            grads = backward(case, inputs, got["O"], got["Stats"], d_o)
            assert not grads["dQ"][:, :, 3].any()
            d_o[:, :, 3] = 0
            want = backward(case, inputs, got["O"], forward(case, inputs)["Stats"], d_o)
            for port in ("dK", "dV"):
                assert_within(grads[port], want[port], 1e-12, port)


def test_large_finite_outputs_are_not_taken_for_a_leak() -> None:
    """Their sum overflows, so row blocks run as well; the numbers are the same."""
    case = Case(dtype=torch.float32, attrs=CAUSAL, h_q=2)
    inputs: dict[str, Any] = case.inputs()
    inputs["v"] = torch.full_like(inputs["v"], 1e37)
    got = forward(case, inputs)["O"]
    torch.testing.assert_close(got, torch.full_like(got, 1e37), rtol=1e-5, atol=0)
