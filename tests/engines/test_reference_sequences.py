"""Where the rows of attention lie, for the reference engine: strides, padding, pages, ragged."""

from dataclasses import replace
from math import inf, nan, sqrt

import pytest
import torch
from torch import Tensor

from ropegraph.ir.ops import (
    Sdpa,
    SdpaBackward,
)
from ropegraph.testing import oracle
from ropegraph.testing.inputs import LAYOUTS, normal, packed, poisoned
from tests.engines.rows import F64, attend, forward_results
from tests.engines.steps import Ragged, run


def test_padding_never_leaks():
    b, h, s, d = 2, 2, 5, 3
    q, k, v = (normal((b, h, s, d), F64, seed=n) for n in range(3))
    len_q, len_kv = (2, 0), (3, 4)
    clean = [x.clone() for x in (q, k, v)]
    for x, lengths in ((q, len_q), (k, len_kv), (v, len_kv)):
        for i, n in enumerate(lengths):
            x[i, :, n:] = nan
    lengths = {
        "seq_len_q": torch.tensor(len_q).reshape(b, 1, 1, 1),
        "seq_len_kv": torch.tensor(len_kv).reshape(b, 1, 1, 1),
    }
    got = attend(Sdpa(padding=True), q, k, v, **lengths)
    keep = oracle.band(s, s, len_q=len_q, len_kv=len_kv)
    o, stats = oracle.attention(*clean, keep=keep)
    torch.testing.assert_close((got["O"], got["Stats"]), (o, stats))
    assert not got["O"][1].any()


