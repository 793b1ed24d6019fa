"""mla.cu run on the CPU under sanitizers: MXFP8 to the byte, the rest against fp64."""

import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropegraph.engines.cuda_rope import mla, mla_shape
from ropegraph.engines.cuda_rope.block import word_of
from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.engines.cuda_rope.mla_launch import MlaParams
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward
from ropegraph.lowering.engine import Device
from ropegraph.testing.inputs import poisoned
from tests.engines import mxfp8_by_hand as by_hand
from tests.engines.mla_cases import edges, inputs
from tests.kernels import host, mla_host
from tests.kernels.cases import Case, offset_by
from tests.kernels.mla_cases import (
    BF16,
    F16,
    F32,
    backward,
    case,
    check,
    expected,
    forward,
    mxfp8,
    outputs,
)

H200 = Device("cuda", 0, 90)
# b, h, s, nope, v, r: vectors of every width, none, more than 32 of a row, more heads than a warp.
SIZES = [
    (2, 3, 5, 128, 128, 64), (1, 19, 2, 8, 16, 16), (2, 5, 3, 12, 4, 8), (1, 3, 4, 6, 2, 4),
    (2, 3, 3, 7, 5, 6), (1, 2, 3, 320, 16, 160), (3, 1, 2, 0, 8, 16), (1, 9, 2, 16, 0, 32),
]  # fmt: skip
TYPES = [(BF16, F32), (BF16, BF16), (F16, F32), (F16, BF16), (F32, F32), (F32, BF16)]
KINDS = ("plain", "expanded", "misaligned", "one output")


def run_and_check(cases: list[tuple[str, Case]], where: Path) -> list[int]:
    wants = [expected(given) for _, given in cases]
    taken = mla_host.run([given for _, given in cases], where)
    for (what, given), want in zip(cases, wants, strict=True):
        check(given, want, what)
    return taken


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize("group", range(2))
def test_key_value_and_gradients(make, group: int, tmp_path: Path) -> None:
    rng = random.Random(group)
    cases = [
        make(rng, size, *TYPES[(i + j + group) % 6], kind)
        for i, size in enumerate(SIZES)
        for j, kind in enumerate(KINDS)
        if (i + j) % 2 == group
    ]
    taken = run_and_check(cases, tmp_path)
    assert {host.VECTOR, host.SINGLE} == set(taken)


def test_every_byte_of_mxfp8(tmp_path: Path) -> None:
    """Whole tiles and halves of one, blocks that straddle, any strides, off 16 bytes; and edges."""
    rng = random.Random(3)
    plan = [
        ((1, 5, 64, 128, 128, 64), F32, "plain"), ((2, 2, 32, 32, 96, 32), BF16, "plain"),
        ((1, 3, 32, 64, 32, 96), BF16, "strides"), ((1, 2, 64, 48, 32, 16), F32, "plain"),
        ((2, 3, 32, 32, 64, 32), F32, "misaligned"), ((1, 6, 32, 32, 32, 32), BF16, "some outputs"),
        ((2, 1, 32, 0, 32, 64), BF16, "plain"), ((1, 2, 32, 64, 0, 32), F32, "plain"),
    ]  # fmt: skip
    layouts = ("bshd", "bhsd", "gapped", "packed_qkv", "bshd", "odd_size_1", "bshd", "expanded")
    cases = [mxfp8(rng, *given, layout) for given, layout in zip(plan, layouts, strict=True)]
    taken = run_and_check(cases, tmp_path)
    assert taken[0] == taken[1] == host.VECTOR
    assert taken[3] == taken[4] == host.SINGLE


def test_sides_without_channels_and_nothing_that_turns(tmp_path: Path) -> None:
    """Nothing is read behind kv, no scale is written past its row."""
    cases: list[tuple[str, Case]] = []
    sizes = ((2, 64, 0, 32), (9, 32, 0, 32), (3, 0, 0, 32), (2, 64, 32, 0), (1, 0, 32, 0))
    for h, nope, v, r in sizes:
        given = inputs(1, h, 32, nope, v, 32)
        given |= {port: given[port][..., :r] for port in ("k_rope", "cos", "sin")}
        op = MlaKvRope(nope, "mxfp8")
        written = outputs(op, given, random.Random(0), ("bshd",))
        cases.append((f"{h} {nope} {v} {r}", case(op, given, written)))
    run_and_check(cases, tmp_path)


