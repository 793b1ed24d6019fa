"""sdpa and its backward in torch against the fp64 oracle: every feature alone, and many together.

In f64, where a wrong meaning shows at 1e-12; rounding has a file of its own.
"""

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

from ropegraph.ir.score_mod import Instruction, Port, Ref, ScoreProgram, softcap
from ropegraph.testing.budget import assert_within, relative
from tests.engines.sdpa_cases import Case, both

CAUSAL = {"right_bound": 0}


def check(case: Case, tolerance: float = 1e-12) -> None:
    got, want = both(case)
    for port, value in want.items():
        assert_within(got[port], value, max(relative(value, tolerance), tolerance), port)


ALONE: dict[str, Case] = {
    "dense": Case(),
    "causal": Case(attrs=CAUSAL),
    "causal, more rows than keys": Case(s_q=13, s_kv=6, attrs=CAUSAL),
    "bottom right": Case(attrs={**CAUSAL, "bottom_right": True}),
    "bottom right, one row": Case(s_q=1, attrs={**CAUSAL, "bottom_right": True}),
    "bottom right, more rows than keys": Case(
        s_q=13, s_kv=6, attrs={**CAUSAL, "bottom_right": True}
    ),
    "right bound": Case(attrs={"right_bound": 2}),
    "left bound": Case(attrs={"left_bound": 3}),
    "window": Case(s_q=20, s_kv=20, attrs={"left_bound": 4, "right_bound": 0}),
    "window of one": Case(attrs={"left_bound": 1, "right_bound": 0}),
    "window that leaves rows empty": Case(s_q=14, s_kv=6, attrs={"left_bound": 3}),
    "bottom right window": Case(attrs={"left_bound": 3, "right_bound": 1, "bottom_right": True}),
    "multi-query": Case(h_q=5, h_k=1, h_v=1, attrs=CAUSAL),
    "h_k is not h_v": Case(h_q=6, h_k=2, h_v=3, attrs=CAUSAL),
    "heads of k, one of v": Case(h_q=4, h_k=4, h_v=1),
    "d_qk is not d_v": Case(d_qk=3, d_v=6, attrs=CAUSAL),
    "d of 1": Case(d_qk=1, d_v=1),
    "bias": Case(bias=(2, 4, 7, 9)),
    "bias for all batches": Case(bias=(1, 4, 7, 9)),
    "bias for all heads": Case(bias=(2, 1, 7, 9)),
    "bias for all": Case(bias=(1, 1, 7, 9)),
    "bias a key": Case(bias=(2, 1, 1, 9)),
    "bias a row": Case(bias=(1, 4, 7, 1)),
    "alibi": Case(attrs={**CAUSAL, "alibi": True}),
    "alibi, odd heads": Case(h_q=6, h_k=3, h_v=3, attrs={**CAUSAL, "alibi": True}),
    "padding": Case(len_q=[5, 7], len_kv=[3, 9]),
    "padding, an empty sequence": Case(b=3, len_q=[5, 0, 2], len_kv=[3, 4, 0]),
    "padding, bottom right": Case(
        attrs={**CAUSAL, "bottom_right": True}, len_q=[5, 7], len_kv=[3, 9]
    ),
    "sink": Case(sink=True),
    "sink over empty rows": Case(
        s_q=9, s_kv=4, sink=True, attrs={"right_bound": 0, "bottom_right": True}
    ),
    "softcap": Case(score_mod=softcap(0.7), score_fn=lambda s: 0.7 * torch.tanh(s / 0.7)),
    "log2": Case(attrs={"softmax_input_is_log2": True}),
    "scale from a tensor": Case(scale_port=True),
    "scale 0": Case(attn_scale=0.0, attrs=CAUSAL),
    "negative scale": Case(attn_scale=-0.7, attrs=CAUSAL),
    "negative scale, dense": Case(attn_scale=-0.7),
    "scale that is 0 in fp32": Case(attn_scale=1e-60, attrs=CAUSAL),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_feature(name: str) -> None:
    check(ALONE[name])


FEATURES: dict[str, dict[str, Any]] = {
    "band": {"attrs": {"left_bound": 5, "right_bound": 1, "bottom_right": True}},
    "bias": {"bias": (2, 1, 7, 9)},
    "padding": {"len_q": [6, 4], "len_kv": [9, 5]},
    "sink": {"sink": True},
    "softcap": {"score_mod": softcap(0.9), "score_fn": lambda s: 0.9 * torch.tanh(s / 0.9)},
    "alibi": {"attrs": {"alibi": True, "right_bound": 0}},
    "log2": {"attrs": {"softmax_input_is_log2": True}},
    "heads": {"h_q": 6, "h_k": 2, "h_v": 3, "d_v": 3},
}


def combine(names: tuple[str, ...]) -> Case:
    fields: dict[str, Any] = {"attrs": {}}
    for name in names:
        new = FEATURES[name]
        fields = {**fields, **new, "attrs": {**fields["attrs"], **new.get("attrs", {})}}
    return Case(**fields)


TOGETHER = [names for n in range(2, len(FEATURES) + 1) for names in combinations(FEATURES, n)]


@pytest.mark.parametrize("names", TOGETHER, ids=" ".join)
def test_features_together(names: tuple[str, ...]) -> None:
    check(combine(names))


@pytest.mark.parametrize(("s_q", "s_kv"), list(product((1, 63, 65, 130), repeat=2)))
@pytest.mark.parametrize("attrs", [{}, CAUSAL, {"left_bound": 20, "right_bound": 3}], ids=str)
def test_sizes_that_end_inside_a_block(s_q: int, s_kv: int, attrs: dict[str, Any]) -> None:
    check(Case(b=1, s_q=s_q, s_kv=s_kv, attrs=attrs, sink=True))
    check(Case(b=1, s_q=s_q, s_kv=s_kv, attrs=attrs))


def test_tiles_cut_batches_heads_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from ropegraph.engines.torch_executor import problem

    features = ("band", "bias", "sink", "softcap", "heads")
    for elems, rows in ((1, 1), (40, 2), (200, 3), (1000, 7)):
        monkeypatch.setattr(problem, "TILE_ELEMS", elems)
        monkeypatch.setattr(problem, "MIN_ROWS", rows)
        check(combine(features))
        check(replace(combine(features), len_q=[6, 4], len_kv=[9, 5]))
        check(Case(b=3, h_q=6, h_k=2, h_v=3, attn_scale=-0.4, attrs=CAUSAL))


def test_outputs_that_nobody_asked_for_are_not_needed() -> None:
    from ropegraph.engines.torch_executor.engine import TorchExecutor
    from ropegraph.ir.ops import Sdpa, SdpaBackward
    from tests.engines.sdpa_cases import expected
    from tests.engines.steps import run

    for case in (Case(), Case(sink=True, bias=(1, 1, 7, 9)), Case(len_q=[5, 7], len_kv=[3, 9])):
        inputs, d_o = case.inputs(), case.d_o()
        want = expected(case, inputs, d_o)
        got = run(Sdpa(**case.op()), inputs, ["O"], TorchExecutor())
        assert_within(got["O"], want["O"], 1e-12)
        given = {**inputs, "o": want["O"], "dO": d_o, "stats": want["Stats"]}
        for port in want.keys() - {"O", "Stats"}:
            got = run(SdpaBackward(**case.op()), given, [port], TorchExecutor())
            assert_within(got[port], want[port], 1e-12, port)


def relative_positions() -> ScoreProgram:
    """scores + 0.1 * (row - column) where h is 0 or b is 1, else min(scores, 0.2)."""
    return ScoreProgram(
        (
            Instruction("gen_index", (), 2),
            Instruction("gen_index", (), 3),
            Instruction("sub", (Ref(0), Ref(1))),
            Instruction("mul", (Ref(2), 0.1)),
            Instruction("add", (Ref(-1), Ref(3))),
            Instruction("gen_index", (), 1),
            Instruction("cmp_eq", (Ref(5), 0.0)),
            Instruction("gen_index", (), 0),
            Instruction("cmp_ge", (Ref(7), 1.0)),
            Instruction("logical_or", (Ref(6), Ref(8))),
            Instruction("min", (Ref(-1), 0.2)),
            Instruction("binary_select", (Ref(4), Ref(10), Ref(9))),
        ),
        Ref(11),
    )


def relative_positions_fn(scores: torch.Tensor) -> torch.Tensor:
    b, h, s_q, s_kv = scores.shape
    row = torch.arange(s_q, dtype=scores.dtype)[:, None]
    column = torch.arange(s_kv, dtype=scores.dtype)
    first = (torch.arange(h) == 0)[None, :, None, None] | (torch.arange(b) == 1)[
        :, None, None, None
    ]
    shifted = scores + 0.1 * (row - column)
    return torch.where(first, shifted, torch.clamp(scores, max=0.2))


@pytest.mark.parametrize("lengths", [{}, {"len_q": [6, 4], "len_kv": [9, 5]}], ids=["all", "some"])
def test_score_mod_sees_batch_head_row_and_column(lengths: dict[str, Any]) -> None:
    mod = {"score_mod": relative_positions(), "score_fn": relative_positions_fn}
    check(Case(**mod, **lengths))


def test_score_mod_reads_a_tensor_and_may_ignore_the_scores() -> None:
    from ropegraph.engines.torch_executor.engine import TorchExecutor
    from ropegraph.ir.ops import Sdpa, SdpaBackward
    from tests.engines.sdpa_cases import expected
    from tests.engines.steps import run

    table = torch.randn(1, 4, 1, 9, dtype=torch.float64)
    times = ScoreProgram((Instruction("mul", (Ref(-1), Port("table"))),), Ref(0))
    only = ScoreProgram((Instruction("identity", (Port("table"),)),), Ref(0))
    for program, fn in (
        (times, lambda s: s * table),
        (only, lambda s: 0 * s + table),
    ):
        case = Case(score_mod=program, score_fn=fn)
        inputs, d_o = case.inputs(), case.d_o()
        want = expected(case, inputs, d_o)
        inputs["table"] = table
        got = run(Sdpa(**case.op()), inputs, ["O", "Stats"], TorchExecutor())
        given = {**inputs, "o": got["O"], "dO": d_o, "stats": got["Stats"]}
        got |= run(SdpaBackward(**case.op()), given, ["dQ", "dK", "dV"], TorchExecutor())
        for port, value in want.items():
            assert_within(got[port], value, 1e-12, port)