def test_nan_reaches_only_the_rows_that_see_it():
    q, k, v = (normal((1, 1, 4, 3), F64, seed=n) for n in range(3))
    k[0, 0, 2, 1] = nan
    v[0, 0, 3, 0] = inf
    out = attend(Sdpa(right_bound=0), q, k, v)["O"]
    clean = attend(Sdpa(right_bound=0), q.nan_to_num(), k.nan_to_num(), v.nan_to_num())["O"]
    assert torch.equal(out[0, 0, :2], clean[0, 0, :2])
    assert out[0, 0, 2:].isnan().all()
    grads = run(
        SdpaBackward(right_bound=0),
        {"q": q, "k": k, "v": v, **forward_results(q, k, v), "dO": torch.ones_like(q)},
        ["dQ"],
    )["dQ"]
    assert torch.isfinite(grads[0, 0, :2]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_heads_and_strides(layout):
    b, h_q, s_q, s_kv, d_qk, d_v = 2, 6, 4, 5, 6, 3
    q = normal((b, h_q, s_q, d_qk), F64, layout, seed=1)
    k = normal((b, 2, s_kv, d_qk), F64, layout, seed=2)
    v = normal((b, 3, s_kv, d_v), F64, layout, seed=3)
    out = {
        "O": poisoned((b, h_q, s_q, d_v), F64, "gapped"),
        "Stats": poisoned((b, h_q, s_q, 1), F64, "bshd"),
    }
    got = run(Sdpa(sqrt(1 / d_qk)), {"q": q, "k": k, "v": v}, out)
    want = oracle.attention(q, k, v, attn_scale=sqrt(1 / d_qk))
    torch.testing.assert_close((got["O"], got["Stats"]), want)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_do(sizes):
    b, h, s_q, s_kv = sizes
    q = torch.ones(b, h, s_q, 2, dtype=F64)
    k = torch.ones(b, h, s_kv, 2, dtype=F64)
    out = attend(Sdpa(), q, k, k)
    assert out["O"].shape == (b, h, s_q, 2)
    assert not out["O"].any()
    if s_kv == 0:
        assert (out["Stats"] == -inf).all()


def test_pages():
    b, h, s, d, page = 2, 2, 7, 3, 2
    q = normal((b, h, 1, d), F64, seed=1)
    dense = [normal((b, h, s, d), F64, seed=n) for n in (2, 3)]
    lengths = (7, 3)
    inputs: dict[str, Tensor] = {"q": q}
    for port, x, order in zip("kv", dense, ((3, 0, 6, 1, 2, 5), (4, 1, 0, 7, 5, 3)), strict=True):
        pool = torch.full((8, h, page, d), nan, dtype=F64)
        entries = torch.full((b, 4), -7, dtype=torch.int32)
        used = iter(order)
        for i, n in enumerate(lengths):
            for slot in range(-(-n // page)):
                entries[i, slot] = where = next(used)
                rows = x[i, :, slot * page : min(n, (slot + 1) * page)]
                pool[where, :, : rows.shape[1]] = rows
        inputs[port] = pool
        inputs[f"paged_attention_{port}_table"] = entries.reshape(b, 1, 4, 1)
    inputs["seq_len_q"] = torch.ones(b, 1, 1, 1, dtype=torch.int32)
    inputs["seq_len_kv"] = torch.tensor(lengths).reshape(b, 1, 1, 1)
    got = run(Sdpa(0.5, padding=True, max_seq_len_kv=s), inputs, ["O"])["O"]
    keep = oracle.band(1, s, len_q=(1, 1), len_kv=lengths)
    want, _ = oracle.attention(q, *dense, attn_scale=0.5, keep=keep)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("states_lengths", [True, False])
def test_ragged_equals_each_sequence_alone(states_lengths):
    h, d, len_q, len_kv = 2, 3, (1, 0, 3), (4, 2, 5)
    b, s_q, s_kv = 3, 3, 5
    qs, ks, vs = (
        [normal((h, n, d), F64, seed=10 * m + n) for n in lengths]
        for m, lengths in enumerate((len_q, len_kv, len_kv))
    )

    def ragged(rows: list[Tensor], s: int) -> Ragged:
        lengths = [x.shape[1] for x in rows]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        buffer = packed(rows, int(ends[-1]) + 2)
        return Ragged(buffer, (b, h, s, d), (s * h * d, d, h * d, 1), ends * h * d)

    q, k, v = ragged(qs, s_q), ragged(ks, s_kv), ragged(vs, s_kv)
    lengths = {
        "seq_len_q": torch.tensor(len_q).reshape(b, 1, 1, 1),
        "seq_len_kv": torch.tensor(len_kv).reshape(b, 1, 1, 1),
    }
    stats = Ragged(poisoned((6, h, 1), F64), (b, h, s_q, 1), (s_q * h, 1, h, 1), q.offsets // d)
    outputs = {"O": replace(q, buffer=poisoned((6, h, d), F64)), "Stats": stats}
    common = {
        "attn_scale": 0.5,
        "right_bound": 0,
        "bottom_right": True,
        "padding": states_lengths,
    }
    inputs = {"q": q, "k": k, "v": v, **(lengths if states_lengths else {})}
    got = run(Sdpa(**common), inputs, outputs)
    d_o = normal((6, h, d), F64, seed=99)
    grads = run(
        SdpaBackward(**common),
        {
            **inputs,
            "o": replace(q, buffer=got["O"]),
            "dO": replace(q, buffer=d_o),
            "stats": stats,
        },
        {
            "dQ": replace(q, buffer=poisoned((6, h, d), F64)),
            "dK": replace(k, buffer=poisoned((13, h, d), F64)),
            "dV": replace(v, buffer=poisoned((13, h, d), F64)),
        },
    )
    at_q = at_k = 0
    for i in range(b):
        m, n = len_q[i], len_kv[i]
        leaves = [oracle.leaf(x[i][None]) for x in (qs, ks, vs)]
        keep = oracle.band(m, n, right=0, bottom_right=True)
        o, lse = oracle.attention(*leaves, attn_scale=0.5, keep=keep)
        here = slice(at_q, at_q + m)
        torch.testing.assert_close(got["O"][here], o[0].transpose(0, 1).detach())
        torch.testing.assert_close(got["Stats"][here], lse[0].transpose(0, 1).detach())
        want = oracle.gradients(o, leaves, d_o[here].transpose(0, 1)[None])
        for port, grad, at, rows in zip(
            ("dQ", "dK", "dV"), want, (at_q, at_k, at_k), (m, n, n), strict=True
        ):
            torch.testing.assert_close(grads[port][at : at + rows], grad[0].transpose(0, 1))
        at_q, at_k = at_q + m, at_k + n
    assert not got["O"][4:].any()
    assert (got["Stats"][4:] == -inf).all()
    assert not any(grads[p][at:].any() for p, at in (("dQ", 4), ("dK", 11), ("dV", 11)))
