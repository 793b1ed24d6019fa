"""Rotations on the torch executor against the formula, written out lane by lane in fp64."""

from dataclasses import replace
from math import cos, inf, nan, prod, sin
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.errors import PositionError
from ropegraph.ir.ops import Rope, RopeBackward, RopeFreqsGrad, RopePair, Rotation, Scale, Sum
from ropegraph.testing.inputs import LAYOUTS, normal, packed, placed, poisoned, strides
from tests.engines import steps
from tests.engines.steps import Ragged

ENGINE = TorchExecutor()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
F32, F64 = torch.float32, torch.float64
TABLES = ("half", "first_half", "pairs", "full")


def run(op: Any, inputs: dict[str, Any], outputs: Any) -> dict[str, Tensor]:
    return steps.run(op, inputs, outputs, ENGINE)


def rope(attrs: Rotation, x: Any, freqs: Tensor, out: Any = None) -> Tensor:
    """Forward or, for a RopeBackward, the adjoint, into a NaN buffer."""
    ports = ("input", "output") if isinstance(attrs, Rope) else ("dY", "dX")
    outputs = [ports[1]] if out is None else {ports[1]: out}
    return run(attrs, {ports[0]: x, "freqs": freqs}, outputs)[ports[1]]


def backward_of(attrs: Rope) -> RopeBackward:
    return RopeBackward(**vars(attrs))


