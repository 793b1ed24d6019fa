"""Positions that are awkward or wrong: packed sequences, dead rows, context parallel, bounds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.reference import Reference
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.errors import PositionError
from ropegraph.ir.ops import Rope, RopeBackward, RopeFreqsGrad
from ropegraph.lowering.engine import Engine
from ropegraph.testing.inputs import normal, poisoned
from tests.engines import steps
from tests.engines.rotations import F32, F64, INT32, INT64, chunks
from tests.engines.steps import Ragged

ENGINES: list[Engine] = [TorchExecutor(), Reference()]
TORCH = ENGINES[0]
engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
ONE = Rope(2, 0, half_width=True)  # one pair
INV = replace(ONE, angles="inv_freq")


def turn(engine: Engine, attrs: Rope, x: Any, out: Any = None, **ports: Tensor) -> Tensor:
    outputs = ["output"] if out is None else {"output": out}
    return steps.run(attrs, {"input": x, **ports}, outputs, engine)["output"]


def turn_back(engine: Engine, attrs: Rope, dy: Any, **ports: Tensor) -> Tensor:
    back = RopeBackward(**vars(attrs))
    return steps.run(back, {"dY": dy, **ports}, ["dX"], engine)["dX"]


def ints(*numbers: Any, dtype: torch.dtype = INT32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def seen(y: Tensor) -> list[int | None]:
    """The positions by which (1, 0) was turned with inv_freq 0.1, None for a row of zeros."""
    found: list[int | None] = []
    for c, s in y.double().reshape(-1, 2).tolist():
        angle = torch.atan2(torch.tensor(s), torch.tensor(c)).item() % (2 * torch.pi)
        found.append(None if c == s == 0 else round(angle / 0.1))
    return found


def positions(engine: Engine, s: int, b: int = 1, attrs: Rope = INV, **ports: Tensor) -> list[Any]:
    x = torch.tensor([1.0, 0.0]).expand(b, 1, s, 2)
    by = {"inv_freq": torch.tensor([0.1]), **ports}
    rows = seen(turn(engine, attrs, x, **by))
    back = turn_back(engine, replace(attrs, inverse=True), x, **by)
    assert seen(back) == rows
    return rows


def refused(engine: Engine, attrs: Rope, s: int, *parts: str, b: int = 1, **ports: Tensor) -> None:
    """A PositionError with all parts, forward and backward, and nothing is written."""
    x = torch.ones(b, 1, s, 2)
    for op, port, made in (
        (attrs, "input", "output"),
        (RopeBackward(**vars(attrs)), "dY", "dX"),
    ):
        out = poisoned(x.shape)
        with pytest.raises(PositionError) as caught:
            steps.run(op, {port: x, **ports}, {made: out}, engine)
        assert isinstance(caught.value, IndexError)
        assert isinstance(caught.value, ValueError)
        assert bool(out.isnan().all())
        if engine is TORCH:
            for part in parts:
                assert part in str(caught.value)


# C18


@engines
@pytest.mark.parametrize("dtype", [INT32, INT64])
def test_rows_outside_every_sequence_are_zero(engine, dtype):
    x = torch.full((1, 1, 6, 2), torch.nan)
    x[:, :, :4] = torch.tensor([1.0, 0.0])
    cu = ints(0, 2, 4, dtype=dtype)
    by = {"inv_freq": torch.tensor([0.1]), "cu_seqlens": cu}
    assert seen(turn(engine, INV, x, **by)) == [0, 1, 0, 1, None, None]
    assert seen(turn_back(engine, replace(INV, inverse=True), x, **by)) == [0, 1, 0, 1, None, None]
    # rows before the first sequence are of none, too
    assert positions(engine, 6, cu_seqlens=ints(1, 3, 4)) == [None, 0, 1, 0, None, None]


@engines
def test_a_scale_and_a_prefix_do_not_revive_a_dead_row(engine):
    attrs = Rope(2, 1, 3.0, angles="inv_freq", half_width=True)
    x = torch.full((1, 2, 4, 4), torch.inf)
    x[:, :, :3] = 1.0
    by = {"inv_freq": torch.tensor([0.1]), "cu_seqlens": ints(0, 3)}
    assert not turn(engine, attrs, x, **by)[:, :, 3:].any()
    assert not turn_back(engine, attrs, x, **by)[:, :, 3:].any()


@engines
def test_padded_offsets_are_ragged_data(engine):
    # lengths [2, 1] at rows 0 and 4 of 6: gaps at 2, 3 and 5
    buffer = torch.full((6, 1, 2), torch.nan)
    buffer[[0, 1, 4]] = torch.tensor([1.0, 0.0])
    offsets = ints(0, 4, 6) * 2
    # The whole slots belong to the sequences; rows past a length are turned as they are.
    given = Ragged(buffer.nan_to_num(), (2, 1, 4, 2), (8, 2, 2, 1), offsets)
    out = Ragged(poisoned((6, 1, 2)), given.dim, given.stride, offsets)
    got = turn(engine, INV, given, out, inv_freq=torch.tensor([0.1]))
    assert seen(got) == [0, 1, None, None, 0, None]


# C16


@engines
@pytest.mark.parametrize(
    ("cu", "rows"),
    [
        ((0, 0, 2, 2, 5, 5), [0, 1, 0, 1, 2]),
        ((0, 1, 1, 2), [0, 0, None, None, None]),
        ((0, 0, 0), [None] * 5),
        ((0,), [None] * 5),
        ((5, 5), [None] * 5),
    ],
)
def test_empty_sequences(engine, cu, rows):
    assert positions(engine, 5, cu_seqlens=ints(*cu)) == rows
    if len(cu) > 1:
        starts = torch.arange(len(cu) - 1)
        assert positions(engine, 5, cu_seqlens=ints(*cu), start_positions=starts) == [
            p if p is None else p + owner(cu, i) for i, p in enumerate(rows)
        ]


def owner(cu: tuple[int, ...], row: int) -> int:
    return next(i for i in range(len(cu) - 1) if cu[i] <= row < cu[i + 1])


@engines
@pytest.mark.parametrize("dim", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
@pytest.mark.parametrize("source", ["freqs", "inv_freq"])
def test_nothing_to_rotate(engine, dim, source):
    b, _, s, _ = dim
    attrs = Rope(4, 0, angles=source, half_width=True)
    table = torch.ones(5, 1, 1, 2) if source == "freqs" else torch.ones(2)
    x = torch.empty(dim)
    for ports in (
        {},
        {"position_ids": torch.zeros(b, s, dtype=INT32)},
        {"start_positions": torch.zeros(b, dtype=INT64)},
    ):
        assert turn(engine, attrs, x, **{source: table}, **ports).shape == dim
    if b:
        x = torch.empty(1, 2, 0, 4)
        got = turn(engine, attrs, x, **{source: table}, cu_seqlens=ints(0, 0, 0))
        assert got.shape == (1, 2, 0, 4)
    if source == "freqs":
        inputs = {"input": x, "dY": x, "freqs": table}
        grad = steps.run(RopeFreqsGrad(**vars(attrs)), inputs, ["dfreqs"], engine)["dfreqs"]
        assert not grad.any()


# C19, C20


@engines
def test_dual_chunks(engine):
    for rank, own in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        attrs = replace(INV, cp_size=2, cp_rank=rank)
        assert positions(engine, 4, attrs=attrs) == own
        assert positions(engine, 4, attrs=attrs, start_positions=ints(9)) == [9 + p for p in own]
    for rank, own in enumerate(([0, 3, 0, 3], [1, 2, 1, 2])):
        attrs = replace(INV, cp_size=2, cp_rank=rank)
        assert positions(engine, 4, attrs=attrs, cu_seqlens=ints(0, 4, 8)) == own
        # A table a token: position_ids say which row, for nothing is told from its length.
    for ids in ([0, 3, 4, 7], [1, 2, 5, 6]):
        assert positions(engine, 4, position_ids=ints(ids)) == ids


@engines
def test_padded_packed_sequences_on_two_ranks(engine):
    # A sequence of 7 padded to 8, as its owner has to.
    for rank, own in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        attrs = replace(INV, cp_size=2, cp_rank=rank)
        assert positions(engine, 4, attrs=attrs, cu_seqlens=ints(0, 8)) == own


@engines
def test_lengths_that_two_ranks_cannot_share(engine):
    attrs = replace(INV, cp_size=2)
    by = {"inv_freq": torch.tensor([0.1])}
    text = "which 2*cp_size=4 does not divide"
    refused(engine, attrs, 4, "sequence 0 has length 7", text, cu_seqlens=ints(0, 7), **by)
    refused(engine, attrs, 4, "sequence 0 has length 3", text, cu_seqlens=ints(0, 3, 8), **by)
    refused(engine, attrs, 4, "sequence 1 has length 2", text, cu_seqlens=ints(0, 4, 6), **by)


@engines
def test_ragged_lengths_that_two_ranks_cannot_share(engine):
    buffer = torch.ones(5, 1, 2)
    given = Ragged(buffer, (2, 1, 4, 2), (8, 2, 2, 1), ints(0, 4, 10))
    out = Ragged(poisoned((5, 1, 2)), given.dim, given.stride, given.offsets)
    with pytest.raises(PositionError, match=r"sequence 1 .*2\*cp_size=4"):
        turn(engine, replace(INV, cp_size=2), given, out, inv_freq=torch.ones(1))
    assert bool(out.buffer.isnan().all())


@pytest.mark.parametrize("source", ["freqs", "inv_freq", "exact", "cos_sin"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_all_ranks_together_are_one(source, size):
    """The concatenation of all ranks, dense and packed, equals cp_size=1 to the bit."""
    b, h, s, d = 2, 3, 48, 10
    x = normal((b, h, s, d), F32, seed=1)
    attrs, ports = angles(source, 6, s + 8)
    starts = ints(3, 0)
    for op in (turn, turn_back):
        whole = op(TORCH, attrs, x, **ports)
        later = op(TORCH, attrs, x, **ports, start_positions=starts)
        cu = ints(0, 16, 16, 48)
        packed = op(TORCH, attrs, x[:1], **ports, cu_seqlens=cu)
        for rank in range(size):
            rows = chunks(range(s), size, rank)
            one = replace(attrs, cp_size=size, cp_rank=rank)
            own = x[:, :, rows].contiguous()
            assert torch.equal(op(TORCH, one, own, **ports), whole[:, :, rows])
            got = op(TORCH, one, own, **ports, start_positions=starts)
            assert torch.equal(got, later[:, :, rows])
            if size in (1, 2, 4, 8):
                first, last = range(16), range(16, 48)
                rows = chunks(first, size, rank) + chunks(last, size, rank)
                own = x[:1, :, rows].contiguous()
                got = op(TORCH, one, own, **ports, cu_seqlens=cu)
                assert torch.equal(got, packed[:, :, rows])


def angles(source: str, r: int, rows: int) -> tuple[Rope, dict[str, Tensor]]:
    attrs = Rope(r, 1, half_width=True)
    if source in ("inv_freq", "exact"):
        precision = "exact" if source == "exact" else "float32"
        attrs = replace(attrs, angles="inv_freq", angle_precision=precision)
        return attrs, {"inv_freq": 0.7 ** torch.arange(r // 2)}
    table = 20 * normal((rows, 1, 1, r // 2), F32, seed=5)
    if source == "freqs":
        return attrs, {"freqs": table}
    return replace(attrs, angles="cos_sin"), {"cos": table.cos(), "sin": table.sin()}


@pytest.mark.parametrize("source", ["freqs", "inv_freq", "exact", "cos_sin"])
@pytest.mark.parametrize("seed", range(3))
def test_packed_is_the_loop_over_sequences(source, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 20, (7,), generator=g).tolist()
    starts = torch.randint(0, 9, (7,), generator=g)
    attrs, ports = angles(source, 6, 40)
    x = normal((1, 3, sum(lengths) + 2, 9), F32, seed=seed)
    cu = ints(*(sum(lengths[:i]) for i in range(8)))
    for op in (turn, turn_back):
        got = op(TORCH, attrs, x, **ports, cu_seqlens=cu)
        later = op(TORCH, attrs, x, **ports, cu_seqlens=cu, start_positions=starts)
        for i, n in enumerate(lengths):
            own = slice(int(cu[i]), int(cu[i]) + n)
            one = x[:, :, own].contiguous()
            assert torch.equal(op(TORCH, attrs, one, **ports), got[:, :, own])
            at = op(TORCH, attrs, one, **ports, start_positions=starts[i : i + 1])
            assert torch.equal(at, later[:, :, own])


# C43


@engines
def test_positions_beyond_the_table(engine):
    table = torch.ones(4, 1, 1, 1)
    for source in ("freqs", "cos_sin", "packed"):
        attrs = replace(ONE, angles=source)
        ports = {
            "freqs": {"freqs": table},
            "cos_sin": {"cos": table, "sin": table},
            "packed": {"cos_sin": table.repeat(1, 1, 1, 2)},
        }[source]
        name = next(iter(ports))
        rows = f"outside of the 4 rows of {name}"
        text = ("row 1 of batch entry 0 has position 4", rows, "positions from 0 to 3")
        refused(engine, attrs, 2, *text, **ports, start_positions=ints(3))
        text = ("row 2 of batch entry 0 has position 4", rows)
        refused(engine, attrs, 3, *text, b=2, **ports, start_positions=ints(2, 0))
        text = ("row 1 of batch entry 1 has position 9", rows)
        refused(engine, attrs, 2, *text, b=2, **ports, position_ids=ints([0, 1], [3, 9]))
        text = ("row 0 of batch entry 0 has position -1", rows)
        refused(engine, attrs, 2, *text, **ports, position_ids=ints([-1, 0]))
        text = ("row 6 of sequence 1 has position 4", rows)
        refused(engine, attrs, 9, *text, **ports, cu_seqlens=ints(0, 2, 8))
        text = ("row 2 of sequence 1 has position 5", rows)
        cu, starts = ints(0, 2, 4), ints(0, 5)
        refused(engine, attrs, 9, *text, **ports, cu_seqlens=cu, start_positions=starts)


@engines
def test_with_inv_freq_any_position_is_valid(engine):
    x = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2).expand(1, 1, 2, 2)
    by = {"inv_freq": torch.ones(1)}
    got = turn(engine, INV, x, **by, position_ids=ints([-1, 0]))
    want = torch.tensor([[0.5403, -0.8415], [1.0, 0.0]])
    torch.testing.assert_close(got[0, 0], want, atol=1e-4, rtol=0)
    assert bool(turn(engine, INV, x, **by, start_positions=ints(3)).isfinite().all())
    assert bool(turn(engine, INV, x, **by, start_positions=ints(-(2**31))).isfinite().all())


@engines
@pytest.mark.parametrize("precision", ["float32", "exact"])
@pytest.mark.parametrize("packed", [False, True])
def test_positions_do_not_wrap_at_the_end_of_int64(engine, precision, packed):
    """fp64 has no number between 2^63 - 512 and 2^63 + 2048: the last int64 is the position."""
    attrs = replace(INV, angle_precision=precision)
    x = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2).double()
    by = {"inv_freq": torch.tensor([1e-15])}
    start = ints(2**63 - 2, dtype=INT64)
    rows = {"cu_seqlens": ints(0, 4)} if packed else {}
    got = turn(engine, attrs, x, **by, **rows, start_positions=start)
    want = turn(engine, attrs, x, **by, position_ids=ints([2**63 - 1] * 4, dtype=INT64))
    assert torch.equal(got, want)
    assert bool((got[..., 1] < -0.3).all())  # the sine of 9223 radians; of -9223 it is positive
    refused(
        engine, ONE, 4, "row 0", "position 9223372036854775806", freqs=torch.ones(9, 1, 1, 1),
        start_positions=start, **rows,
    )  # fmt: skip


@engines
@pytest.mark.parametrize("source", ["freqs", "inv_freq", "exact", "cos_sin"])
def test_start_and_ids_give_the_same_bits(engine, source):
    attrs, ports = angles(source, 6, 40)
    x = normal((1, 3, 2, 9), F32)
    by_start = turn(engine, attrs, x, **ports, start_positions=ints(4))
    by_ids = turn(engine, attrs, x, **ports, position_ids=ints([4, 5], dtype=INT64))
    assert torch.equal(by_start, by_ids)
    # and those that a longer tensor has there
    longer = torch.cat([torch.zeros(1, 3, 4, 9), x], dim=2)
    assert torch.equal(turn(engine, attrs, longer, **ports)[:, :, 4:], by_start)


@engines
def test_cu_seqlens_that_do_not_fit(engine):
    for attrs, by in (
        (INV, {"inv_freq": torch.ones(1)}),
        (ONE, {"freqs": torch.ones(9, 1, 1, 1)}),
    ):
        text = "cu_seqlens decreases at sequence 1, from 4 to 2; give a running sum"
        refused(engine, attrs, 5, text, **by, cu_seqlens=ints(0, 4, 2))
        text = "sequence 1 ends at token 6, past the 5 tokens of"
        refused(engine, attrs, 5, text, **by, cu_seqlens=ints(0, 4, 6))
        refused(engine, attrs, 5, "starts at -1", **by, cu_seqlens=ints(-1, 4))
    attrs = replace(INV, cp_size=2)
    text = ("sequence 0 ends at token 12, past the 10 tokens of", "on 2 ranks")
    refused(engine, attrs, 5, *text, inv_freq=torch.ones(1), cu_seqlens=ints(0, 12))


@engines
def test_the_gradient_of_freqs_refuses_the_same(engine):
    x, table = torch.ones(1, 1, 2, 2), torch.ones(4, 1, 1, 1)
    out = poisoned(table.shape)
    inputs = {"input": x, "dY": x, "freqs": table, "start_positions": ints(3)}
    with pytest.raises(PositionError, match="position 4"):
        steps.run(RopeFreqsGrad(**vars(ONE)), inputs, {"dfreqs": out}, engine)
    assert bool(out.isnan().all())


# ragged data


@engines
@pytest.mark.parametrize("source", ["freqs", "inv_freq", "cos_sin"])
def test_ragged_sequences_start_anywhere_on_any_rank(engine, source):
    h, d, lengths, starts = 2, 9, (4, 0, 2), (3, 9, 0)
    attrs, ports = angles(source, 6, 40)
    x = normal((6, h, d), F64, seed=3)
    offsets = ints(0, 4, 4, 6) * h * d
    dim, stride = (3, h, 6, d), (6 * h * d, d, h * d, 1)
    for size, rank in ((1, 0), (2, 1), (3, 0)):
        own = replace(attrs, cp_size=size, cp_rank=rank)
        given = Ragged(x, dim, stride, offsets)
        out = Ragged(poisoned((6, h, d), F64), dim, stride, offsets)
        got = turn(engine, own, given, out, **ports, start_positions=ints(*starts))
        at = 0
        for n, start in zip(lengths, starts, strict=True):
            rows = [start + p for p in (chunks(range(n * size), size, rank) if n else [])]
            if size == 1:
                rows = [start + p for p in range(n)]
            one = x[at : at + n].transpose(0, 1)[None]
            want = turn(engine, attrs, one, **ports, position_ids=ints(rows))
            assert torch.equal(got[at : at + n].transpose(0, 1)[None], want)
            at += n


@engines
def test_a_ragged_sequence_past_the_table(engine):
    given = Ragged(torch.ones(5, 1, 2), (2, 1, 4, 2), (8, 2, 2, 1), ints(0, 4, 10))
    out = Ragged(poisoned((5, 1, 2)), given.dim, given.stride, given.offsets)
    table = torch.ones(4, 1, 1, 1)
    # sequence 0 has 2 rows and may start at 2, sequence 1 has 3
    turn(engine, ONE, given, out, freqs=table, start_positions=ints(2, 1))
    out = Ragged(poisoned((5, 1, 2)), given.dim, given.stride, given.offsets)
    with pytest.raises(PositionError, match=r"row 2 of (sequence|batch entry) 1 has position 4"):
        turn(engine, ONE, given, out, freqs=table, start_positions=ints(2, 2))
    assert bool(out.buffer.isnan().all())


# angle_precision


@pytest.mark.parametrize("dtype", [F32, F64])
def test_exact_angles_are_within_one_ulp_up_to_2_24(dtype):
    g = torch.Generator().manual_seed(0)
    position = torch.cat([
        torch.randint(0, 2**24 + 1, (1, 500), generator=g),
        torch.tensor([[0, 1, 2**17, 2**17 + 1, 2**24 - 1, 2**24, -(2**24)]]),
    ], dim=1)  # fmt: skip
    inv_freq = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    attrs = Rope(16, 0, angles="inv_freq", angle_precision="exact", half_width=True)
    x = torch.cat([torch.ones(8), torch.zeros(8)]).to(dtype).expand(1, 1, position.shape[1], 16)
    y = turn(TORCH, attrs, x, inv_freq=inv_freq, position_ids=position)[0, 0]
    angle = position[0, :, None].double() * inv_freq.double()
    want = torch.cat([angle.cos(), angle.sin()], dim=1)
    ulp = 2.0 ** (torch.frexp(want)[1] - 24).double()
    assert bool(((y.double() - want).abs() <= ulp).all())


def test_float32_angles_round_the_product_once():
    position = torch.tensor([[65536, 65537, 2**20 + 1, 2**24 + 1, -7]])
    inv_freq = torch.tensor([1.0, 0.01, 0.3])
    x = torch.cat([torch.ones(3), torch.zeros(3)]).expand(1, 1, 5, 6)
    attrs = Rope(6, 0, angles="inv_freq", half_width=True)
    y = turn(TORCH, attrs, x, inv_freq=inv_freq, position_ids=position)[0, 0]
    angle = (position[0, :, None].float() * inv_freq).double()
    want = torch.cat([angle.cos(), angle.sin()], dim=1)
    torch.testing.assert_close(y.double(), want, rtol=0, atol=1e-7)
