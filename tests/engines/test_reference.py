"""The reference engine against values worked out by hand, and against the oracle of testing/."""

from dataclasses import replace
from math import cos, exp, inf, log, nan, sin, sqrt

import pytest
import torch
from torch import Tensor

from ropegraph.engines.reference import Reference
from ropegraph.engines.reference.buffers import round_once
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import (
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    RopePair,
    Scale,
    Sdpa,
    SdpaBackward,
    Sum,
)
from ropegraph.ir.score_mod import Instruction, Port, Ref, ScoreProgram, softcap
from ropegraph.lowering.engine import Device, Step
from ropegraph.testing import oracle
from ropegraph.testing.inputs import LAYOUTS, normal, packed, placed, poisoned
from tests.engines.steps import Ragged, run

F64 = torch.float64


def row(*numbers: float, dtype: torch.dtype = F64) -> Tensor:
    """One head row [1, 1, 1, d]."""
    return torch.tensor(numbers, dtype=dtype).reshape(1, 1, 1, -1)


def column(*numbers: float) -> Tensor:
    """Keys or values one wide: [1, 1, s, 1]."""
    return torch.tensor(numbers, dtype=F64).reshape(1, 1, -1, 1)


def table(*angles: float) -> Tensor:
    """A table of one position: [1, 1, 1, width]."""
    return torch.tensor(angles, dtype=torch.float32).reshape(1, 1, 1, -1)


def rotated(attrs: Rope, x: Tensor, freqs: Tensor) -> list[float]:
    return run(attrs, {"input": x, "freqs": freqs}, ["output"])["output"].reshape(-1).tolist()


def check(got: Tensor | list[float], want: list[float], tolerance: float = 1e-12) -> None:
    got = torch.as_tensor(got, dtype=F64).reshape(-1)
    torch.testing.assert_close(
        got, torch.tensor(want, dtype=F64), rtol=tolerance, atol=tolerance, equal_nan=True
    )