def lanes(attrs: Rotation, is_interleaved: bool) -> list[tuple[int, int]]:
    """The channels of each pair."""
    o, r = attrs.rope_offset, attrs.rope_dim
    if is_interleaved:
        return [(o + 2 * i, o + 2 * i + 1) for i in range(r // 2)]
    return [(o + i, o + r // 2 + i) for i in range(r // 2)]


def column(attrs: Rotation, lane: int, pair: int) -> int:
    """The table's column that holds the angle of written channel ``lane``, which is in ``pair``."""
    if attrs.half_width or attrs.table_layout == "first_half":
        return pair
    return 2 * pair if attrs.table_layout == "pairs" else lane - attrs.rope_offset


def formula(attrs: Rotation, x: Tensor, freqs: Tensor) -> Tensor:
    """x [b, h, s, d] rotated by the rows of freqs, in fp64; differentiable."""
    x, angles = x.double(), freqs.double()[: x.shape[2], :, 0].permute(1, 0, 2)[:, None]
    channels = [x[..., i] for i in range(x.shape[3])]
    sign = -1.0 if attrs.inverse else 1.0
    read, written = lanes(attrs, attrs.interleaved), lanes(attrs, attrs.interleaved_output)
    for i, ((read1, read2), (write1, write2)) in enumerate(zip(read, written, strict=True)):
        x1, x2 = x[..., read1], x[..., read2]
        t1, t2 = (sign * angles[..., column(attrs, lane, i)] for lane in (write1, write2))
        channels[write1] = attrs.attention_factor * (x1 * t1.cos() - x2 * t1.sin())
        channels[write2] = attrs.attention_factor * (x2 * t2.cos() + x1 * t2.sin())
    return attrs.output_scale * torch.stack(channels, dim=3)


def table(attrs: Rotation, kind: str, rows: int, b: int = 1, dtype: torch.dtype = F32) -> Any:
    """Attributes and a random table of this kind, NaN where no angle should be read."""
    half = 3 * normal((rows, b, 1, attrs.rope_dim // 2), dtype, seed=7)
    if kind == "half":
        return replace(attrs, half_width=True), half
    attrs = replace(attrs, table_layout=kind)
    if kind == "full":
        return attrs, torch.cat([half, 3 * normal(half.shape, dtype, seed=8)], dim=3)
    unread = torch.full_like(half, nan)
    if kind == "pairs":
        return attrs, torch.stack([half, unread], dim=4).flatten(3)
    return attrs, torch.cat([half, unread], dim=3)


def check(got: Tensor, want: Tensor, x: Tensor, attrs: Rotation) -> None:
    """One rounding to the dtype, on top of fp32 (fp64) arithmetic."""
    assert got.dtype == x.dtype
    eps = 2.0**-52 if x.dtype is F64 else 2.0**-23
    size = abs(attrs.output_scale) * max(1.0, abs(attrs.attention_factor))
    size *= float(x.double().abs().max()) if x.numel() else 0.0
    info = torch.finfo(x.dtype)
    allowed = want.abs() * info.eps / 2 + info.smallest_normal * info.eps + 6 * eps * size
    error = (got.double() - want).abs()
    assert bool((error <= allowed).all()), float((error / allowed).max())


# Pairs, places, tables


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(("d", "r", "offset"), [(8, 8, 0), (14, 6, 0), (14, 6, 8), (14, 6, 3)])
@pytest.mark.parametrize("kind", TABLES)
def test_every_pairing_place_and_table(read, written, d, r, offset, kind):
    attrs = Rope(r, offset, 0.7, attention_factor=1.3, interleaved=read, interleaved_output=written)
    attrs, freqs = table(attrs, kind, rows=7)
    x = normal((2, 3, 5, d))
    check(rope(attrs, x, freqs), formula(attrs, x, freqs), x, attrs)
    inverse = replace(attrs, inverse=True)
    check(rope(inverse, x, freqs), formula(inverse, x, freqs), x, attrs)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", TABLES)
def test_the_backward_is_the_exact_adjoint(read, written, inverse, kind):
    attrs = Rope(
        6,
        3,
        -0.7,
        attention_factor=1.3,
        interleaved=read,
        interleaved_output=written,
        inverse=inverse,
    )
    attrs, freqs = table(attrs, kind, rows=5, dtype=F64)
    x, dy = normal((2, 3, 5, 14), F64, seed=1), normal((2, 3, 5, 14), F64, seed=2)
    y, dx = rope(attrs, x, freqs), rope(backward_of(attrs), dy, freqs)
    left, right = float((dy * y).sum()), float((dx * x).sum())
    assert left == pytest.approx(right, rel=1e-13)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(formula(attrs, leaf, freqs), leaf, dy)
    check(dx, want, dy, attrs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("table_dtype", [F32, F64])
def test_every_dtype_is_rounded_once(dtype, kind, b, table_dtype):
    attrs, freqs = table(Rope(10, 2, 0.3, attention_factor=1.7), kind, 9, b, table_dtype)
    x = normal((2, 3, 9, 12), dtype)
    check(rope(attrs, x, freqs), formula(attrs, x, freqs), x, attrs)
    attrs = backward_of(attrs)
    want = formula(replace(Rope(**vars(attrs)), inverse=True), x, freqs)
    if kind != "full":  # there the adjoint reads its partner's sine
        check(rope(attrs, x, freqs), want, x, attrs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_may_have_another_dtype(dtype):
    attrs, freqs = table(Rope(6, 1, 0.3), "half", rows=5)
    x = normal((2, 3, 5, 8), F32)
    out = poisoned(x.shape, dtype)
    want = formula(attrs, x, freqs)
    got = rope(attrs, x, freqs, out).double()
    assert float((got - want).abs().max()) <= 3 * torch.finfo(dtype).eps + 1e-6


def test_a_table_longer_than_the_sequence():
    attrs, freqs = table(Rope(8, 0), "half", rows=9)
    x = normal((1, 2, 4, 8))
    short, long = rope(attrs, x, freqs[:4].clone()), rope(attrs, x, freqs)
    assert torch.equal(short, long)


# Channels that pass through


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 3, 6])
@pytest.mark.parametrize("kind", [Rope, RopeBackward])
def test_the_rest_of_a_row_is_copied_bit_for_bit(dtype, offset, kind):
    """C04: with output_scale 1 nothing is multiplied, so NaN, Inf and -0.0 come through."""
    attrs, freqs = table(kind(4, offset, attention_factor=1.5), "half", rows=3)
    x = normal((2, 3, 3, 10), dtype)
    rest = [i for i in range(10) if not offset <= i < offset + 4]
    odd = torch.tensor([nan, inf, -inf, -0.0, 1e-40, 6.1e-5], dtype=dtype)
    x[..., rest] = odd
    got = rope(attrs, x, freqs)[..., rest]
    assert torch.equal(got.contiguous().view(torch.uint8), x[..., rest].view(torch.uint8))


def test_a_neighbour_that_is_not_finite_stays_where_it_is():
    """C04: D=4, r=2, x = (1, 2, Inf, NaN), position 1."""
    freqs = torch.tensor([[0.0], [1.0]]).reshape(2, 1, 1, 1)
    x = torch.tensor([[0.0] * 4, [1, 2, inf, nan]]).reshape(1, 1, 2, 4)
    got = rope(Rope(2, 0, half_width=True), x, freqs)[0, 0, 1].tolist()
    assert got[:3] == pytest.approx([-1.1426, 1.9221, inf], abs=1e-4)
    assert got[3] != got[3]
    scaled = rope(Rope(2, 0, 0.5, half_width=True), x, freqs)[0, 0, 1].tolist()
    assert scaled[:3] == pytest.approx([-0.5713, 0.96105, inf], abs=1e-4)
    assert scaled[3] != scaled[3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_position_0_gives_back_every_finite_number(dtype, is_interleaved):
    """C04: subnormals too; signed zeros compare equal. A bad number spoils its own pair only."""
    attrs = Rope(8, 0, interleaved=is_interleaved, interleaved_output=is_interleaved)
    attrs, freqs = table(attrs, "half", rows=1)
    tiny = float(torch.finfo(dtype).smallest_normal) / 4
    x = torch.tensor([3.0, -0.0, tiny, -7.0, -tiny, 0.0, 1.5, 2.0], dtype=dtype)
    x = x.reshape(1, 1, 1, 8)
    assert torch.equal(rope(attrs, x, torch.zeros_like(freqs)), x)
    for lane in range(8):
        bad = x.clone()
        bad[..., lane] = inf
        got = rope(attrs, bad, torch.zeros_like(freqs))
        (pair,) = [p for p in lanes(attrs, is_interleaved) if lane in p]
        others = [i for i in range(8) if i not in pair]
        assert torch.equal(got[..., others], x[..., others])


# Values known by hand


def by_hand(attrs: Rope, x: list[float], angles: list[float], want: list[float]) -> None:
    freqs = torch.tensor(angles).reshape(1, 1, 1, -1)
    got = rope(attrs, torch.tensor(x, dtype=F32).reshape(1, 1, 1, -1), freqs)
    assert got.reshape(-1).tolist() == pytest.approx(want, abs=2e-5)


HALVES = [-1.98411, 1.95990, 2.46238, 4.01980]
ADJACENT = [cos(1) - 2 * sin(1), 2 * cos(1) + sin(1), 3 - 0.04 - 0.00015, 4 + 0.03 - 0.0002]


@pytest.mark.parametrize(
    ("layout", "angles", "halves"),
    [
        ({"half_width": True}, [1.0, 0.01], HALVES),
        ({"table_layout": "first_half"}, [1.0, 0.01, 0.0, 0.0], HALVES),
        ({"table_layout": "first_half"}, [1.0, 0.01, 1.0, 0.01], HALVES),
        ({"table_layout": "pairs"}, [1.0, 1.0, 0.01, 0.01], HALVES),
        ({"table_layout": "full"}, [1.0, 0.01, 1.0, 0.01], HALVES),
        # a table of pairs read as halves: not a rotation, the squared norm is 34.38 and not 30
        ({"table_layout": "full"}, [1.0, 1.0, 0.01, 0.01], [-1.98411, -2.28528, 3.00985, 4.01980]),
    ],
)
def test_split_halves(layout, angles, halves):
    """C08: x = (1, 2, 3, 4), angles (1, 0.01)."""
    by_hand(Rope(4, 0, **layout), [1, 2, 3, 4], angles, halves)


@pytest.mark.parametrize(
    ("layout", "angles"),
    [
        ({"half_width": True}, [1.0, 0.01]),
        ({"table_layout": "first_half"}, [1.0, 0.01, 0.0, 0.0]),
        ({"table_layout": "pairs"}, [1.0, 1.0, 0.01, 0.01]),
        ({"table_layout": "full"}, [1.0, 1.0, 0.01, 0.01]),
    ],
)
def test_adjacent_pairs(layout, angles):
    both = {"interleaved": True, "interleaved_output": True, **layout}
    by_hand(Rope(4, 0, **both), [1, 2, 3, 4], angles, ADJACENT)


def test_a_unit_vector_shows_its_partner():
    half = Rope(4, 0, half_width=True)
    pairs = replace(half, interleaved=True, interleaved_output=True)
    by_hand(half, [1, 0, 0, 0], [1.0, 0.01], [0.5403, 0, 0.84147, 0])
    by_hand(pairs, [1, 0, 0, 0], [1.0, 0.01], [0.5403, 0.84147, 0, 0])
    by_hand(replace(half, interleaved=True), [1, 0, 0, 0], [1.0, 0.01], [0.5403, 0, 0.84147, 0])
    back = replace(half, interleaved_output=True)
    by_hand(back, [1, 0, 0, 0], [1.0, 0.01], [0.5403, 0.84147, 0, 0])


@pytest.mark.parametrize(
    ("offset", "want"),
    [
        (0, [-1.41335, 1.87912, -2.82886, 4.05819, 5, 6, 7, 8]),
        (4, [1, 2, 3, 4, -5.93780, 5.75734, -6.22435, 8.17637]),
    ],
)
def test_a_partial_rotation_pairs_within_its_segment(offset, want):
    """C09: D = 8, r = 4, position 3, inv_freq (1, 0.01): the partner is i + r/2, not i + D/2."""
    by_hand(Rope(4, offset, half_width=True), list(range(1, 9)), [3.0, 0.03], want)


@pytest.mark.parametrize(("d", "r"), [(6, 6), (10, 10), (7, 6), (8, 2), (3, 2), (2, 2)])
def test_widths_that_no_power_of_two_divides(d, r):
    """C10: r = 6 and r = 10 are slow perhaps, but right."""
    attrs, freqs = table(Rope(r, d - r), "half", rows=3)
    x = normal((1, 2, 3, d))
    got = rope(attrs, x, freqs)
    check(got, formula(attrs, x, freqs), x, attrs)
    assert torch.equal(got[..., : d - r], x[..., : d - r])


# Layouts


def spread(values: Tensor, layout: str) -> Tensor:
    """The same numbers in another layout, NaN around them."""
    if layout == "expanded":
        return values[:1].clone().expand(values.shape)
    if layout == "one element":
        return values[:1, :1, :1, :1].clone().expand(values.shape)
    if layout == "transposed":
        return values.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "every second":
        wide = torch.full((*values.shape[:3], 2 * values.shape[3]), nan, dtype=values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "offset by one":
        store = torch.full((values.numel() + 1,), nan, dtype=values.dtype)
        store[1:] = values.reshape(-1)
        return store[1:].view(values.shape)
    return placed(values, layout)


SPREADS = (*LAYOUTS, "one element", "transposed", "every second", "offset by one")


@pytest.mark.parametrize("layout", SPREADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Rope, RopeBackward])
@pytest.mark.parametrize(("d", "is_interleaved"), [(22, False), (22, True), (64, False)])
def test_any_layout_gives_the_bits_of_the_contiguous_one(layout, dtype, op, d, is_interleaved):
    """C11: expanded and permuted gradients included; the input itself is left as it was."""
    attrs = op(d - 4, 4, 0.3, interleaved=is_interleaved, interleaved_output=is_interleaved)
    attrs, freqs = table(attrs, "half", rows=5)
    x = spread(normal((2, 3, 5, d), dtype), layout)
    want = rope(attrs, x.contiguous(), freqs)
    assert torch.equal(rope(attrs, x, freqs), want)


@pytest.mark.parametrize("layout", [n for n in SPREADS if n not in ("expanded", "one element")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_output_layout_and_nothing_between_its_elements(layout, dtype):
    attrs, freqs = table(Rope(6, 1, 0.3), "half", rows=5)
    x = normal((2, 3, 5, 8), dtype)
    out = spread(torch.full(x.shape, nan, dtype=dtype), layout)
    assert torch.equal(rope(attrs, x, freqs, out), rope(attrs, x, freqs))
    written = int(torch.isfinite(torch.empty(0, dtype=dtype).set_(out.untyped_storage())).sum())
    assert written == x.numel()


@pytest.mark.parametrize("layout", ["transposed", "every second", "offset by one", "expanded"])
def test_any_layout_of_the_table(layout):
    attrs, freqs = table(Rope(8, 0), "half", rows=2, b=2)
    x = normal((2, 3, 2, 8))
    spread_table = spread(freqs, layout)
    assert torch.equal(rope(attrs, x, spread_table), rope(attrs, x, spread_table.contiguous()))


@pytest.mark.parametrize("angle", [1.0, 2.5])
@pytest.mark.parametrize("dim", [(1, 1, 1, 2), (2, 3, 4, 2)])
def test_the_gradient_of_a_sum(angle, dim):
    """C11: autograd hands over one element with all strides 0."""
    dy = torch.ones(()).expand(dim)
    freqs = torch.full((dim[2], 1, 1, 1), angle)
    got = rope(RopeBackward(2, 0, half_width=True), dy, freqs)
    want = torch.tensor([cos(angle) + sin(angle), cos(angle) - sin(angle)]).expand(dim)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("dim", "stride"),
    [
        ((3, 1, 4, 8), (32, 8, 8, 1)),
        ((1, 4, 2, 8), (7, 16, 8, 1)),
        ((1, 1, 1, 8), (3, 5, 7, 1)),
        ((2, 1, 1, 8), (8, 1, 1, 1)),
        ((2, 3, 1, 8), (24, 8, 0, 1)),
    ],
)
def test_strides_of_axes_of_length_1_mean_nothing(dim, stride):
    """C12."""
    attrs, freqs = table(Rope(8, 0), "half", rows=dim[2])
    values = normal(dim)
    x = torch.full((64 + prod(dim),), nan).as_strided(dim, stride).copy_(values)
    out = poisoned(dim, stride=stride)
    assert torch.equal(rope(attrs, x, freqs, out), rope(attrs, values, freqs))


# Nothing to do


@pytest.mark.parametrize("dim", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (0, 0, 0, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_in_gives_nothing_out(dim, dtype):
    """C16."""
    attrs, freqs = table(Rope(8, 0), "half", rows=dim[2])
    x = torch.empty(dim, dtype=dtype)
    for op in (attrs, backward_of(attrs)):
        got = rope(op, x, freqs)
        assert (got.shape, got.dtype) == (x.shape, dtype)
    grad = run(RopeFreqsGrad(**vars(attrs)), {"input": x, "dY": x, "freqs": freqs}, ["dfreqs"])[
        "dfreqs"
    ]
    assert torch.equal(grad, torch.zeros_like(grad))


# Ragged


def ragged_case(lengths: list[int], dtype: torch.dtype, gaps: bool = False) -> Any:
    """Sequences [h, n, d], the buffer they lie in, and its declaration."""
    h, d, s = 3, 8, max(lengths, default=0)
    rows = [normal((1, h, n, d), dtype, seed=i)[0] for i, n in enumerate(lengths)]
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n + (2 if gaps else 0))
    total = starts[-1] + 3
    buffer = packed(rows, total, starts)
    offsets = torch.tensor(starts, dtype=torch.int32).reshape(-1, 1, 1, 1)
    return (
        rows,
        starts,
        Ragged(buffer, (len(lengths), h, s, d), (s * h * d, d, h * d, 1), offsets, h * d),
    )


@pytest.mark.parametrize("lengths", [[3, 5, 1], [0, 2, 0, 3, 0], [4], [0, 0], [1, 1, 1]])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Rope, RopeBackward])
def test_positions_restart_in_every_sequence(lengths, dtype, op):
    """Empty sequences first, in the middle, and last (C16); memory outside of them becomes 0."""
    rows, starts, x = ragged_case(lengths, dtype)
    attrs, freqs = table(op(6, 2, 0.3), "half", rows=max(1, x.dim[2]))
    out = replace(x, buffer=torch.full_like(x.buffer, nan))
    got = rope(attrs, x, freqs, out)
    for start, row in zip(starts, rows, strict=False):
        n = row.shape[1]
        want = rope(attrs, row[None].contiguous(), freqs)[0]
        assert torch.equal(got[start : start + n].transpose(0, 1), want)
    assert torch.equal(got[starts[-1] :], torch.zeros_like(got[starts[-1] :]))


def test_sequences_of_a_batch_have_tables_of_their_own():
    rows, starts, x = ragged_case([2, 4, 3], F32)
    attrs, freqs = table(Rope(8, 0), "half", rows=4, b=3)
    got = rope(attrs, x, freqs, replace(x, buffer=torch.full_like(x.buffer, nan)))
    for i, (start, row) in enumerate(zip(starts, rows, strict=False)):
        want = rope(attrs, row[None].contiguous(), freqs[:, i : i + 1])[0]
        assert torch.equal(got[start : start + row.shape[1]].transpose(0, 1), want)


def test_dead_rows_between_sequences_are_written():
    """C18: a gap holds NaN in the input and zeros in the output. Lengths are those of offsets."""
    rows, _, x = ragged_case([2, 4], F32, gaps=True)
    x.buffer[2:4], x.buffer[8:] = 5.0, nan
    attrs, freqs = table(Rope(8, 0), "half", rows=6)
    got = rope(attrs, replace(x, dim=(2, 3, 6, 8)), freqs,
               replace(x, dim=(2, 3, 6, 8), buffer=torch.full_like(x.buffer, nan)))  # fmt: skip
    assert torch.equal(
        got[: rows[0].shape[1]].transpose(0, 1), rope(attrs, rows[0][None], freqs)[0]
    )
    assert torch.equal(got[10:], torch.zeros_like(got[10:]))


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ([0, 3, 2], "decrease at sequence 1, from 72 to 48"),
        ([-1, 2, 3], "the first offset of .* is -24"),
        ([0, 2, 9], "ends at element 216, past the 144 elements"),
    ],
)
def test_offsets_outside_the_buffer(starts, text):
    """C16, C18: refused, and nothing is written."""
    _, _, x = ragged_case([2, 1], F32)
    x = replace(x, dim=(2, 3, 9, 8), offsets=torch.tensor(starts).reshape(-1, 1, 1, 1))
    attrs, freqs = table(Rope(8, 0), "half", rows=9)
    out = torch.full_like(x.buffer, nan)
    with pytest.raises(PositionError, match=text):
        rope(attrs, x, freqs, replace(x, buffer=out))
    assert bool(out.isnan().all())


def test_a_sequence_may_not_leave_the_buffer_that_was_bound():
    """The memory behind a slice belongs to somebody else."""
    _, _, x = ragged_case([2, 1], F32)
    big = torch.full((20, 3, 8), 5.0)
    attrs, freqs = table(Rope(8, 0), "half", rows=9)
    offsets = torch.tensor([0, 2, 9]).reshape(-1, 1, 1, 1)
    x = replace(x, dim=(2, 3, 9, 8), offsets=offsets, buffer=torch.ones(9, 3, 8))
    with pytest.raises(PositionError, match="past the 144 elements"):
        rope(attrs, x, freqs, replace(x, buffer=big[:6]))
    assert bool((big == 5.0).all())


# Two in one launch, and the gradient of the angles


@pytest.mark.parametrize("op", [Rope, RopeBackward])
@pytest.mark.parametrize("rows", [(5, 5), (3, 5), (5, 3)])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, torch.bfloat16), (F64, F32)])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_pair_is_its_two_parts(op, rows, dtypes, is_shared):
    first, freqs = table(op(8, 0, 0.3), "half", rows=7)
    second = replace(first, output_scale=-2.0)
    other = freqs if is_shared else freqs.flip(0)
    x = [normal((2, 3 + i, rows[i], 8), dtypes[i], seed=i) for i in range(2)]
    ports = ("input", "output") if op is Rope else ("dY", "dX")
    got = run(
        RopePair((first, second)),
        {f"{ports[0]}0": x[0], "freqs0": freqs, f"{ports[0]}1": x[1], "freqs1": other},
        {f"{ports[1]}{i}": poisoned(x[i].shape, dtypes[i]) for i in range(2)},
    )
    assert torch.equal(got[f"{ports[1]}0"], rope(first, x[0], freqs))
    assert torch.equal(got[f"{ports[1]}1"], rope(second, x[1], other))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("read", "written"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_the_gradient_of_the_angles(kind, b, inverse, read, written, dtype):
    attrs = Rope(6, 1, 0.7, 1.3, interleaved=read, interleaved_output=written, inverse=inverse)
    attrs, freqs = table(attrs, kind, rows=7, b=b, dtype=dtype)
    x, dy = normal((2, 3, 5, 8), dtype, seed=1), normal((2, 3, 5, 8), dtype, seed=2)
    leaf = torch.nan_to_num(freqs).double().requires_grad_()
    (want,) = torch.autograd.grad(formula(attrs, x, leaf), leaf, dy.double())
    op = RopeFreqsGrad(**vars(attrs))
    out = poisoned(freqs.shape, dtype)
    run(op, {"input": x, "dY": dy, "freqs": freqs}, {"dfreqs": out})
    size = float(want.abs().max())
    assert float((out.double() - want).abs().max()) <= (1e-13 if dtype is F64 else 1e-5) * size
    assert torch.equal(out[5:], torch.zeros_like(out[5:])), "rows that no position reads"


@pytest.mark.parametrize("layout", ["expanded", "one element", "bshd", "every second"])
def test_the_gradient_of_the_angles_in_any_layout(layout):
    attrs, freqs = table(Rope(8, 0), "half", rows=5)
    op = RopeFreqsGrad(**vars(attrs))
    x, dy = normal((2, 3, 5, 8), F64, seed=1), spread(normal((2, 3, 5, 8), F64, seed=2), layout)
    got = [
        run(op, {"input": x, "dY": g, "freqs": freqs}, ["dfreqs"])["dfreqs"]
        for g in (dy, dy.contiguous())
    ]
    assert torch.equal(*got)


# Products and sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", SPREADS)
def test_scale_is_one_product(dtype, layout):
    x = spread(normal((2, 3, 5, 8), dtype), layout)
    got = run(Scale(0.3), {"input": x}, ["output"])["output"]
    wide = x.contiguous().to(F64 if dtype is F64 else F32)
    assert torch.equal(got, (wide * 0.3).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_is_rounded_once(dtype):
    terms = [normal((2, 3, 5, 8), dtype, layout, seed=i) for i, layout in enumerate(LAYOUTS)]
    got = run(Sum(), {str(i): t for i, t in enumerate(terms)}, ["output"])["output"]
    want = sum(t.double() for t in terms)
    assert bool(((got.double() - want).abs() <= want.abs() * torch.finfo(dtype).eps + 2e-6).all())


@pytest.mark.parametrize("op", [Scale(0.5), Sum()])
def test_products_and_sums_of_ragged_tensors(op):
    rows, starts, x = ragged_case([3, 0, 2], F32)
    inputs = {"input": x} if isinstance(op, Scale) else {"0": x, "1": x}
    out = replace(x, buffer=torch.full_like(x.buffer, nan))
    got = run(op, inputs, {"output": out})["output"]
    factor = 0.5 if isinstance(op, Scale) else 2.0
    for start, row in zip(starts, rows, strict=False):
        assert torch.equal(got[start : start + row.shape[1]].transpose(0, 1), factor * row)
    assert torch.equal(got[starts[-1] :], torch.zeros_like(got[starts[-1] :]))


def test_strides_of_the_test_itself():
    assert strides((2, 3, 5, 8)) == (120, 40, 8, 1)
