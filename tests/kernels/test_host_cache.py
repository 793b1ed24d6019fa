"""A decoding step: Q, K and V in one launch, or K and V alone, on the CPU under sanitizers."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.ir.ops import CacheWrite, Rope, RopePair
from ropegraph.lowering.engine import Device
from ropegraph.testing.inputs import normal
from tests.kernels import host
from tests.kernels.cases import Case, Run, bits, case, check, like, offset_by
from tests.kernels.oracle import expected
from tests.kernels.test_host import table

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
POSITION, CACHE = 4, 16
S_MAX = 9


@dataclass(frozen=True)
class Plan:
    """One step of decoding, or of a prefill in chunks: what its launch is specialised by."""

    what: str
    op: Rope
    s: int = 1
    d: int = 40
    rows: tuple[int, ...] = (5, 0, 3)
    dtype: torch.dtype = BF16
    kept: torch.dtype = BF16
    index: torch.dtype = I32
    order: str = "bhsd"
    shift: int = 0
    table_rows: int = 12
    kernel: int = host.VECTOR
    flag: int = 0


WHOLE, PART = Rope(40, 0, 0.3), Rope(16, 8)
OF_TABLES = replace(PART, angles="cos_sin", interleaved=True, interleaved_output=True,
                    half_width=True)  # fmt: skip
PLANS = (
    Plan("one token", WHOLE),
    Plan("one token, bshd", WHOLE, order="bshd"),
    Plan("some tokens, bshd", WHOLE, s=4, order="bshd"),
    Plan("as many as fit", WHOLE, s=S_MAX, rows=(0, 0, 0)),
    Plan("a part turns", OF_TABLES, s=2, rows=(7, 0, 3), dtype=F16, kept=F16, index=I64),
    Plan("a narrower cache", WHOLE, s=2, dtype=F32, kept=BF16, order="bshd"),
    Plan("misaligned", PART, s=3, shift=1, kernel=host.SINGLE),
    Plan("outside", WHOLE, s=2, rows=(8, 1, -1), flag=CACHE),
    Plan("far outside", OF_TABLES, s=2, rows=(2**62, 7, -(2**63)), dtype=F16, kept=F16, index=I64,
         flag=CACHE | POSITION),
    Plan("past the table", WHOLE, s=2, rows=(1, 4, 6), table_rows=7, flag=POSITION),
    Plan("misaligned and outside", PART, rows=(9, 8, -5), shift=1, kernel=host.SINGLE, flag=CACHE),
)  # fmt: skip


def cache(like_rows: Tensor, kept: torch.dtype, order: str, shift: int) -> Tensor:
    """[b, h, s_max, d] of NaN that differ in their bits."""
    b, h, _, d = like_rows.shape
    dim = (b, h, S_MAX, d) if order == "bhsd" else (b, S_MAX, h, d)
    flat = torch.arange(b * h * S_MAX * d) % 63
    made = (flat.to(torch.int16) + (0x7E00 if kept is F16 else 0x7FC0)).view(kept).view(dim)
    return offset_by(made if order == "bhsd" else made.transpose(1, 2), shift)


def step(plan: Plan) -> Case:
    """Q and K with start_positions, which are the rows of the caches; V as it is."""
    b, rng = len(plan.rows), random.Random(len(plan.what))
    rows = torch.tensor(plan.rows, dtype=plan.index)
    # Positions of angles stay in the table where only the cache is to be left.
    starts = rows if plan.flag & POSITION else rows.clamp(0, S_MAX - plan.s)
    freqs = table(rng, plan.table_rows, plan.op.rope_dim // (2 if plan.op.half_width else 1))
    angles = {"freqs": freqs}
    if plan.op.angles == "cos_sin":
        angles = {"cos": freqs.cos().to(plan.dtype), "sin": freqs.sin().to(plan.dtype)}
    tensors: dict[str, Tensor] = {}
    for i, h in enumerate((6, 2, 2)):
        x = normal((b, plan.s, h, plan.d), plan.dtype, seed=i).transpose(1, 2)
        tensors[f"input{i}"] = offset_by(x, plan.shift)
        if i < 2:
            tensors |= {f"{port}{i}": t for port, t in angles.items()}
            tensors[f"start_positions{i}"] = starts
        if i == 0:
            tensors["output0"] = like(x).to(plan.kept)
            continue
        room = cache(x, plan.kept, plan.order, plan.shift)
        tensors |= {f"cache{i}": room, f"cache_positions{i}": rows, f"output{i}": room}
    parts = plan.op, replace(plan.op, output_scale=1.0), CacheWrite()
    return case(RopePair(parts, ("q", "k", "v")), **tensors)


def written_rows(plan: Plan) -> Tensor:
    """True for the rows of a cache that the step writes, [b, 1, s_max, 1]."""
    found = torch.zeros(len(plan.rows), S_MAX, dtype=torch.bool)
    for i, row in enumerate(plan.rows):
        if 0 <= row <= S_MAX - plan.s:
            found[i, row : row + plan.s] = True
    return found[:, None, :, None]


def rows_of(x: Tensor, plan: Plan) -> Tensor:
    """x [b, h, s, d] where its rows lie in a cache, zero elsewhere."""
    found = torch.zeros(*x.shape[:2], S_MAX, x.shape[3], dtype=x.dtype)
    for i, row in enumerate(plan.rows):
        if 0 <= row <= S_MAX - plan.s:
            found[i, :, row : row + plan.s] = x[i]
    return found


def test_three_parts_in_one_launch(run: Run) -> None:
    given = [step(plan) for plan in PLANS]
    wants = [_expected(plan, one) for plan, one in zip(PLANS, given, strict=True)]
    before = [[bits(one.at(f"output{i}")) for i in (1, 2)] for one in given]
    run(given)
    for plan, one, want, old in zip(PLANS, given, wants, before, strict=True):
        assert host.kernel_of(one) == plan.kernel, plan
        assert one.flag.item() == plan.flag, plan
        check(one, want, plan.what)
        own = written_rows(plan)
        for i in (1, 2):
            got = bits(one.at(f"output{i}"))
            assert torch.equal(torch.where(own, 0, got), torch.where(own, 0, old[i - 1])), plan
        v = rows_of(one.at("input2"), plan).to(plan.kept)
        assert torch.equal(torch.where(own, bits(one.at("output2")), 0), bits(v)), plan


def _expected(plan: Plan, given: Case) -> dict[str, Tensor]:
    """What each output must hold: rotations by an oracle without caches, and rows by index."""
    own = [p for p in given.step.node.inputs if p[-1] in "01" and not p.startswith("cache")]
    plain = case(
        RopePair((plan.op, replace(plan.op, output_scale=1.0)), ("q", "k")),
        **{port: given.at(port) for port in own},
        **{f"output{i}": like(given.at(f"input{i}")).to(plan.kept) for i in (0, 1)},
    )
    want = expected(plain)
    for i, rows in ((1, want["output1"]), (2, given.at("input2").double())):
        kept = given.at(f"cache{i}").double()
        want[f"output{i}"] = torch.where(written_rows(plan), rows_of(rows, plan), kept)
    return want


def lone(op: Rope | CacheWrite, x: Tensor, room: Tensor, rows: Tensor) -> Case:
    angles = {} if isinstance(op, CacheWrite) else {"freqs": torch.zeros(9, 1, 1, op.rope_dim)}
    return case(op, input=x, **angles, cache=room, cache_positions=rows, output=room)


def test_a_part_alone_and_a_pair(run: Run) -> None:
    """What turns nothing needs no rotation beside it."""
    rows = torch.tensor([2, 8, 0], dtype=I64)
    x = normal((3, 2, 1, 24), BF16)
    plan = Plan("", WHOLE, rows=(2, 8, 0))
    write = lone(CacheWrite(), x, cache(x, BF16, "bshd", 0), rows)
    turn = lone(Rope(24, 0), x, cache(x, BF16, "bhsd", 0), rows)  # by angles of 0
    written = [(write, "output"), (turn, "output")]
    both = case(
        RopePair((Rope(8, 16), CacheWrite()), ("k", "v")),
        input0=x, freqs0=torch.zeros(9, 1, 1, 8), cache0=(k := cache(x, BF16, "bhsd", 0)),
        cache_positions0=rows, output0=k,
        input1=x, cache1=(v := cache(x, BF16, "bshd", 0)), cache_positions1=rows, output1=v,
    )  # fmt: skip
    written += [(both, "output0"), (both, "output1")]
    before = [bits(one.at(port)) for one, port in written]
    run([write, turn, both])
    rows_wanted, own = rows_of(x, plan), written_rows(plan)
    for (given, port), old in zip(written, before, strict=True):
        got = given.at(port)
        assert given.flag.item() == 0
        assert torch.equal(bits(got), torch.where(own, bits(rows_wanted), old))


def writes(plan: Plan, *widths: int) -> Case:
    """K, V and so on as they are, of heads and widths of their own: nothing has angles."""
    rows = torch.tensor(plan.rows, dtype=plan.index)
    tensors: dict[str, Tensor] = {}
    for i, d in enumerate(widths):
        x = normal((len(plan.rows), plan.s, 2 + 3 * i, d), plan.dtype, seed=i).transpose(1, 2)
        room = cache(x, plan.kept, plan.order, plan.shift)
        tensors |= {f"input{i}": offset_by(x, plan.shift), f"cache{i}": room}
        tensors |= {f"cache_positions{i}": rows, f"output{i}": room}
    return case(RopePair((CacheWrite(),) * len(widths), ("k", "v", "w")[: len(widths)]), **tensors)


def test_writes_alone_in_one_launch(run: Run) -> None:
    """Behind a launch of norms and rotations: one token or some, one type or a narrower cache."""
    plans = [replace(plan, flag=plan.flag & CACHE) for plan in PLANS if plan.flag != POSITION]
    widths = ((40, 40), (40, 24), (32, 64, 16))
    given = [
        (plan, writes(plan, *own)) for i, plan in enumerate(plans) for own in widths[i % 2 :: 2]
    ]
    before = [{port: bits(one.at(port)) for port in one.written} for _, one in given]
    assert all(CudaRope().why_not(one.step, H200) == () for _, one in given)
    run([one for _, one in given])
    for (plan, one), old in zip(given, before, strict=True):
        assert host.kernel_of(one) == plan.kernel, plan
        assert one.flag.item() == plan.flag, plan
        own = written_rows(plan)
        for port in one.written:
            x = rows_of(one.at(port.replace("output", "input")), plan).to(plan.kept)
            want = torch.where(own, bits(x), old[port])
            assert torch.equal(bits(one.at(port)), want), (plan, port)


H200 = Device("cuda", 0, 90)


def test_what_one_launch_takes() -> None:
    given = step(Plan("", WHOLE))
    assert CudaRope().why_not(given.step, H200) == ()
    values = given.step.values

    def why_not(**changes: DType) -> tuple[str, ...]:
        changed = {n: replace(values[n], dtype=dtype) for n, dtype in changes.items()}
        return CudaRope().why_not(replace(given.step, values={**values, **changed}), H200)

    assert why_not(cache_positions2=DType.INT64) == ("the pair takes cache_positions of two types",)
    assert why_not(cache_positions1=DType.FLOAT, cache_positions2=DType.FLOAT) == (
        "cache_positions1 is fp32, not int32 or int64",
        "cache_positions2 is fp32, not int32 or int64",
    )
    assert why_not(output2=DType.HALF) == (
        "the pair has two data types: bf16, bf16; bf16, bf16; bf16, fp16",
    )


def test_no_tokens_launch_nothing() -> None:
    """C16."""
    given = step(replace(PLANS[0], s=0))
    assert host.active_jobs(given.step) == ()


@pytest.mark.parametrize("b", [64, 70_000])
def test_a_step_of_many_sequences_is_one_small_launch(b: int) -> None:
    """C14: one token of each; the grid stays in its limits."""
    x = torch.zeros(8, 1, 128, dtype=BF16).expand(b, 8, 1, 128)
    room = torch.zeros(8, 64, 128, dtype=BF16).expand(b, 8, 64, 128)
    rows = torch.zeros(1, dtype=I32).expand(b)
    launch = host.launch_for(lone(CacheWrite(), x, room, rows))
    x_blocks, y_blocks, z_blocks = launch.grid
    assert x_blocks == 1
    assert y_blocks * z_blocks * launch.threads // 32 >= b
    assert max(y_blocks, z_blocks) <= 65535