class TestRope:
    def test_split_half_and_interleaved(self):
        x = row(1, 2, 3, 4)
        c1, s1, c2, s2 = cos(1), sin(1), cos(0.01), sin(0.01)
        half = Rope(4, 0, half_width=True)
        want = [c1 - 3 * s1, 2 * c2 - 4 * s2, 3 * c1 + s1, 4 * c2 + 2 * s2]
        # 0.01 as the fp32 table holds it
        check(rotated(half, x, table(1, 0.01)), want, 1e-8)
        check(want, [-1.98411, 1.95990, 2.46238, 4.01980], 1e-5)
        pairs = replace(half, interleaved=True, interleaved_output=True)
        want = [c1 - 2 * s1, 2 * c1 + s1, 3 * c2 - 4 * s2, 4 * c2 + 3 * s2]
        check(rotated(pairs, x, table(1, 0.01)), want, 1e-8)

    def test_unit_vector_shows_the_partner(self):
        x = row(1, 0, 0, 0)
        half = Rope(4, 0, half_width=True)
        check(rotated(half, x, table(1, 0.01)), [0.5403, 0, 0.8415, 0], 1e-4)
        pairs = replace(half, interleaved=True, interleaved_output=True)
        check(rotated(pairs, x, table(1, 0.01)), [0.5403, 0.8415, 0, 0], 1e-4)
        mixed = replace(half, interleaved=True)
        check(rotated(mixed, row(1, 2, 3, 4), table(0, 0)), [1, 3, 2, 4])
        back = replace(half, interleaved_output=True)
        check(rotated(back, row(1, 3, 2, 4), table(0, 0)), [1, 2, 3, 4])

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        ("layout", "columns"),
        [("first_half", (1, 0.5, nan, nan)), ("pairs", (1, nan, 0.5, nan))],
    )
    def test_a_full_table_is_read_as_its_layout_says(self, interleaved, layout, columns):
        x = row(1, 2, 3, 4)
        narrow = Rope(
            4, 0, half_width=True, interleaved=interleaved, interleaved_output=interleaved
        )
        wide = replace(narrow, half_width=False, table_layout=layout)
        check(rotated(wide, x, table(*columns)), rotated(narrow, x, table(1, 0.5)))

    def test_pairs_read_as_halves_is_the_known_wrong_answer(self):
        attrs = Rope(4, 0, table_layout="full")
        wrong = rotated(attrs, row(1, 2, 3, 4), table(1, 1, 0.01, 0.01))
        check(wrong, [-1.98411, -2.28528, 3.00985, 4.01980], 1e-5)

    def test_full_layout_lets_each_lane_read_its_own_column(self):
        x, dy = row(1, 2, 3, 4), row(5, 6, 7, 8)
        t = (0.3, 0.6, 0.9, 1.2)
        attrs = Rope(4, 0, table_layout="full")
        c, s = [cos(a) for a in t], [sin(a) for a in t]
        want = [
            c[0] - 3 * s[0],
            2 * c[1] - 4 * s[1],
            3 * c[2] + s[2],
            4 * c[3] + 2 * s[3],
        ]
        check(rotated(attrs, x, table(*t)), want, 1e-6)
        adjoint = RopeBackward(4, 0, table_layout="full")
        dx = run(adjoint, {"dY": dy, "freqs": table(*t)}, ["dX"])["dX"]
        want = [
            5 * c[0] + 7 * s[2],
            6 * c[1] + 8 * s[3],
            7 * c[2] - 5 * s[0],
            8 * c[3] - 6 * s[1],
        ]
        check(dx, want, 1e-6)

    def test_partial_rotation_at_the_head_and_at_the_tail(self):
        x = row(*range(1, 9))
        freqs = table(3, 0.03)
        head = Rope(4, 0, half_width=True)
        tail = Rope(4, 4, half_width=True)
        check(rotated(head, x, freqs), [-1.41335, 1.87912, -2.82886, 4.05819, 5, 6, 7, 8], 1e-5)
        want = [1, 2, 3, 4, -5.93780, 5.75734, -6.22435, 8.17637]
        check(rotated(tail, x, freqs), want, 1e-5)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
    def test_other_channels_are_copied_bit_for_bit(self, dtype):
        x = row(1, 2, inf, nan, -0.0, 3, dtype=dtype)
        out = run(Rope(2, 0), {"input": x, "freqs": table(1, 0)}, ["output"])["output"]
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(out.view(bits)[..., 2:], x.view(bits)[..., 2:])
        check(out[..., :2].double(), [-1.1426, 1.9221], 0.01)

    def test_position_zero_gives_the_row_back(self):
        x = row(3.0, -0.0, 1e-40, 7.0, dtype=torch.float32)
        out = run(Rope(4, 0), {"input": x, "freqs": table(0, 0, 0, 0)}, ["output"])["output"]
        assert torch.equal(out, x)

    def test_output_scale_takes_the_row_and_attention_factor_the_segment(self):
        x = row(1, 2, 3, 4)
        attrs = Rope(2, 0, output_scale=3.0, attention_factor=2.0)
        check(rotated(attrs, x, table(0, 0)), [6, 12, 9, 12])
        check(rotated(replace(attrs, output_scale=1.0), x, table(0, 0)), [2, 4, 3, 4])

    def test_inverse_undoes(self):
        x = row(1, 2, 3, 4)
        attrs = Rope(4, 0, interleaved_output=True)
        undo = Rope(4, 0, interleaved=True, inverse=True)
        once = row(*rotated(attrs, x, table(1, 0.5, 0, 0)))
        check(rotated(undo, once, table(1, 0.5, 0, 0)), [1, 2, 3, 4])

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_any_strides_equal_the_oracle(self, layout, interleaved):
        b, h, s, d, r = 3, 2, 5, 10, 6
        x = normal((b, h, s, d), F64, layout, seed=1)
        angles = oracle.angles(s, r)
        freqs = placed(angles.reshape(s, 1, 1, 3), "gapped")
        attrs = Rope(r, 2, 0.3, 1.5, interleaved, not interleaved, inverse=True, half_width=True)
        out = {"output": poisoned((b, h, s, d), F64, "packed_qkv")}
        got = run(attrs, {"input": x, "freqs": freqs}, out)["output"]
        want = oracle.rope(
            x,
            angles,
            rope_offset=2,
            interleaved=interleaved,
            interleaved_output=not interleaved,
            output_scale=0.3,
            attention_factor=1.5,
            inverse=True,
        )
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("layout", ["first_half", "pairs", "full"])
    @pytest.mark.parametrize("interleaved", [(False, False), (False, True), (True, False)])
    def test_backward_and_freqs_gradient_are_those_of_autograd(self, layout, interleaved):
        b, h, s, d, r = 2, 3, 4, 8, 6
        x, dy = (normal((b, h, s, d), F64, seed=n) for n in (1, 2))
        freqs = normal((s + 2, b, 1, r), torch.float32, seed=3)
        common = {
            "rope_dim": r,
            "rope_offset": 1,
            "output_scale": 0.7,
            "attention_factor": 1.1,
            "interleaved": interleaved[0],
            "interleaved_output": interleaved[1],
            "table_layout": layout,
        }
        step = 1e-6

        def f(x: Tensor, freqs: Tensor) -> Tensor:
            return run(Rope(**common), {"input": x, "freqs": freqs}, ["output"])["output"]

        # <R x, dy> = <x, R' dy> for random x and dy pins the adjoint.
        dx = run(RopeBackward(**common), {"dY": dy, "freqs": freqs}, ["dX"])["dX"]
        torch.testing.assert_close((f(x, freqs) * dy).sum(), (x * dx).sum())
        inputs = {"input": x, "dY": dy, "freqs": freqs.double()}
        got = run(RopeFreqsGrad(**common), inputs, ["dfreqs"])["dfreqs"]
        assert got.shape == freqs.shape
        assert not got[s:].any()
        for place in ((0, 0, 0, 0), (1, 1, 0, 3), (3, 0, 0, 4), (2, 1, 0, 5)):
            moved = [freqs.double(), freqs.double()]
            moved[0][place] += step
            moved[1][place] -= step
            slope = ((f(x, moved[0]) - f(x, moved[1])) * dy).sum() / (2 * step)
            assert float(got[place]) == pytest.approx(float(slope), rel=1e-6, abs=1e-8)

    def test_dx_of_a_sum_from_an_expanded_gradient(self):
        dy = torch.ones(1, dtype=F64).expand(2, 3, 4, 2)
        freqs = torch.ones(4, 1, 1, 2)
        dx = run(RopeBackward(2, 0), {"dY": dy, "freqs": freqs}, ["dX"])["dX"]
        want = torch.tensor([cos(1) + sin(1), cos(1) - sin(1)], dtype=F64)
        torch.testing.assert_close(dx, want.expand(2, 3, 4, 2))

    def test_ragged_rows_restart_and_the_rest_is_zero(self):
        h, d, lengths = 2, 4, (2, 0, 3)
        parts = [normal((h, n, d), F64, seed=n) for n in lengths]
        buffer = packed(parts, total=8, starts=(0, 2, 4))
        # a gap of two rows after the first sequence, one row of slack at the end
        offsets = torch.tensor([0, 2, 4, 7], dtype=torch.int32)
        angles = oracle.angles(3, d)
        ragged = Ragged(buffer, (3, h, 3, d), (3 * h * d, d, h * d, 1), offsets, h * d)
        buffer[2:4] = 0.0
        out = replace(ragged, buffer=poisoned((8, h, d), F64))
        inputs = {"input": ragged, "freqs": angles.reshape(3, 1, 1, 2)}
        got = run(Rope(d, 0, half_width=True), inputs, {"output": out})["output"]
        for rows, start in zip(parts, (0, 2, 4), strict=True):
            n = rows.shape[1]
            want = oracle.rope(rows[None], angles[:n])[0].transpose(0, 1)
            torch.testing.assert_close(got[start : start + n], want)
        assert not got[7:].any()
        assert not got[2:4].any()

    def test_a_pair_is_two_rotations(self):
        q, k = normal((1, 3, 2, 4), F64, seed=1), normal((1, 1, 5, 4), F64, seed=2)
        freqs = placed(oracle.angles(5, 4).reshape(5, 1, 1, 2), "bhsd")
        one, two = Rope(4, 0, 0.3, half_width=True), Rope(4, 0, half_width=True)
        inputs = {"input0": q, "freqs0": freqs, "input1": k, "freqs1": freqs}
        got = run(RopePair((one, two)), inputs, ["output0", "output1"])
        for i, (attrs, x) in enumerate(((one, q), (two, k))):
            alone = run(attrs, {"input": x, "freqs": freqs}, ["output"])["output"]
            assert torch.equal(got[f"output{i}"], alone)

    def test_declines_what_it_does_not_mean(self):
        value = Value("x", (1, 1, 1, 4), (4, 4, 4, 1), None)  # type: ignore[arg-type]
        node = Node("r", Rope(4, 0, angles="inv_freq", numerics="hf", cp_size=2), {}, {})
        reasons = Reference().why_not(Step(node, {"x": value}, "reference", {}), Device())
        assert len(reasons) == 3