@pytest.mark.parametrize(("nope", "v", "r"), [(1696, 1696, 704), (3072, 3072, 0), (576, 736, 736)])
def test_shared_memory_stays_inside_its_limit(nope: int, v: int, r: int) -> None:
    task = mla.task_of(plain(MlaKvRope(64, "mxfp8")).step)
    task = replace(task, heads=8, nope=nope, v=v, half=r // 2)
    scales = mla_shape.scales_of(task, mla_shape.cut_of(task, 16).part_heads)
    turned = max(1, r // 16) * 16 * 2  # of a token, as struct Shared has it
    assert 32 * (turned + scales) <= mla_shape.SHARED_BYTES


@pytest.mark.parametrize("table", [BF16, F32])
def test_bytes_by_hand(table: torch.dtype, tmp_path: Path) -> None:
    """Against integers and fractions: zero blocks, saturation, subnormals, Inf and NaN."""
    given = edges(inputs(1, 2, 64, 32, 64, 32, BF16, table), 32)
    op = MlaKvRope(32, "mxfp8")
    cases = [case(op, given, outputs(op, given, random.Random(i), ("bshd",))) for i in range(2)]
    wide = cases[1].at("kv")  # the same numbers off 16 bytes: the other kernel
    cases[1].env[cases[1].step.slot("kv")] = offset_by(wide, 1)
    taken = mla_host.run(cases, tmp_path)
    assert taken == [host.VECTOR, host.SINGLE]
    want = by_hand.mla(**given, nope=32)
    for done in cases:
        for port in MXFP8_PORTS:
            assert torch.equal(done.at(port), want[port]), port


def test_the_roundings_of_transformer_engine(tmp_path: Path) -> None:
    given = [edges(inputs(1, 2, 32, 32, 32, 32, BF16, t), 32) for t in (BF16, F32)]
    op = MlaKvRope(32)
    cases = [case(op, g, outputs(op, g, random.Random(0), ("bshd",))) for g in given]
    wants = [expected(c, "torch") for c in cases]
    mla_host.run(cases, tmp_path)
    for done, want in zip(cases, wants, strict=True):
        got, key = done.at("key"), want["key"].to(BF16)
        assert ((got == key) | (got.isnan() & key.isnan())).all()


def test_no_heads_give_no_gradient(tmp_path: Path) -> None:
    """C16: a sum over no heads is 0, and written."""
    given = inputs(2, 0, 3, 8, 8, 16)
    grads = {"dKey": torch.zeros(2, 0, 3, 24, dtype=BF16), "cos": given["cos"], "sin": given["sin"]}
    written = {"dK_rope": poisoned((2, 1, 3, 16), BF16)}
    run_and_check([("no heads", case(MlaKvRopeBackward(8, 8), grads, written))], tmp_path)


def plain(op: MlaKvRope | MlaKvRopeBackward, **changes: torch.Tensor) -> Case:
    given = inputs(2, 3, 32, 64, 64, 32)
    if isinstance(op, MlaKvRopeBackward):
        dims = {"dKey": (2, 3, 32, 96), "dValue": (2, 3, 32, 64)}
        grads = {port: torch.zeros(dim, dtype=BF16) for port, dim in dims.items()}
        given = grads | {"cos": given["cos"], "sin": given["sin"]}
    given |= changes
    return case(op, given, outputs(op, given, random.Random(0), ("bshd",)))


@pytest.mark.parametrize("op", [MlaKvRope(64), MlaKvRope(64, "mxfp8"), MlaKvRopeBackward(64, 64)])
def test_one_launch_that_patches_addresses_alone(op) -> None:
    given, driver = plain(op), mla_host.Recorder(context=9)
    assert CudaRope().why_not(given.step, H200) == ()
    exe = mla_host.launcher(given, driver)
    exe(given.env, 7)
    other = [t.clone() for t in given.env]
    exe(other, 8)
    assert driver.contexts == [1, 9, 1, 9]
    first, second = driver.launches
    assert (first.stream, second.stream, first.grid) == (7, 8, second.grid)
    task = mla.task_of(given.step)
    words = [struct.unpack(f"{len(x.params) // 8}Q", x.params) for x in (first, second)]
    patched = sorted(word_of(MlaParams, f) for f in (*task.places, *task.tables))
    assert [i for i, (a, b) in enumerate(zip(*words, strict=True)) if a != b] == patched
    for field, side in task.places.items():
        assert words[0][word_of(MlaParams, field)] == given.env[side.slot].data_ptr()


def test_what_the_kernel_declines() -> None:
    def broken(given: Case, device: Device = H200) -> tuple[str, ...]:
        return CudaRope().why_not(given.step, device)

    wide = plain(
        MlaKvRope(64),
        **{p: t.double() for p, t in inputs(2, 3, 32, 64, 64, 32).items() if "k" in p},
    )
    assert "kv is fp64, not fp16, bf16 or fp32" in broken(wide)
    assert broken(plain(MlaKvRope(64)), Device()) == ("needs a CUDA device, this is cpu",)
    assert "needs sm_80 or newer, this is sm_75" in broken(
        plain(MlaKvRope(64)), Device("cuda", 0, 75)
    )
    given = inputs(2, 3, 5, 8, 8, 8)
    written = {"key": poisoned((2, 3, 5, 16), F32)}
    assert broken(case(MlaKvRope(8), given, written)) == ("key is fp32 where others are bf16",)


def test_grids_stay_inside_the_limits() -> None:
    """C14: 65536 and more along every axis, strides past 2^31."""
    task = mla.task_of(plain(MlaKvRope(64)).step)
    for changes in ({"batch": 65_536}, {"heads": 65_536}, {"tokens": 65_536}, {"batch": 2**29}):
        for mode in mla.Mode:
            large = replace(task, mode=mode, **changes)
            for vec in (1, 8):
                cut = mla_shape.cut_of(large, vec)
                x, y, z = cut.grid
                assert x <= mla_shape.MAX_X
                assert y <= mla_shape.MAX_YZ
                assert z <= mla_shape.MAX_YZ
                assert y * z >= large.batch
                assert cut.part_heads * cut.parts >= large.heads
    far = plain(MlaKvRope(64))
    values = dict(far.step.values)
    values["kv"] = replace(values["kv"], dim=(2**29, 2**10, 2**12, 128))
    assert CudaRope().why_not(replace(far.step, values=values), H200) == ()
    values["kv"] = replace(values["kv"], dim=(2, 2**20, 2**29, 128))
    (reason,) = CudaRope().why_not(replace(far.step, values=values), H200)
    assert reason == "more tokens times heads than one grid holds"


def test_strides_are_64_bits_wide(tmp_path: Path) -> None:
    """C14: batch entries 2^32 elements apart, of which the kernel is asked for one alone."""
    given = plain(MlaKvRope(64))
    driver = mla_host.Recorder()
    values = {
        n: replace(v, stride=(2**32, *v.stride[1:])) if n in ("kv", "key") else v
        for n, v in given.step.values.items()
    }
    mla_host.launcher(Case(replace(given.step, values=values), given.env), driver)(given.env, 0)
    words = struct.unpack(f"{len(driver.launches[0].params) // 8}Q", driver.launches[0].params)
    assert words[word_of(MlaParams, "kv") + 1] == words[word_of(MlaParams, "key") + 1] == 2**32


def test_nothing_to_do_is_no_launch() -> None:
    for dim in ((0, 3, 32), (2, 0, 32), (2, 3, 0)):
        given = inputs(*dim, 64, 64, 32)
        op = MlaKvRope(64, "mxfp8")
        assert mla.task_of(case(op, given, outputs(op, given, random.Random(0))).step).is_empty
