"""Ragged (THD) and paged sdpa in torch: each sequence as if it were alone, dead rows written."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.errors import PositionError
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.testing.budget import assert_within
from ropegraph.testing.inputs import poisoned
from tests.engines.sdpa_cases import Case, expected
from tests.engines.steps import Ragged, run

F64 = torch.float64
INF = float("inf")
OVER_KEYS = ("k", "v", "dK", "dV")


class Layout:
    """Packs [b, h, s, d] into buffers [t, h, d] with sequence i from row starts[i] on."""

    def __init__(
        self, starts: Sequence[int], total: int, index: torch.dtype = torch.int32, slots: int = 1
    ) -> None:
        self.starts, self.total, self.index, self.slots = starts, total, index, slots

    def buffer(self, h: int, d: int, dtype: torch.dtype) -> Tensor:
        """NaN rows; with ``slots`` others of its kind side by side, as in a packed qkv."""
        return poisoned((self.total, self.slots, h, d), dtype, stride=None)[:, -1]

    def ragged(self, x: Tensor, buffer: Tensor) -> Ragged:
        b, h, s, d = x.shape
        row = buffer.stride(0)
        multiplier = 1 if row % (h * d) or row == 0 else h * d
        offsets = torch.tensor([start * row // multiplier for start in self.starts])
        offsets = offsets.to(self.index).view(-1, 1, 1, 1)
        stride = (s * row, d, row, 1)
        return Ragged(buffer, (b, h, s, d), stride, offsets, multiplier)

    def pack(self, x: Tensor, lengths: Sequence[int]) -> Ragged:
        buffer = self.buffer(x.shape[1], x.shape[3], x.dtype)
        for i, n in enumerate(lengths):
            buffer[self.starts[i] : self.starts[i] + n] = x[i, :, :n].transpose(0, 1)
        return self.ragged(x, buffer)

    def blank(self, dim: Sequence[int], dtype: torch.dtype) -> Ragged:
        x = torch.empty(0, dtype=dtype).new_empty(tuple(dim))
        return self.ragged(x, self.buffer(dim[1], dim[3], dtype))

    def check(
        self, got: Tensor, want: Tensor, lengths: Sequence[int], port: str, dead: float = 0.0
    ) -> None:
        """Every row of the buffer: those of sequences as wanted, the others ``dead``."""
        rows = torch.full(got.shape, dead, dtype=F64)
        for i, n in enumerate(lengths):
            rows[self.starts[i] : self.starts[i] + n] = want[i, :, :n].transpose(0, 1)
        assert_within(got, rows, 1e-12, port)


def run_ragged(case: Case, over: Mapping[str, Layout | None]) -> None:
    """Forward and backward with every port laid out by ``over``: "q" and "kv", or a port's own."""
    assert case.len_q is not None
    assert case.len_kv is not None
    dense, d_o = case.inputs(), case.d_o()
    want = expected(case, dense, d_o)

    def layout(port: str) -> Layout | None:
        return over.get(port, over["kv" if port in OVER_KEYS else "q"])

    def lengths(port: str) -> Sequence[int]:
        found = case.len_kv if port in OVER_KEYS else case.len_q
        assert found is not None
        return found

    def given(port: str, x: Tensor) -> Tensor | Ragged:
        how = layout(port)
        return x if how is None else how.pack(x, lengths(port))

    def blank(port: str) -> Tensor | Ragged:
        how, dim = layout(port), want[port].shape
        return poisoned(dim, case.dtype) if how is None else how.blank(dim, case.dtype)

    def check(got: dict[str, Tensor]) -> None:
        for port, value in got.items():
            how = layout(port)
            if how is None or port in ("dBias", "dSink_token"):
                assert_within(value, want[port], 1e-12, port)
            else:
                dead = -INF if port == "Stats" else 0.0
                how.check(value, want[port], lengths(port), port, dead)

    others = {p: x for p, x in dense.items() if p not in "qkv"}
    inputs = {p: given(p, dense[p]) for p in "qkv"} | others
    got = run(Sdpa(**case.op()), inputs, {p: blank(p) for p in ("O", "Stats")}, TorchExecutor())
    check(got)
    extra = {
        "o": given("o", want["O"]),
        "dO": given("dO", d_o),
        "stats": given("stats", want["Stats"]),
    }
    outputs = {p: blank(p) for p in ("dQ", "dK", "dV")}
    for port in ("dBias", "dSink_token"):
        if port in want:
            outputs[port] = poisoned(want[port].shape, F64)
    check(run(SdpaBackward(**case.op()), inputs | extra, outputs, TorchExecutor()))