def attend(attrs: Sdpa, q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> dict[str, Tensor]:
    return run(attrs, {"q": q, "k": k, "v": v, **others}, ["O", "Stats"])


def uniform(s_q: int, s_kv: int, attrs: Sdpa, b: int = 1, **others: Tensor) -> list[float]:
    """O for q = k = 0 and v = 1, 2, 3, ...: the mean of the keys that a query sees."""
    q, k = torch.zeros(b, 1, s_q, 2, dtype=F64), torch.zeros(b, 1, s_kv, 2, dtype=F64)
    v = column(*range(1, s_kv + 1)).expand(b, 1, s_kv, 1)
    return attend(attrs, q, k, v, **others)["O"].reshape(-1).tolist()


class TestSdpa:
    @pytest.mark.parametrize(
        ("scale", "want"), [(0.5, 0.88080), (1.0, 0.98201), (0.0, 0.5), (-0.5, 0.11920)]
    )
    @pytest.mark.parametrize("on_host", [True, False])
    def test_scale_is_applied_once(self, scale, want, on_host):
        q, k = row(1, 1, 1, 1), torch.stack([torch.ones(4), torch.zeros(4)]).double()[None, None]
        attrs = Sdpa(attn_scale=scale if on_host else None)
        others = {} if on_host else {"attn_scale": torch.full((1, 1, 1, 1), scale)}
        out = attend(attrs, q, k, column(1, 0), **others)
        check(out["O"], [want], 1e-5)
        check(out["Stats"], [log(exp(4 * scale) + 1)])

    @pytest.mark.parametrize("is_log2", [False, True])
    def test_bias_is_natural_and_not_scaled(self, is_log2):
        attrs = Sdpa(attn_scale=0.5, softmax_input_is_log2=is_log2)
        zero = torch.zeros(1, 1, 1, 2, dtype=F64)
        keys = torch.zeros(1, 1, 2, 2, dtype=F64)
        bias = torch.tensor([0, log(3)], dtype=F64).reshape(1, 1, 1, 2)
        out = attend(attrs, zero, keys, column(0, 1), bias=bias)
        check(out["O"], [0.75])
        check(out["Stats"], [log(4)])

    def test_log2_means_base_two_of_the_product_alone(self):
        q, k = row(1, 1), torch.tensor([[1.0, 1.0], [0, 0]], dtype=F64)[None, None]
        out = attend(Sdpa(softmax_input_is_log2=True), q, k, column(1, 0))
        check(out["O"], [4 / 5])
        check(out["Stats"], [log(5)])

    def test_causal_corner(self):
        top, bottom = Sdpa(right_bound=0), Sdpa(right_bound=0, bottom_right=True)
        check(uniform(1, 4, bottom), [2.5])
        check(uniform(2, 4, bottom), [2.0, 2.5])
        check(uniform(4, 2, bottom), [0, 0, 1, 1.5])
        check(uniform(1, 4, top), [1])
        check(uniform(2, 4, top), [1, 1.5])
        check(uniform(4, 2, top), [1, 1.5, 1.5, 1.5])

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_causal_corner_moves_with_the_lengths(self, dtype):
        lengths = {
            "seq_len_q": torch.ones(2, 1, 1, 1, dtype=dtype),
            "seq_len_kv": torch.tensor([4, 2], dtype=dtype).reshape(2, 1, 1, 1),
        }
        attrs = Sdpa(right_bound=0, bottom_right=True, padding=True)
        check(uniform(1, 4, attrs, b=2, **lengths), [2.5, 1.5])

    def test_band(self):
        check(uniform(4, 4, Sdpa(left_bound=2, right_bound=0)), [1, 1.5, 2.5, 3.5])
        check(uniform(4, 4, Sdpa(left_bound=1, right_bound=1)), [1.5, 2.5, 3.5, 4])
        check(uniform(2, 4, Sdpa(left_bound=2, bottom_right=True)), [3, 3.5])

    def test_fully_masked_rows(self):
        attrs = Sdpa(right_bound=0, bottom_right=True)
        zero, keys = torch.zeros(1, 1, 3, 2, dtype=F64), torch.zeros(1, 1, 2, 2, dtype=F64)
        out = attend(attrs, zero, keys, column(5, 6))
        check(out["O"], [0, 5, 5.5])
        check(out["Stats"], [-inf, 0, log(2)])
        sink = torch.full((1, 1, 1, 1), 0.25, dtype=F64)
        out = attend(attrs, zero, keys, column(5, 6), sink_token=sink)
        check(out["Stats"], [0.25, log(1 + exp(0.25)), log(2 + exp(0.25))])
        check(out["O"][0, 0, 0], [0])

    def test_a_bias_of_minus_infinity_masks(self):
        bias = torch.tensor([0, -inf, 0, -inf, -inf, -inf], dtype=F64).reshape(1, 1, 2, 3)
        zero, keys = torch.zeros(1, 1, 2, 2, dtype=F64), torch.zeros(1, 1, 3, 2, dtype=F64)
        out = attend(Sdpa(), zero, keys, column(1, nan, 3), bias=bias)
        check(out["O"], [2, 0])
        check(out["Stats"], [log(2), -inf])

    def test_sink_joins_the_denominator_unscaled(self):
        q, k = row(1, 1), torch.tensor([[1.0, 1.0], [0, 0]], dtype=F64)[None, None]
        sink = torch.full((1, 1, 1, 1), 2.0, dtype=F64)
        out = attend(Sdpa(attn_scale=0.5), q, k, column(1, 0), sink_token=sink)
        total = exp(1) + 1 + exp(2)
        check(out["O"], [exp(1) / total])
        check(out["Stats"], [log(total)])

    def test_alibi_slopes_and_distance(self):
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

    def test_padding_never_leaks(self):
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

    def test_nan_reaches_only_the_rows_that_see_it(self):
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

    def test_softcap(self):
        q, k = row(1, 1), torch.tensor([[1.0, 1.0], [0, 0]], dtype=F64)[None, None]
        out = attend(Sdpa(attn_scale=3.0, score_mod=softcap(2.0)), q, k, column(1, 0))
        capped = 2 * torch.tanh(torch.tensor(3.0, dtype=F64))
        check(out["Stats"], [float(torch.log(torch.exp(capped) + 1))])

    def test_a_program_with_indices_a_selection_and_a_tensor(self):
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
        want = oracle.attention(
            q, k, v, attn_scale=0.7, score_mod=lambda x: torch.where(even, x, -1.5)
        )
        torch.testing.assert_close((got["O"], got["Stats"]), want)

    def test_dropout_keeps_whole_weights_and_repeats(self):
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

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_grouped_heads_and_strides(self, layout):
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
    def test_nothing_to_do(self, sizes):
        b, h, s_q, s_kv = sizes
        q = torch.ones(b, h, s_q, 2, dtype=F64)
        k = torch.ones(b, h, s_kv, 2, dtype=F64)
        out = attend(Sdpa(), q, k, k)
        assert out["O"].shape == (b, h, s_q, 2)
        assert not out["O"].any()
        if s_kv == 0:
            assert (out["Stats"] == -inf).all()

    def test_pages(self):
        b, h, s, d, page = 2, 2, 7, 3, 2
        q = normal((b, h, 1, d), F64, seed=1)
        dense = [normal((b, h, s, d), F64, seed=n) for n in (2, 3)]
        lengths = (7, 3)
        inputs: dict[str, Tensor] = {"q": q}
        for port, x, order in zip(
            "kv", dense, ((3, 0, 6, 1, 2, 5), (4, 1, 0, 7, 5, 3)), strict=True
        ):
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
    def test_ragged_equals_each_sequence_alone(self, states_lengths):
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


def forward_results(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Something of the right shape for o and stats, which the reference does not read."""
    b, h, s, _ = q.shape
    return {"o": torch.full((b, h, s, v.shape[3]), nan), "stats": torch.full((b, h, s, 1), nan)}


class TestSdpaBackward:
    @pytest.mark.parametrize("is_log2", [False, True])
    def test_every_gradient_is_that_of_the_oracle(self, is_log2):
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

    def test_fully_masked_and_padded_rows_have_no_gradient(self):
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

    def test_a_folded_scale_gives_the_gradients_of_the_table(self):
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


class TestRest:
    def test_scale_and_sum(self):
        x, y = normal((1, 2, 3, 4), F64, "bshd", seed=1), normal((1, 2, 3, 4), F64, seed=2)
        assert torch.equal(run(Scale(0.3), {"input": x}, ["output"])["output"], 0.3 * x)
        assert torch.equal(run(Sum(), {"0": x, "1": y, "2": y}, ["output"])["output"], x + y + y)

    def test_io_types_do_not_narrow_the_computation(self):
        x = normal((1, 2, 9, 8), torch.bfloat16, seed=1)
        angles = oracle.angles(9, 8)
        freqs = angles.reshape(9, 1, 1, 4)
        got = run(Rope(8, 0, 0.3, half_width=True), {"input": x, "freqs": freqs}, ["output"])
        want = round_once(oracle.rope(x, angles, output_scale=0.3), torch.bfloat16)
        assert torch.equal(got["output"], want)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_rounding_once(self, dtype):
        eps = torch.finfo(dtype).eps
        # just beyond a tie: through fp32 it becomes the tie, which goes to even, downwards
        over = torch.tensor([1 + eps / 2 + 2.0**-40, -1 - eps / 2 - 2.0**-40], dtype=F64)
        assert round_once(over, dtype).tolist() == [1 + eps, -1 - eps]
        under = torch.tensor([1 + 1.5 * eps - 2.0**-40, 1 + 1.5 * eps], dtype=F64)
        assert round_once(under, dtype).tolist() == [1 + eps, 1 + 2 * eps]
        special = torch.tensor([inf, -inf, 0.0, 1e300, 1e-300], dtype=F64)
        assert round_once(special, dtype).tolist() == [inf, -inf, 0.0, inf, 0.0]
        assert round_once(torch.tensor([nan], dtype=F64), dtype).isnan().all()
