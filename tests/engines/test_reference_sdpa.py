"""Attention of the reference engine against values worked out by hand."""

from math import exp, inf, log, nan

import pytest
import torch
from torch import Tensor

from ropegraph.ir.ops import (
    Sdpa,
    SdpaBackward,
)
from ropegraph.ir.score_mod import Instruction, Port, Ref, ScoreProgram, softcap
from ropegraph.testing import oracle
from ropegraph.testing.inputs import normal
from tests.engines.rows import F64, attend, check, column, forward_results, row, uniform
from tests.engines.steps import run


@pytest.mark.parametrize(
    ("scale", "want"), [(0.5, 0.88080), (1.0, 0.98201), (0.0, 0.5), (-0.5, 0.11920)]
)
@pytest.mark.parametrize("on_host", [True, False])
def test_scale_is_applied_once(scale, want, on_host):
    q, k = row(1, 1, 1, 1), torch.stack([torch.ones(4), torch.zeros(4)]).double()[None, None]
    attrs = Sdpa(attn_scale=scale if on_host else None)
    others = {} if on_host else {"attn_scale": torch.full((1, 1, 1, 1), scale)}
    out = attend(attrs, q, k, column(1, 0), **others)
    check(out["O"], [want], 1e-5)
    check(out["Stats"], [log(exp(4 * scale) + 1)])


@pytest.mark.parametrize("is_log2", [False, True])
def test_bias_is_natural_and_not_scaled(is_log2):
    attrs = Sdpa(attn_scale=0.5, softmax_input_is_log2=is_log2)
    zero = torch.zeros(1, 1, 1, 2, dtype=F64)
    keys = torch.zeros(1, 1, 2, 2, dtype=F64)
    bias = torch.tensor([0, log(3)], dtype=F64).reshape(1, 1, 1, 2)
    out = attend(attrs, zero, keys, column(0, 1), bias=bias)
    check(out["O"], [0.75])
    check(out["Stats"], [log(4)])


def test_log2_means_base_two_of_the_product_alone():
    q, k = row(1, 1), torch.tensor([[1.0, 1.0], [0, 0]], dtype=F64)[None, None]
    out = attend(Sdpa(softmax_input_is_log2=True), q, k, column(1, 0))
    check(out["O"], [4 / 5])
    check(out["Stats"], [log(5)])


def test_causal_corner():
    top, bottom = Sdpa(right_bound=0), Sdpa(right_bound=0, bottom_right=True)
    check(uniform(1, 4, bottom), [2.5])
    check(uniform(2, 4, bottom), [2.0, 2.5])
    check(uniform(4, 2, bottom), [0, 0, 1, 1.5])
    check(uniform(1, 4, top), [1])
    check(uniform(2, 4, top), [1, 1.5])
    check(uniform(4, 2, top), [1, 1.5, 1.5, 1.5])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_causal_corner_moves_with_the_lengths(dtype):
    lengths = {
        "seq_len_q": torch.ones(2, 1, 1, 1, dtype=dtype),
        "seq_len_kv": torch.tensor([4, 2], dtype=dtype).reshape(2, 1, 1, 1),
    }
    attrs = Sdpa(right_bound=0, bottom_right=True, padding=True)
    check(uniform(1, 4, attrs, b=2, **lengths), [2.5, 1.5])


def test_band():
    check(uniform(4, 4, Sdpa(left_bound=2, right_bound=0)), [1, 1.5, 2.5, 3.5])
    check(uniform(4, 4, Sdpa(left_bound=1, right_bound=1)), [1.5, 2.5, 3.5, 4])
    check(uniform(2, 4, Sdpa(left_bound=2, bottom_right=True)), [3, 3.5])


def test_fully_masked_rows():
    attrs = Sdpa(right_bound=0, bottom_right=True)
    zero, keys = torch.zeros(1, 1, 3, 2, dtype=F64), torch.zeros(1, 1, 2, 2, dtype=F64)
    out = attend(attrs, zero, keys, column(5, 6))
    check(out["O"], [0, 5, 5.5])
    check(out["Stats"], [-inf, 0, log(2)])
    sink = torch.full((1, 1, 1, 1), 0.25, dtype=F64)
    out = attend(attrs, zero, keys, column(5, 6), sink_token=sink)
    check(out["Stats"], [0.25, log(1 + exp(0.25)), log(2 + exp(0.25))])
    check(out["O"][0, 0, 0], [0])


