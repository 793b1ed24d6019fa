"""Positions on the CPU under sanitizers: wrong ones, chunks of ranks, packed sequences."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropegraph.ir.ops import Rope, RopeBackward, RopePair
from ropegraph.testing.inputs import normal
from tests.kernels.cases import Case, Ragged, Run, bits, case, check, like
from tests.kernels.oracle import expected
from tests.kernels.test_host import PAIRS, adjoint, rotation, table

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
ORDER, REACH, POSITION, CHUNKS = 1, 2, 4, 8
UNWRITTEN = 77.0


def ints(*numbers: int, dtype: torch.dtype = I32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def unwritten(x: Tensor) -> Tensor:
    return torch.full_like(x, UNWRITTEN)


def placed(
    x: Tensor, rows: int, op: Rope, *, in_place: bool = False, **positions: Tensor
) -> Case:  # fmt: skip
    """The op on x with a table of ``rows`` rows, cosines and sines if the op reads them."""
    freqs = table(random.Random(rows), rows, op.rope_dim)
    angles = {"freqs": freqs}
    if op.angles == "cos_sin":
        angles = {"cos": freqs.cos().bfloat16(), "sin": freqs.sin().bfloat16()}
    y = x if in_place else unwritten(x)
    if isinstance(op, RopeBackward):
        return case(op, dY=x, **angles, **positions, dX=y)
    return case(op, input=x, **angles, **positions, output=y)


def run_flagged(given: list[tuple[str, Case, int]], run: Run) -> None:
    """Run; check rows against the oracle and each flag against what is wrong."""
    wants = [expected(one) for _, one, _ in given]
    run([one for _, one, _ in given])
    for (what, one, flag), want in zip(given, wants, strict=True):
        assert one.flag.item() == flag, what
        check(one, want, what)
        for port in want:
            assert not (one.at(port) == UNWRITTEN).any(), what


def test_positions_outside_the_table_are_nan_and_flagged(run: Run) -> None:
    """C43: no read out of bounds, no row left unwritten, no other row touched."""
    far = ints(2**62, -(2**63), 3, dtype=I64)
    given: list[tuple[str, Case, int]] = []
    # One head takes several tokens a warp; 24 channels of 40 pass.
    for op, h in (
        (Rope(16, 8), 1), (Rope(16, 24, 0.5, angles="cos_sin"), 5), (adjoint(Rope(16, 0)), 1)
    ):  # fmt: skip
        x = normal((2, h, 3, 40), BF16, "bshd")
        starts = {"start_positions": ints(2, 0, dtype=I64)}
        mixed = ints(-1, 0, 4, dtype=I64)[None]
        given += [
            (f"{op}, in the table", placed(x, 5, op, **starts), 0),
            (f"{op}, starts", placed(x, 4, op, **starts), POSITION),
            (f"{op}, ids", placed(x, 4, op, position_ids=mixed), POSITION),
            (f"{op}, far", placed(x, 4, op, position_ids=far[None]), POSITION),
            (f"{op}, in place", placed(x.clone(), 4, op, in_place=True, **starts), POSITION),
            (f"{op}, far starts", placed(x, 4, op, start_positions=far[:2]), POSITION),
        ]
    x = normal((1, 2, 5, 8), BF16)
    bounds = {"cu_seqlens": ints(0, 3, 5)}
    given += [
        ("longer than the table", placed(x, 2, Rope(8, 0), **bounds), POSITION),
        ("packed", placed(x, 4, Rope(4, 0), start_positions=ints(1, 2), **bounds), 0),
        ("packed, far", placed(x, 4, Rope(4, 0), start_positions=ints(2, -1), **bounds), POSITION),
    ]
    run_flagged(given, run)


def test_a_made_angle_takes_any_position(run: Run) -> None:
    """C43: -1 turns back, and 4, 5 by start or by position_ids are the same bits."""
    one = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2).expand(1, 1, 2, 2).contiguous()

    def made(precision: str, **positions: Tensor) -> Case:
        op = Rope(2, 0, angles="inv_freq", angle_precision=precision)  # type: ignore[arg-type]
        return case(op, input=one, inv_freq=torch.ones(1), **positions, output=like(one))

    cases = [
        made(precision, **positions)
        for precision in ("float32", "exact")
        for positions in (
            {"position_ids": ints(-1, 0, dtype=I64)[None]},
            {"position_ids": ints(4, 5, dtype=I64)[None]},
            {"start_positions": ints(4)},
            {"position_ids": ints(2**62, -(2**63), dtype=I64)[None]},
        )
    ]
    run(cases)
    for back, by_ids, by_start, far in (cases[:4], cases[4:]):
        got = back.at("output")[0, 0]
        torch.testing.assert_close(got[0], torch.tensor([0.5403, -0.8415]), atol=1e-4, rtol=0)
        assert got[1].tolist() == [1.0, 0.0]
        assert torch.equal(bits(by_ids.at("output")), bits(by_start.at("output")))
        lengths = far.at("output").square().sum(-1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths), atol=1e-6, rtol=0)
        assert not any(given.flag.item() for given in (back, by_ids, by_start, far))


def test_positions_do_not_wrap_at_the_end_of_int64(run: Run) -> None:
    """The last int64 is the position; a table has no such row."""
    one = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2).expand(1, 1, 4, 2).contiguous()
    ids = ints(2**63 - 1, dtype=I64).expand(1, 4).contiguous()
    cases: list[Case] = []
    for precision in ("float32", "exact"):
        op = Rope(2, 0, angles="inv_freq", angle_precision=precision)  # type: ignore[arg-type]
        for cp_size in (1, 2):
            by = {"start_positions": ints(2**63 - 2, dtype=I64), "inv_freq": torch.tensor([1e-15])}
            rank = replace(op, cp_size=cp_size, cp_rank=cp_size - 1)
            cases.append(case(rank, input=one, **by, output=like(one)))
        by = {"position_ids": ids, "inv_freq": torch.tensor([1e-15])}
        cases.append(case(op, input=one, **by, output=like(one)))
    run(cases)
    for *by_start, by_ids in (cases[:3], cases[3:]):
        assert bool((by_ids.at("output")[..., 1] < -0.3).all())
        for given in by_start:
            assert torch.equal(bits(given.at("output")), bits(by_ids.at("output")))
    far = placed(one, 4, Rope(2, 0), start_positions=ints(2**63 - 2, dtype=I64))
    run_flagged([("table", far, POSITION)], run)


def test_wrong_bounds_are_never_followed(run: Run) -> None:
    """C16, C20: bounds that decrease, reach too far or cannot be cut into chunks."""
    x = normal((1, 3, 6, 8), BF16, "bshd")
    two = Rope(8, 0, cp_size=2, cp_rank=1)
    plans: list[tuple[str, Rope, Tensor, int, set[int]]] = [
        ("right", Rope(8, 0), ints(0, 0, 2, 2, 5, 5), 0, {0, 1, 2, 3, 4}),
        ("decreasing", Rope(8, 0), ints(0, 4, 2, 6), ORDER, {0, 1, 2, 3}),
        ("negative", Rope(8, 0), ints(-3, 2, 4, 6), ORDER, {4, 5}),
        ("past the end", Rope(8, 0), ints(0, 2, 4, 7), REACH, {0, 1, 2, 3}),
        ("far", Rope(8, 0), ints(0, 2, 2**62, 2**63 - 1, dtype=I64), REACH, {0, 1}),
        ("7 by 4", two, ints(0, 7), CHUNKS, set()),
        ("3 and 5 by 4", two, ints(0, 3, 8), CHUNKS, set()),
        ("the second alone", two, ints(0, 4, 10), CHUNKS, {0, 1}),
        ("past the end by 2", two, ints(0, 4, 16), REACH, {0, 1}),
    ]
    cases = [placed(x, 12, op, cu_seqlens=bounds) for _, op, bounds, _, _ in plans]
    run(cases)
    for given, (what, _, bounds, flag, right) in zip(cases, plans, strict=True):
        assert given.flag.item() & flag if flag else not given.flag.item(), what
        y = given.at("output")[0]
        assert not (y == UNWRITTEN).any(), what
        for token in range(6):
            is_whole = bool(torch.isfinite(y[:, token].float()).all())
            is_free = token >= bounds[-1] // given.step.node.attrs.cp_size  # type: ignore[union-attr]
            assert is_whole == (token in right or bool(is_free)), f"{what}: token {token}"
            if is_free:
                assert not y[:, token].any(), f"{what}: token {token}"


def test_ragged_lengths_that_cannot_be_cut(run: Run) -> None:
    h, d = 2, 8
    offsets = ints(0, 4, 7) * h * d
    x = Ragged(normal((1, h, 9, d), BF16, "bshd"), (2, h, 8, d), (8 * h * d, d, h * d, 1), offsets)
    y = replace(x, buffer=unwritten(x.buffer))
    freqs = table(random.Random(3), 16, d)
    given = case(Rope(8, 0, cp_size=2), input=x, freqs=freqs, output=y)
    run_flagged([("ragged", given, CHUNKS)], run)


@pytest.mark.parametrize("op", [Rope(2, 0), RopeBackward(2, 0)])
def test_rows_of_no_sequence_become_zero(op: Rope | RopeBackward, run: Run) -> None:
    """C18: NaN in rows before, after and between what is real does not come through."""
    x = normal((1, 1, 6, 2), F32)
    x[:, :, 4:] = torch.nan
    given = [
        ("after", placed(x, 6, op, cu_seqlens=ints(0, 2, 4)), 0),  # type: ignore[arg-type]
        ("none", placed(x, 6, op, cu_seqlens=ints(0)), 0),  # type: ignore[arg-type]
        ("before", placed(x.flip(2), 6, op, cu_seqlens=ints(2, 4, 6)), 0),  # type: ignore[arg-type]
    ]
    run_flagged(given, run)
    assert not given[0][1].at(given[0][1].written[0])[:, :, 4:].any()


def positions_read(given: Case) -> list[int]:
    """Of x = (1, 0) turned by 0.1 radians a position."""
    y = given.at("output")[0, 0]
    return torch.atan2(y[:, 1], y[:, 0]).div(0.1).round().int().tolist()


def test_positions_of_ranks(run: Run) -> None:
    """C19: dense, with sequences, and with starts."""

    def held(n: int, rank: int, **positions: Tensor) -> Case:
        x = torch.tensor([1.0, 0.0]).expand(1, 1, n, 2).contiguous()
        op = Rope(2, 0, half_width=True, cp_size=2, cp_rank=rank)
        freqs = (torch.arange(16.0) / 10).reshape(16, 1, 1, 1)
        return case(op, input=x, freqs=freqs, **positions, output=like(x))

    packed = {"cu_seqlens": ints(0, 4, 8)}
    cases = [
        *(held(4, rank) for rank in (0, 1)),
        *(held(4, rank, **packed) for rank in (0, 1)),
        *(held(4, rank, **packed, start_positions=ints(5, 1)) for rank in (0, 1)),
    ]
    run(cases)
    assert [positions_read(given) for given in cases] == [
        [0, 1, 6, 7], [2, 3, 4, 5], [0, 3, 0, 3], [1, 2, 1, 2], [5, 8, 1, 4], [6, 7, 2, 3],
    ]  # fmt: skip


@pytest.mark.parametrize("is_packed", [False, True])
def test_ranks_together_equal_one(is_packed: bool, run: Run) -> None:
    """Bit for bit, forward and adjoint, starts included."""
    rng = random.Random(int(is_packed))
    lengths = [24, 0, 48] if is_packed else [48]
    total, starts = sum(lengths), torch.tensor([3, 1, 0] if is_packed else [2, 5], dtype=I64)
    x = normal((1 if is_packed else 2, 2, total, 24), BF16, "bshd")
    cases: list[Case] = []
    kept: list[tuple[Case, list[tuple[Case, Tensor]]]] = []
    for forward in (rotation(rng, 16, 24, PAIRS[is_packed], full=True),):
        for op in (forward, adjoint(forward)):
            bounds = torch.tensor([0, *lengths]).cumsum(0).int()
            positions = {"start_positions": starts}
            if is_packed:
                positions["cu_seqlens"] = bounds
            whole = placed(x, 64, op, **positions)
            ranks: list[tuple[Case, Tensor]] = []
            for size, rank in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 2)):
                chunks = [
                    torch.arange(first, last).chunk(2 * size)
                    for first, last in itertools.pairwise(bounds.tolist())
                    if last > first
                ]
                own = torch.cat([c for s in chunks for c in (s[rank], s[-1 - rank])])
                part = replace(op, cp_size=size, cp_rank=rank)
                ranks.append((placed(x[:, :, own].clone(), 64, part, **positions), own))
            kept.append((whole, ranks))
            cases += (whole, *(given for given, _ in ranks))
    run(cases)
    for whole, ranks in kept:
        port = whole.written[0]
        assert torch.isfinite(whole.at(port).float()).all()
        for given, own in ranks:
            assert torch.equal(bits(given.at(port)), bits(whole.at(port)[:, :, own]))


def test_packed_sequences_equal_a_loop_over_them(run: Run) -> None:
    """Bit for bit; 70 sequences take two rounds of the search, many of them are empty."""
    rng = random.Random(4)
    lengths = [rng.choice((0, 0, 1, 2)) for _ in range(69)] + [5]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    total = int(bounds[-1])
    op = rotation(rng, 32, 40, PAIRS[2], full=False)
    for angles in ("freqs", "cos_sin"):
        op = replace(op, angles=angles, half_width=False)
        x = normal((1, 3, total, 40), BF16, "bshd")
        packed = placed(x, 8, op, cu_seqlens=bounds)
        alone = [
            (at, placed(x[:, :, at : at + n].clone(), 8, op))
            for at, n in zip(bounds.tolist(), lengths, strict=False)
            if n
        ]
        run([packed, *(given for _, given in alone)])
        assert not packed.flag.item()
        for at, given in alone:
            own = given.at("output")
            assert torch.equal(bits(packed.at("output")[:, :, at : at + own.shape[2]]), bits(own))


def test_two_rotations_with_positions_of_their_own(run: Run) -> None:
    rng = random.Random(12)
    first = replace(rotation(rng, 32, 48, PAIRS[0], full=False), half_width=False)
    given: list[tuple[str, Case]] = []

    def pair(what: str, one: Rope, two: Rope, q: Tensor, k: Tensor, **others: Tensor) -> None:
        tensors = {"input0": q, "input1": k, **others, "output0": like(q), "output1": like(k)}
        given.append((what, case(RopePair((one, two)), **tensors)))

    q, k = normal((2, 6, 5, 48), BF16, "bshd"), normal((2, 1, 7, 40), BF16)
    second = replace(first, rope_offset=0, output_scale=1.0)
    ids = torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(1))
    freqs = {"freqs0": table(rng, 9, 32), "freqs1": table(rng, 9, 32, 2)}
    pair("ids", first, second, q, k, **freqs, position_ids0=ids[:1, 2:], position_ids1=ids)
    made = {f"inv_freq{i}": torch.rand(16) for i in range(2)}
    pair(
        "made", replace(first, angles="inv_freq"), replace(second, angles="inv_freq"), q, k,
        **made, start_positions0=ints(3, 9), start_positions1=ints(7, 0),
    )  # fmt: skip
    both = {f"cos_sin{i}": torch.rand(12, 1, 1, 64).bfloat16() for i in range(2)}
    packed = {"cu_seqlens0": ints(0, 2, 5), "cu_seqlens1": ints(1, 4, 4, 7)}
    pair(
        "packed", replace(first, angles="packed"), replace(second, angles="packed"), q[:1], k[:1],
        **both, **packed,
    )  # fmt: skip
    wants = [expected(one) for _, one in given]
    run([one for _, one in given])
    for (what, one), want in zip(given, wants, strict=True):
        check(one, want, what)
        assert not one.flag.item(), what
