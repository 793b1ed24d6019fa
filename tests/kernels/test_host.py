"""rope.cu run on the CPU under sanitizers, against fp64."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ropegraph.engines.cuda_rope import shape
from ropegraph.engines.cuda_rope import variant as variant_module
from ropegraph.ir.ops import Rope, RopeBackward, RopePair
from ropegraph.testing.inputs import Layout, normal, placed, poisoned
from tests.kernels import host
from tests.kernels.cases import Case, Ragged, bits, case, check, expected, like, offset_by

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
PAIRS = ((False, False), (True, True), (True, False), (False, True))
WIDTHS = (128, 64, 32, 12, 256, 40, 6, 96, 72, 16)
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd", "packed_qkv", "gapped", "odd_size_1")


def run_and_check(cases: list[tuple[str, Case]], where: Path) -> list[int]:
    wants = [expected(given) for _, given in cases]
    taken = host.run([given for _, given in cases], where)
    for (what, given), want in zip(cases, wants, strict=True):
        check(given, want, what)
    return taken


def table(rng: random.Random, rows: int, width: int, batch: int = 1) -> Tensor:
    """Raw angles, large ones among them, in rows with a gap behind."""
    angles = torch.randn(rows, batch, 1, width, generator=seeded(rng)) * rng.choice((1.0, 1e3, 1e6))
    store = torch.full((rows, batch, 1, width + 3), torch.nan)
    store[..., :width] = angles
    return store[..., :width]


def seeded(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def rotation(rng: random.Random, r: int, d: int, pairs: tuple[bool, bool], full: bool) -> Rope:
    half_width = not full and rng.random() < 0.3
    layout = "full" if full else "first_half" if half_width else rng.choice(("first_half", "pairs"))
    step = 8 if (d - r) % 8 == 0 else 2
    return Rope(
        rope_dim=r,
        rope_offset=rng.choice(range(0, d - r + 1, step)),
        output_scale=rng.choice((1.0, 0.3, -1.7)),
        attention_factor=rng.choice((1.0, 1.3)),
        interleaved=pairs[0],
        interleaved_output=pairs[1],
        inverse=rng.random() < 0.3,
        half_width=half_width,
        table_layout=layout,
    )


def adjoint(op: Rope) -> RopeBackward:
    return RopeBackward(**op.__dict__)


def dense(rng: random.Random, variant: int, kind: str) -> tuple[str, Case]:
    """One launch of one rotation, its macros by ``variant`` and the rest at random."""
    i = variant
    read, written = DTYPES[i % 3], DTYPES[i // 3 % 3]
    full, r = bool(i // 4 % 2), WIDTHS[i % 10]
    d = r + (24 if i // 2 % 2 else 0)
    op = rotation(rng, r, d, PAIRS[i % 4], full)
    b, h, s = rng.choice(((2, 3, 5), (1, 7, 3), (3, 1, 9), (5, 2, 1)))
    x = normal((b, h, s, d), read, seed=rng.randrange(1000))
    x = placed(x, "expanded" if kind == "expanded" else rng.choice(LAYOUTS))
    y = poisoned((b, h, s, d), written, rng.choice(LAYOUTS))
    freqs = table(rng, s + 2, r // 2 if op.half_width else r, rng.choice((1, b)))
    if kind == "misaligned":
        x, y = offset_by(x, 1), offset_by(y, 1)
    elif kind == "in place" and read is written:
        y = x = placed(x, rng.choice(LAYOUTS))
    what = f"variant {i}, {kind}: {read} to {written}, {list(x.shape)}, {op}"
    if rng.random() < 0.5:
        return what, case(adjoint(op), dY=x, freqs=freqs, dX=y)
    return what, case(op, input=x, freqs=freqs, output=y)


# 36 variants: every pair of dtypes with every pair of layouts.
@pytest.mark.parametrize("group", range(4))
def test_one_rotation(group: int, tmp_path: Path) -> None:
    rng = random.Random(group)
    kinds = ("plain", "expanded", "misaligned", "in place")
    cases = [dense(rng, v, kind) for v in range(group, 36, 4) for kind in kinds]
    taken = run_and_check(cases, tmp_path)
    wide = [t for t, (what, _) in zip(taken, cases, strict=True) if "misaligned" not in what]
    assert host.VECTOR in wide
    assert all(
        t == host.SINGLE for t, (what, _) in zip(taken, cases, strict=True) if "misaligned" in what
    )


@pytest.mark.parametrize("flight", [1, 2])
def test_in_place_with_many_units(
    flight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp's lanes run apart between its shuffles; no lane may see what another wrote."""
    monkeypatch.setattr(variant_module, "FLIGHT", flight)
    rng = random.Random(flight)
    cases: list[tuple[str, Case]] = []
    for r, h, pairs, shift in (
        (96, 13, PAIRS[0], 0), (96, 13, PAIRS[2], 0), (64, 40, PAIRS[3], 0), (6, 170, PAIRS[2], 1),
        (20, 100, PAIRS[3], 0),
    ):  # fmt: skip
        op = rotation(rng, r, r, pairs, full=False)
        x = offset_by(normal((1, h, 2, r), BF16, "bshd"), shift)
        freqs = table(rng, 2, r // 2 if op.half_width else r)
        cases.append((f"r={r}, h={h}, {pairs}", case(op, input=x, freqs=freqs, output=x)))
    run_and_check(cases, tmp_path)


def pair(rng: random.Random, variant: int, kind: str) -> tuple[str, Case]:
    dtype, r = DTYPES[variant % 3], WIDTHS[variant % 5]
    d = r + (16 if variant % 2 else 0)
    first = rotation(rng, r, d, PAIRS[variant % 4], bool(variant // 3 % 2))
    second = replace(first, output_scale=0.7, attention_factor=first.attention_factor)
    b, s = rng.choice(((2, 5), (1, 9), (3, 1)))
    width = r // 2 if first.half_width else r
    freqs0 = freqs1 = table(rng, s + 1, width)
    s1 = s
    if kind == "apart":
        freqs1, s1 = table(rng, s + 4, width, b), s + 2
    q = normal((b, rng.choice((5, 1, 9)), s, d), dtype, rng.choice(LAYOUTS), seed=variant)
    k = normal((b, 2, s1, d), dtype, rng.choice(LAYOUTS), seed=variant + 1)
    if kind == "misaligned":
        k = offset_by(k, 1)
    tensors = {"input0": q, "freqs0": freqs0, "input1": k, "freqs1": freqs1}
    outputs = {"output0": like(q), "output1": poisoned(tuple(k.shape), dtype, "bshd")}
    what = f"pair {variant}, {kind}: {dtype}, {list(q.shape)} and {list(k.shape)}, {first}"
    if kind == "joined":
        # One table is one value: only then do both parts turn by the same angles.
        given = case(RopePair((first, second)), **tensors, **outputs)
        return what, shared_table(given)
    if variant % 2:
        names = {"input0": "dY0", "input1": "dY1", "output0": "dX0", "output1": "dX1"}
        bound = {names.get(p, p): t for p, t in (tensors | outputs).items()}
        return what, case(RopePair((adjoint(first), adjoint(second))), **bound)
    return what, case(RopePair((first, second)), **tensors, **outputs)


def shared_table(given: Case) -> Case:
    inputs = dict(given.step.node.inputs) | {"freqs1": "freqs0"}
    return Case(replace(given.step, node=replace(given.step.node, inputs=inputs)), given.env)


@pytest.mark.parametrize("kind", ["joined", "apart", "misaligned"])
def test_two_rotations_in_one_launch(kind: str, tmp_path: Path) -> None:
    rng = random.Random(kind)
    run_and_check([pair(rng, variant, kind) for variant in range(6)], tmp_path)


def ragged(
    rng: random.Random,
    starts: list[int],
    d: int = 64,
    *,
    dtype: torch.dtype = BF16,
    index: torch.dtype = torch.int32,
    shift: int = 0,
    rows: int = 8,
    extra: int = 3,
    multiplier: int = 1,
) -> Case:
    """Sequences from token to token of ``starts``, in a buffer of ``extra`` tokens more."""
    h, b, total = 3, len(starts) - 1, max(starts) + extra
    buffer = normal((total * h * d + shift,), dtype, "bhsd", seed=rng.randrange(99)).reshape(-1)
    offsets = torch.tensor([(n * h * d + shift) // multiplier for n in starts], dtype=index)
    dim, stride = (b, h, rows, d), (rows * h * d, d, h * d, 1)
    x = Ragged(buffer, dim, stride, offsets, multiplier)
    y = replace(x, buffer=torch.full_like(buffer, torch.nan))
    y.buffer[:shift] = 0.0  # less than a token before the first: nobody's
    op = rotation(rng, 32, d, PAIRS[len(starts) % 2], full=False)
    freqs = table(rng, rows, 16 if op.half_width else 32, rng.choice((1, b)))
    return case(op, input=x, freqs=freqs, output=y)


def test_sequences_at_offsets(tmp_path: Path) -> None:
    rng = random.Random(5)
    plans: dict[str, Callable[[], Case]] = {
        "gaps and empty sequences": lambda: ragged(rng, [0, 0, 2, 2, 5, 5]),
        "64 bits": lambda: ragged(rng, [0, 3, 4], index=torch.int64),
        "a multiplier": lambda: ragged(rng, [0, 3, 4], multiplier=64),
        "dead rows before the first": lambda: ragged(rng, [2, 5, 9, 10]),
        "longer than the table": lambda: ragged(rng, [0, 11, 12]),
        "not aligned": lambda: ragged(rng, [0, 3, 7], shift=1, extra=0),
        "fp32": lambda: ragged(rng, [0, 1, 6], dtype=F32),
        "many sequences": lambda: ragged(rng, list(range(0, 60, 3))),
    }
    cases = [(what, make()) for what, make in plans.items()]
    run_and_check(cases, tmp_path)
    for what, given in cases:
        assert not given.flag.item(), what


def heads_first(stops: list[int], total: int) -> Case:
    """Sequences in a buffer [h, total, d]: a token reaches over all of it."""
    h, d, rows = 3, 16, 8
    buffer = normal((h, total, d), BF16)
    offsets = torch.tensor([n * d for n in stops], dtype=torch.int32)
    x = Ragged(buffer, (len(stops) - 1, h, rows, d), (h * rows * d, total * d, d, 1), offsets)
    freqs = table(random.Random(8), rows, 16)
    return case(Rope(16, 0), input=x, freqs=freqs, output=replace(x, buffer=like(buffer)))


def test_sequences_in_a_buffer_of_heads(tmp_path: Path) -> None:
    right, wrong = heads_first([0, 3, 7], 9), heads_first([0, 3, 10], 9)
    want = expected(right)
    host.run([right, wrong], tmp_path)
    check(right, want, "heads first")
    assert not right.flag.item()
    assert wrong.flag.item() == 2
    # The last token would start inside the buffer and end outside: its sequence is NaN.
    assert wrong.at("output")[:, 3:].isnan().all()
    assert torch.isfinite(wrong.at("output")[:, :3].float()).all()


def test_wrong_offsets_are_never_followed(tmp_path: Path) -> None:
    rng = random.Random(6)
    row = 3 * 64
    plans = {
        "decreasing": ([0, 4 * row, 2 * row, 6 * row], 1, {0, 1, 2, 3}),
        "negative": ([-(10**9), 2 * row, 4 * row, 6 * row], 1, {4, 5}),
        "past the end": ([0, 2 * row, 4 * row, 10**9], 2, {0, 1, 2, 3}),
        "starts past the end": ([0, 2 * row, 10**9, 10**9 + row], 2, {0, 1}),
    }
    cases = [ragged(rng, [0, 2, 4, 6], extra=0) for _ in plans]
    for given, (offsets, _, _) in zip(cases, plans.values(), strict=True):
        given.at("offsets0" if "offsets0" in given.step.node.inputs else "input")
        given.env[given.step.slots["offsets0"]].copy_(torch.tensor(offsets, dtype=torch.int32))
    host.run(cases, tmp_path)
    for given, (what, (_, flag, right)) in zip(cases, plans.items(), strict=True):
        assert given.flag.item() & flag, what
        tokens = given.at("output").reshape(6, row)
        for token in range(6):
            whole = bool(torch.isfinite(tokens[token].float()).all())
            assert whole == (token in right), f"{what}: token {token}"


def run_one(given: Case, where: Path) -> Tensor:
    host.run([given], where)
    return given.at(given.written[0])


def row(*numbers: float, dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).reshape(1, 1, 1, -1)


def test_pass_through_is_a_copy_of_the_bits(tmp_path: Path) -> None:
    """C04: Inf, NaN with its payload, signed zeros and subnormals outside the rotation."""
    passed = torch.tensor([0x7F81, 0x7FC1, 0x7F80, -0x8000, 0x0001, 0x3F80], dtype=torch.int16)
    x = torch.cat([torch.ones(2, dtype=torch.int16), passed]).view(BF16).reshape(1, 1, 1, 8)
    x[..., :2] = 1.0
    freqs = torch.ones(1, 1, 1, 1)
    copied = case(Rope(2, 0, half_width=True), input=x, freqs=freqs, output=like(x))
    scaled = case(
        Rope(2, 0, 0.5, half_width=True), input=x.clone(), freqs=freqs, output=like(x)
    )  # fmt: skip
    host.run([copied, scaled], tmp_path)
    assert torch.equal(bits(copied.at("output"))[..., 2:].reshape(-1), passed)
    half = scaled.at("output")[0, 0, 0, 2:].tolist()
    assert half[0] != half[0]
    assert half[2:] == [float("inf"), 0.0, 0.0, 0.5]


def test_position_0_gives_the_input_back(tmp_path: Path) -> None:
    """C04: bit for bit for finite x; a non-finite lane spoils its own pair alone."""
    x = row(3.0, -0.0, 1e-40, float("inf"), dtype=F32)
    got = run_one(
        case(Rope(4, 0, half_width=True), input=x, freqs=torch.zeros(1, 1, 1, 2), output=like(x)),
        tmp_path,
    )
    assert got[0, 0, 0, 0] == 3.0
    assert got[0, 0, 0, 2] == x[0, 0, 0, 2]


def test_values_worked_out_by_hand(tmp_path: Path) -> None:
    """C08 and C09: styles, table layouts, and a segment at either end."""
    x, t = row(1, 2, 3, 4), row(1.0, 0.01)
    split = [-1.98411, 1.95990, 2.46238, 4.01980]
    eight, angles = row(*range(1, 9)), row(3.0, 0.03)
    pairs = Rope(4, 0, interleaved=True, interleaved_output=True, half_width=True)
    plans: list[tuple[Rope, Tensor, Tensor, list[float]]] = [
        (Rope(4, 0, half_width=True), x, t, split),
        (Rope(4, 0), x, row(1.0, 0.01, 9.0, 9.0), split),
        (Rope(4, 0, table_layout="pairs"), x, row(1.0, 1.0, 0.01, 0.01), split),
        (Rope(4, 0, table_layout="full"), x, row(1.0, 0.01, 1.0, 0.01), split),
        (pairs, row(1, 0, 0, 0), t, [0.5403, 0.8415, 0, 0]),
        (Rope(4, 0, half_width=True), row(1, 0, 0, 0), t, [0.5403, 0, 0.8415, 0]),
        (
            Rope(4, 0, half_width=True), eight, angles,
            [-1.41335, 1.87912, -2.82886, 4.05819, 5, 6, 7, 8],
        ),
        (
            Rope(4, 4, half_width=True), eight, angles,
            [1, 2, 3, 4, -5.93780, 5.75734, -6.22435, 8.17637],
        ),
    ]  # fmt: skip
    cases = [case(op, input=x, freqs=f, output=like(x)) for op, x, f, _ in plans]
    host.run(cases, tmp_path)
    for given, (op, _, _, want) in zip(cases, plans, strict=True):
        got = given.at("output").reshape(-1)
        torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=6e-6 * 10, msg=str(op))


def test_any_strides(tmp_path: Path) -> None:
    """C11 and C12: one stored element, transposed dims, size-1 axes with meaningless strides."""
    ones = torch.ones(1, 1, 1, 1).expand(2, 3, 4, 2)
    freqs = torch.ones(4, 1, 1, 1)
    summed = torch.full((2, 3, 4, 2), torch.nan)
    back = case(RopeBackward(2, 0, half_width=True), dY=ones, freqs=freqs, dX=summed)
    x = normal((2, 3, 4, 6), BF16)
    turned = x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    odd = normal((3, 4, 1, 8), F16).as_strided((3, 1, 4, 8), (32, 8, 8, 1))
    wide = normal((2, 3, 4, 20), BF16)[..., 1:11]
    plans = [
        back,
        case(Rope(6, 0), input=turned, freqs=table(random.Random(1), 4, 6), output=like(turned)),
        case(Rope(8, 0), input=odd, freqs=table(random.Random(2), 4, 8), output=like(odd)),
        case(Rope(10, 0), input=wide, freqs=table(random.Random(3), 4, 10), output=like(wide)),
    ]
    run_and_check([(f"strides {i}", given) for i, given in enumerate(plans)], tmp_path)
    first, second = back.at("dX")[..., 0], back.at("dX")[..., 1]
    torch.testing.assert_close(first, torch.full((2, 3, 4), 1.38177), rtol=0, atol=1e-5)
    torch.testing.assert_close(second, torch.full((2, 3, 4), -0.30117), rtol=0, atol=1e-5)


def test_wide_rows_take_several_rounds(tmp_path: Path) -> None:
    """More vectors than lanes: only rope_any, 512 and more rotated channels."""
    rng = random.Random(9)
    cases: list[tuple[str, Case]] = []
    for r, dtype in ((512, BF16), (1040, BF16), (520, F32)):
        x = normal((1, 2, 2, r), dtype)
        op = rotation(rng, r, r, PAIRS[0], full=False)
        freqs = table(rng, 2, r // 2 if op.half_width else r)
        cases.append((f"r={r}", case(op, input=x, freqs=freqs, output=like(x))))
    assert run_and_check(cases, tmp_path) == [host.VECTOR, host.SINGLE, host.SINGLE]


@pytest.mark.parametrize("warps", [1, 4])
def test_the_grid_wraps_where_an_axis_ends(
    warps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C14 with a limit of 3 blocks in place of 65535, and either number of warps a block."""
    monkeypatch.setattr(shape, "MAX_YZ", 3)
    monkeypatch.setattr(shape, "MANY_WARPS", 1 if warps == 1 else 10**9)
    rng = random.Random(11)
    cases: list[tuple[str, Case]] = []
    for b, h, s in ((8, 16, 1), (7, 16, 2), (2, 16, 9), (1, 40, 3)):
        op = rotation(rng, 64, 64, PAIRS[0], full=False)
        freqs = table(rng, s, 32 if op.half_width else 64, b)
        x = normal((b, h, s, 64), BF16, "bshd")
        cases.append((f"{list(x.shape)}", case(op, input=x, freqs=freqs, output=like(x))))
    assert {host.variant_for(given.step).warps for _, given in cases} == {warps}
    run_and_check(cases, tmp_path)
