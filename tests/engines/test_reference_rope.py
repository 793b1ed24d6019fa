"""The rotation of the reference engine against values worked out by hand, and the oracle."""

from dataclasses import replace
from math import cos, inf, nan, sin

import pytest
import torch
from torch import Tensor

from ropegraph.engines.reference import Reference
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import (
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    RopePair,
)
from ropegraph.lowering.engine import Device, Step
from ropegraph.testing import oracle
from ropegraph.testing.inputs import LAYOUTS, normal, packed, placed, poisoned
from tests.engines.rows import F64, check, rotated, row, table
from tests.engines.steps import Ragged, run


def test_split_half_and_interleaved():
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


def test_unit_vector_shows_the_partner():
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
def test_a_full_table_is_read_as_its_layout_says(interleaved, layout, columns):
    x = row(1, 2, 3, 4)
    narrow = Rope(4, 0, half_width=True, interleaved=interleaved, interleaved_output=interleaved)
    wide = replace(narrow, half_width=False, table_layout=layout)
    check(rotated(wide, x, table(*columns)), rotated(narrow, x, table(1, 0.5)))


def test_pairs_read_as_halves_is_the_known_wrong_answer():
    attrs = Rope(4, 0, table_layout="full")
    wrong = rotated(attrs, row(1, 2, 3, 4), table(1, 1, 0.01, 0.01))
    check(wrong, [-1.98411, -2.28528, 3.00985, 4.01980], 1e-5)


def test_full_layout_lets_each_lane_read_its_own_column():
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


def test_partial_rotation_at_the_head_and_at_the_tail():
    x = row(*range(1, 9))
    freqs = table(3, 0.03)
    head = Rope(4, 0, half_width=True)
    tail = Rope(4, 4, half_width=True)
    check(rotated(head, x, freqs), [-1.41335, 1.87912, -2.82886, 4.05819, 5, 6, 7, 8], 1e-5)
    want = [1, 2, 3, 4, -5.93780, 5.75734, -6.22435, 8.17637]
    check(rotated(tail, x, freqs), want, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_other_channels_are_copied_bit_for_bit(dtype):
    x = row(1, 2, inf, nan, -0.0, 3, dtype=dtype)
    out = run(Rope(2, 0), {"input": x, "freqs": table(1, 0)}, ["output"])["output"]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(out.view(bits)[..., 2:], x.view(bits)[..., 2:])
    check(out[..., :2].double(), [-1.1426, 1.9221], 0.01)


def test_position_zero_gives_the_row_back():
    x = row(3.0, -0.0, 1e-40, 7.0, dtype=torch.float32)
    out = run(Rope(4, 0), {"input": x, "freqs": table(0, 0, 0, 0)}, ["output"])["output"]
    assert torch.equal(out, x)


def test_output_scale_takes_the_row_and_attention_factor_the_segment():
    x = row(1, 2, 3, 4)
    attrs = Rope(2, 0, output_scale=3.0, attention_factor=2.0)
    check(rotated(attrs, x, table(0, 0)), [6, 12, 9, 12])
    check(rotated(replace(attrs, output_scale=1.0), x, table(0, 0)), [2, 4, 3, 4])


def test_inverse_undoes():
    x = row(1, 2, 3, 4)
    attrs = Rope(4, 0, interleaved_output=True)
    undo = Rope(4, 0, interleaved=True, inverse=True)
    once = row(*rotated(attrs, x, table(1, 0.5, 0, 0)))
    check(rotated(undo, once, table(1, 0.5, 0, 0)), [1, 2, 3, 4])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_strides_equal_the_oracle(layout, interleaved):
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
def test_backward_and_freqs_gradient_are_those_of_autograd(layout, interleaved):
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


def test_dx_of_a_sum_from_an_expanded_gradient():
    dy = torch.ones(1, dtype=F64).expand(2, 3, 4, 2)
    freqs = torch.ones(4, 1, 1, 2)
    dx = run(RopeBackward(2, 0), {"dY": dy, "freqs": freqs}, ["dX"])["dX"]
    want = torch.tensor([cos(1) + sin(1), cos(1) - sin(1)], dtype=F64)
    torch.testing.assert_close(dx, want.expand(2, 3, 4, 2))


def test_ragged_rows_restart_and_the_rest_is_zero():
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


def test_a_pair_is_two_rotations():
    q, k = normal((1, 3, 2, 4), F64, seed=1), normal((1, 1, 5, 4), F64, seed=2)
    freqs = placed(oracle.angles(5, 4).reshape(5, 1, 1, 2), "bhsd")
    one, two = Rope(4, 0, 0.3, half_width=True), Rope(4, 0, half_width=True)
    inputs = {"input0": q, "freqs0": freqs, "input1": k, "freqs1": freqs}
    got = run(RopePair((one, two)), inputs, ["output0", "output1"])
    for i, (attrs, x) in enumerate(((one, q), (two, k))):
        alone = run(attrs, {"input": x, "freqs": freqs}, ["output"])["output"]
        assert torch.equal(got[f"output{i}"], alone)


def test_declines_what_it_does_not_mean():
    value = Value("x", (1, 1, 1, 4), (4, 4, 4, 1), None)  # type: ignore[arg-type]
    node = Node("r", Rope(4, 0, angles="cos_sin", numerics="hf", cp_size=2), {}, {})
    reasons = Reference().why_not(Step(node, {"x": value}, "reference", {}), Device())
    assert reasons == ("numerics='hf' is about bits; the reference is fp64",)