RAGGED = Case(b=3, s_q=5, s_kv=6, len_q=[3, 5, 2], len_kv=[4, 6, 1])
Q, KV = Layout([0, 3, 8, 10], 10), Layout([0, 4, 10, 11], 11)
FEATURES: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"attrs": {"right_bound": 0}},
    "bottom right window": {
        "attrs": {"left_bound": 3, "right_bound": 0, "bottom_right": True},
        "h_q": 6,
        "h_v": 3,
    },
    "sink, bias, alibi": {"sink": True, "bias": (3, 1, 5, 6), "attrs": {"alibi": True}},
    "bias for all": {"bias": (1, 4, 1, 6), "d_v": 3},
}


@pytest.mark.parametrize("name", FEATURES)
def test_ragged(name: str) -> None:
    case = replace(RAGGED, **FEATURES[name])
    run_ragged(case, {"q": Q, "kv": KV})
    run_ragged(case, {"q": Q, "kv": None})
    run_ragged(case, {"q": None, "kv": KV, "O": Q, "dO": Q})
    run_ragged(case, {"q": None, "kv": None, "dQ": Q, "dK": KV, "k": KV})


def test_offsets_int64_gaps_and_rows_outside() -> None:
    """C18: gaps between sequences and rows behind the last; every dead row is written."""
    q, kv = Layout([1, 5, 11, 14], 17, torch.int64), Layout([0, 7, 14, 16], 20, torch.int64)
    run_ragged(RAGGED, {"q": q, "kv": kv})
    run_ragged(replace(RAGGED, attrs={"right_bound": 0}), {"q": q, "kv": kv})


def test_three_tensors_side_by_side() -> None:
    q, kv = Layout([0, 3, 8, 10], 10, slots=3), Layout([0, 4, 10, 11], 11, slots=3)
    run_ragged(RAGGED, {"q": q, "kv": kv})


def test_zero_length_sequences() -> None:
    """C16: empty first, in the middle and last; none of one side only; nothing at all."""
    case = Case(b=5, s_q=3, s_kv=3, len_q=[0, 2, 0, 3, 0], len_kv=[0, 2, 0, 3, 0])
    layout = Layout([0, 0, 2, 2, 5, 5], 5)
    run_ragged(case, {"q": layout, "kv": layout})
    run_ragged(replace(case, attrs={"right_bound": 0}), {"q": layout, "kv": layout})
    case = Case(b=3, s_q=1, s_kv=5, len_q=[1, 0, 1], len_kv=[3, 0, 5])
    run_ragged(case, {"q": Layout([0, 1, 1, 2], 2), "kv": Layout([0, 3, 3, 8], 8)})
    case = Case(b=3, s_q=2, s_kv=5, len_q=[2, 2, 1], len_kv=[3, 0, 5], sink=True)
    run_ragged(case, {"q": Layout([0, 2, 4, 5], 5), "kv": Layout([0, 3, 3, 8], 8)})
    case = Case(b=2, s_q=2, s_kv=2, len_q=[0, 0], len_kv=[0, 0])
    run_ragged(case, {"q": Layout([0, 0, 0], 0), "kv": Layout([0, 0, 0], 0)})


def refuse(what: str, case: Case, over: Mapping[str, Layout], **changed: Tensor) -> None:
    """Forward and backward refuse, the message matches, and no output was touched."""
    dense, d_o = case.inputs(), case.d_o()
    lengths = {"q": [0] * case.b, "k": [0] * case.b}
    inputs: dict[str, Any] = {
        p: over["kv" if p in OVER_KEYS else "q"].pack(dense[p], lengths["q"]) for p in "qkv"
    }
    inputs |= {"seq_len_q": dense["seq_len_q"], "seq_len_kv": dense["seq_len_kv"], **changed}
    o = poisoned((case.b, case.h_q, case.s_q, case.d_v), F64)
    stats = poisoned((case.b, case.h_q, case.s_q, 1), F64)
    with pytest.raises(PositionError, match=what):
        run(Sdpa(**case.op()), inputs, {"O": o, "Stats": stats}, TorchExecutor())
    grads = {f"d{p.upper()}": poisoned(dense[p].shape, F64) for p in "qkv"}
    given = {**inputs, "o": d_o, "dO": d_o, "stats": torch.zeros_like(stats)}
    with pytest.raises(PositionError, match=what):
        run(SdpaBackward(**case.op()), given, grads, TorchExecutor())
    assert all(bool(x.isnan().all()) for x in (o, stats, *grads.values()))