def test_a_bias_of_minus_infinity_masks():
    bias = torch.tensor([0, -inf, 0, -inf, -inf, -inf], dtype=F64).reshape(1, 1, 2, 3)
    zero, keys = torch.zeros(1, 1, 2, 2, dtype=F64), torch.zeros(1, 1, 3, 2, dtype=F64)
    out = attend(Sdpa(), zero, keys, column(1, nan, 3), bias=bias)
    check(out["O"], [2, 0])
    check(out["Stats"], [log(2), -inf])


def test_sink_joins_the_denominator_unscaled():
    q, k = row(1, 1), torch.tensor([[1.0, 1.0], [0, 0]], dtype=F64)[None, None]
    sink = torch.full((1, 1, 1, 1), 2.0, dtype=F64)
    out = attend(Sdpa(attn_scale=0.5), q, k, column(1, 0), sink_token=sink)
    total = exp(1) + 1 + exp(2)
    check(out["O"], [exp(1) / total])
    check(out["Stats"], [log(total)])


def test_alibi_slopes_and_distance():
    h, s = 3, 4
    q, k = torch.zeros(1, h, s, 2, dtype=F64), torch.zeros(1, 1, s, 2, dtype=F64)
    v = normal((1, 1, s, 5), F64)
    got = attend(Sdpa(alibi=True, right_bound=0), q, k, v)
    term = torch.empty(1, h, s, s, dtype=F64)
    for n, slope in enumerate((2.0**-4, 2.0**-8, 2.0**-2)):
        for i in range(s):
            for j in range(s):
                term[0, n, i, j] = slope * (j - i)
    want = oracle.attention(q, k, v, bias=term, keep=oracle.band(s, s, right=0))
    torch.testing.assert_close((got["O"], got["Stats"]), want)
    torch.testing.assert_close(oracle.alibi(h, s, s), term)


def test_softcap():
    q, k = row(1, 1), torch.tensor([[1.0, 1.0], [0, 0]], dtype=F64)[None, None]
    out = attend(Sdpa(attn_scale=3.0, score_mod=softcap(2.0)), q, k, column(1, 0))
    capped = 2 * torch.tanh(torch.tensor(3.0, dtype=F64))
    check(out["Stats"], [float(torch.log(torch.exp(capped) + 1))])


def test_a_program_with_indices_a_selection_and_a_tensor():
    # scores where (row - column) mod 2 == 0, else the port
    program = ScoreProgram(
        (
            Instruction("gen_index", (), axis=2),
            Instruction("gen_index", (), axis=3),
            Instruction("sub", (Ref(0), Ref(1))),
            Instruction("abs", (Ref(2),)),
            Instruction("mod", (Ref(3), 2.0)),
            Instruction("cmp_eq", (Ref(4), 0.0)),
            Instruction("binary_select", (Ref(-1), Port("other"), Ref(5))),
        ),
        Ref(6),
    )
    q, k, v = (normal((1, 2, 5, 3), F64, seed=n) for n in range(3))
    other = torch.full((1, 1, 1, 1), -1.5, dtype=F64)
    got = attend(Sdpa(0.7, score_mod=program), q, k, v, other=other)
    i = torch.arange(5)
    even = (i[:, None] - i[None]) % 2 == 0
    want = oracle.attention(q, k, v, attn_scale=0.7, score_mod=lambda x: torch.where(even, x, -1.5))
    torch.testing.assert_close((got["O"], got["Stats"]), want)


def test_dropout_keeps_whole_weights_and_repeats():
    # One key, v = 1: every row is 0 or 1 / (1 - p), and with dO = 1 dV is the sum of the rows.
    b, h, s, d_v = 2, 3, 64, 8
    q, k = torch.zeros(b, h, s, 2, dtype=F64), torch.zeros(b, h, 1, 2, dtype=F64)
    v = torch.ones(b, h, 1, d_v, dtype=F64)

    def number(value: int) -> Tensor:
        return torch.full((1, 1, 1, 1), value, dtype=torch.int64)

    def once(seed: int, offset: int) -> Tensor:
        state = {"seed": number(seed), "offset": number(offset)}
        return attend(Sdpa(dropout_p=0.5), q, k, v, **state)["O"]

    o = once(7, 0)
    assert set(o.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(o, o[..., :1].expand_as(o))
    assert torch.equal(once(7, 0), o)
    for seed, offset in ((7, 1), (8, 0), (7, 2**32), (7 + 2**32, 0)):
        assert not torch.equal(once(seed, offset), o)
    others = {"seed": number(7), "offset": number(0), "dO": torch.ones_like(o)}
    inputs = {"q": q, "k": k, "v": v, **forward_results(q, k, v), **others}
    d_v = run(SdpaBackward(dropout_p=0.5), inputs, ["dV"])["dV"]
    assert torch.equal(d_v, o.sum(dim=2, keepdim=True))