def test_bad_offsets_and_lengths_are_refused() -> None:
    kv = KV
    cases = (
        (r"decrease at sequence 1, from 80 to 40", Layout([0, 4, 2, 10], 10), kv),
        (r"first offset of 'in_q' is -20", Layout([-1, 3, 8, 10], 10), kv),
        (r"'in_q': sequence 2 of 2 tokens .* past the 180 elements", Layout([0, 3, 8, 10], 9), kv),
        (r"sequence 1 of 'k': 6 rows of stride 10 do not fit", Q, Layout([0, 4, 9, 11], 11)),
    )
    for what, q_layout, kv_layout in cases:
        refuse(what, RAGGED, {"q": q_layout, "kv": kv_layout})
    both = {"q": Q, "kv": KV}
    for port, values, what in (
        ("seq_len_q", [3, 6, 2], r"seq_len_q of sequence 1 is 6; .* 0..5"),
        ("seq_len_q", [-1, 5, 2], r"seq_len_q of sequence 0 is -1"),
        ("seq_len_kv", [4, 6, 7], r"seq_len_kv of sequence 2 is 7; .* 0..6"),
    ):
        lengths = torch.tensor(values, dtype=torch.int32).view(-1, 1, 1, 1)
        refuse(what, RAGGED, both, **{port: lengths})


def pools(x: Tensor, page: int, seed: int, spare: int = 3) -> tuple[Tensor, Tensor]:
    """[b, h, s, d] cut into pages in a shuffled pool full of NaN, and the table [b, 1, n, 1]."""
    b, h, s, d = x.shape
    n = -(-s // page)
    order = torch.randperm(b * n + spare, generator=torch.Generator().manual_seed(seed))
    pool = poisoned((b * n + spare, h, page, d), x.dtype)
    table = order[: b * n].view(b, n)
    for i in range(b):
        for j in range(n):
            rows = x[i, :, j * page : (j + 1) * page]
            pool[table[i, j], :, : rows.shape[1]] = rows
    return pool, table.view(b, 1, n, 1)


@pytest.mark.parametrize("page", [1, 2, 4, 16])
@pytest.mark.parametrize("name", ["dense", "causal", "bottom right window"])
def test_paged(name: str, page: int) -> None:
    case = Case(b=3, s_q=5, s_kv=9, len_q=[3, 5, 2], len_kv=[4, 9, 0], **FEATURES[name])
    dense = case.inputs()
    want = expected(case, dense, case.d_o())
    k, k_table = pools(dense["k"], page, 1)
    v, v_table = pools(dense["v"], 2, 2)
    # What lies behind the last page in use is never read.
    for table, size in ((k_table, page), (v_table, 2)):
        for i, n in enumerate((4, 9, 0)):
            table[i, 0, -(-n // size) :] = 10**6
    op = Sdpa(**case.op(), max_seq_len_kv=9)
    inputs = {
        **dense,
        "k": k,
        "v": v,
        "paged_attention_k_table": k_table.to(torch.int32),
        "paged_attention_v_table": v_table,
    }
    outputs = {p: poisoned(want[p].shape, F64) for p in ("O", "Stats")}
    for port, value in run(op, inputs, outputs, TorchExecutor()).items():
        assert_within(value, want[port], 1e-12, port)


def test_page_tables_that_point_outside_are_refused() -> None:
    case = Case(b=2, s_kv=9, len_q=[7, 7], len_kv=[4, 9])
    dense = case.inputs()
    k, k_table = pools(dense["k"], 4, 1)
    v, v_table = pools(dense["v"], 4, 2)
    op = Sdpa(**case.op(), max_seq_len_kv=9)
    o = poisoned((2, 4, 7, 5), F64)

    def refuse_tables(k_table: Tensor, v_table: Tensor, what: str) -> None:
        inputs = {
            **dense,
            "k": k,
            "v": v,
            "paged_attention_k_table": k_table,
            "paged_attention_v_table": v_table,
        }
        with pytest.raises(PositionError, match=what):
            run(op, inputs, {"O": o}, TorchExecutor())
        assert bool(o.isnan().all())

    for entry in (-1, k.shape[0]):
        bad = v_table.clone()
        bad[1, 0, 2] = entry
        refuse_tables(k_table, bad, rf"sequence 1 of 'v': entry 2 of its page table is {entry}")
