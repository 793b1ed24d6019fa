"""mla_kv_rope and its backward on the torch executor and the reference, against fp64."""

import pytest
import torch
from torch import Tensor

from ropegraph.engines import manifest
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward
from ropegraph.testing.budget import assert_within, relative
from ropegraph.testing.inputs import LAYOUTS, Layout, normal, placed, poisoned
from tests.engines import mxfp8_by_hand as by_hand
from tests.engines.mla_cases import BF16, F32, edges, exact, inputs
from tests.engines.steps import run

F16, F64 = torch.float16, torch.float64
ENGINES = ("torch", "reference")
# Three roundings (a product, a sum, the output) where the arithmetic is that of the output type.
EPS = {F64: 1e-15, F32: 2e-7, F16: 1e-3, BF16: 1.2e-2}
SIZES = [(2, 3, 5, 7, 5, 6), (1, 1, 1, 128, 128, 64), (3, 2, 4, 0, 3, 2), (2, 4, 3, 5, 0, 8)]


def check(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    for port, value in want.items():
        assert_within(got[port], value, relative(value, EPS[dtype]), port)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("table", [F32, BF16])
def test_key_and_value(engine: str, size: tuple[int, ...], dtype: torch.dtype, table: torch.dtype):
    given, nope = inputs(*size, dtype, table), size[3]
    got = run(MlaKvRope(nope), given, ("key", "value"), manifest.load(engine))
    check(got, exact(given, nope), dtype)
    assert torch.equal(got["value"], given["kv"][..., nope:])
    assert torch.equal(got["key"][..., :nope], given["kv"][..., :nope])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(engine: str, layout: Layout):
    given = inputs(2, 3, 5, 6, 4, 8, F32, layout=layout)
    outputs = {
        "key": poisoned((2, 3, 5, 14), F32, "gapped"),
        "value": poisoned((2, 3, 5, 4), F32, "bshd"),
    }
    got = run(MlaKvRope(6), given, outputs, manifest.load(engine))
    check(got, exact(given, 6), F32)


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_that_do_not_turn_are_copied_bit_for_bit(engine: str):
    """C04."""
    given = inputs(1, 2, 3, 4, 4, 4)
    noise = torch.arange(1 * 2 * 3 * 8, dtype=torch.int16) * 1367 - 20000
    given["kv"] = noise.view(BF16).view(1, 2, 3, 8)
    given["k_rope"][0, 0, 1, 0] = torch.inf
    got = run(MlaKvRope(4), given, ("key", "value"), manifest.load(engine))
    bits = given["kv"].view(torch.int16)
    assert torch.equal(got["key"].view(torch.int16)[..., :4], bits[..., :4])
    assert torch.equal(got["value"].view(torch.int16), bits[..., 4:])
    # A pair that is not finite spoils no other pair.
    assert got["key"][0, :, 1, [5, 7]].isfinite().all()
    assert not got["key"][0, :, 1, [4, 6]].isfinite().any()


def test_the_product_with_x2_is_the_one_that_is_rounded():
    """fma(x1, sin, bf16(x2 cos)): 1.015625 + 1.0078125 * 1.6640625 is below 2.6953125, a tie."""
    x, c, s = (torch.tensor(n, dtype=BF16) for n in (1.0078125, 1.0078125, 1.6640625))
    given = {
        "kv": torch.zeros(1, 1, 1, 2, dtype=BF16), "k_rope": x.expand(1, 1, 1, 2),
        "cos": c.expand(1, 1, 1, 2), "sin": s.expand(1, 1, 1, 2),
    }  # fmt: skip
    key = run(MlaKvRope(1), given, ("key",), manifest.load("torch"))["key"]
    # The first is fma(x1, cos, -bf16(x2 sin)): 1.01568603515625 - 1.6796875.
    assert key.flatten().tolist() == [0.0, -0.6640625, 2.6875]


def test_the_roundings_of_transformer_engine():
    """Bit for bit: a rounded product and a fused multiply-add, in bf16 or in fp32."""
    for table in (BF16, F32):
        given = edges(inputs(1, 2, 64, 32, 32, 32, BF16, table), 32)
        key = run(MlaKvRope(32), given, ("key",), manifest.load("torch"))["key"]
        shared = by_hand.turned(
            given["k_rope"][0, 0], *(given[t][:64, 0, 0] for t in ("cos", "sin"))
        )
        for t, row in enumerate(shared):
            got = by_hand.numbers(key[0, 1, t, 32:])
            for i, (a, b) in enumerate(zip(got, row, strict=True)):
                assert a == b or a[1] == b[1] == by_hand.NAN, f"{table} token {t} channel {i}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("only", ["key", "value"])
def test_one_output_alone(engine: str, only: str):
    given = inputs(2, 3, 5, 7, 5, 6, F32)
    got = run(MlaKvRope(7), given, (only,), manifest.load(engine))
    check(got, {only: exact(given, 7)[only]}, F32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dim", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_nothing_to_do(engine: str, dim: tuple[int, int, int]):
    """C16."""
    given = inputs(*dim, 7, 5, 6, F32)
    got = run(MlaKvRope(7), given, ("key", "value"), manifest.load(engine))
    assert got["key"].shape == (*dim, 13)
    grads = {"dKey": got["key"], "dValue": got["value"], "cos": given["cos"], "sin": given["sin"]}
    back = run(MlaKvRopeBackward(7, 5), grads, ("dKV", "dK_rope"), manifest.load(engine))
    assert back["dKV"].shape == (*dim, 12)
    assert (back["dK_rope"] == 0).all()


# Backward


def gradients(given: dict[str, Tensor], nope: int, r: int) -> dict[str, Tensor]:
    b, h, s, width = given["kv"].shape
    dtype = given["kv"].dtype
    return {
        "dKey": normal((b, h, s, nope + r), dtype, "bshd", seed=5),
        "dValue": normal((b, h, s, width - nope), dtype, "gapped", seed=6),
        "cos": given["cos"],
        "sin": given["sin"],
    }


def exact_gradients(given: dict[str, Tensor], grads: dict[str, Tensor], nope: int):
    leaves = {p: given[p].double().requires_grad_() for p in ("kv", "k_rope")}
    out = exact(given | leaves, nope)
    total = sum(
        (out[p] * grads[g].double()).sum() for p, g in (("key", "dKey"), ("value", "dValue"))
    )
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(("dKV", "dK_rope"), found, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
def test_gradients(engine: str, size: tuple[int, ...], dtype: torch.dtype):
    *_, nope, v, r = size
    given = inputs(*size, dtype, BF16 if dtype == BF16 else F32)
    grads = gradients(given, nope, r)
    got = run(MlaKvRopeBackward(nope, v), grads, ("dKV", "dK_rope"), manifest.load(engine))
    want = exact_gradients(given, grads, nope)
    check(got, want, dtype)
    assert torch.equal(got["dKV"].double(), want["dKV"])
    if dtype in (BF16, F16):  # one rounding, of a sum over heads in fp32
        half_a_unit = torch.finfo(dtype).eps / 2
        size_of_sum = 2 * relative(grads["dKey"], 1.0) * size[1] if want["dK_rope"].numel() else 0
        limit = want["dK_rope"].abs() * half_a_unit * 1.001 + 1e-6 * size_of_sum
        assert_within(got["dK_rope"], want["dK_rope"], limit + 1e-30, "one rounding")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_backward_is_the_adjoint(engine: str):
    """<dy, R x> = <R^T dy, x>, in fp64."""
    given = inputs(2, 3, 5, 7, 5, 6, F64)
    grads = gradients(given, 7, 6)
    forward = run(MlaKvRope(7), given, ("key", "value"), manifest.load(engine))
    back = run(MlaKvRopeBackward(7, 5), grads, ("dKV", "dK_rope"), manifest.load(engine))
    left = (forward["key"] * grads["dKey"]).sum() + (forward["value"] * grads["dValue"]).sum()
    right = (back["dKV"] * given["kv"]).sum() + (back["dK_rope"] * given["k_rope"]).sum()
    torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("missing", ["dKey", "dValue"])
def test_a_gradient_that_is_missing_counts_as_zero(engine: str, missing: str):
    given = inputs(2, 3, 5, 7, 5, 6, F32)
    grads = gradients(given, 7, 6)
    want = exact_gradients(given, grads | {missing: torch.zeros_like(grads[missing])}, 7)
    del grads[missing]
    got = run(MlaKvRopeBackward(7, 5), grads, ("dKV", "dK_rope"), manifest.load(engine))
    check(got, want, F32)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_any_strides(engine: str):
    """C11: an expanded gradient, and one laid out in another order."""
    given = inputs(2, 3, 5, 6, 4, 8, F32)
    grads = gradients(given, 6, 8)
    grads["dKey"] = torch.randn(1, 1, 1, 1).expand(2, 3, 5, 14)
    grads["dValue"] = placed(grads["dValue"], "expanded")
    got = run(MlaKvRopeBackward(6, 4), grads, ("dKV", "dK_rope"), manifest.load(engine))
    packed = {p: t.contiguous() for p, t in grads.items()}
    again = run(MlaKvRopeBackward(6, 4), packed, ("dKV", "dK_rope"), manifest.load(engine))
    for port in got:
        assert torch.equal(got[port], again[port])


# MXFP8


def byte_buffers(b: int, h: int, s: int, key: int, value: int) -> dict[str, Tensor]:
    """Outputs full of 0xff, in E4M3 and E8M0, in memory of the order s, b, h, d."""
    buffers: dict[str, Tensor] = {}
    for port in MXFP8_PORTS:
        d = key if port.startswith("key") else value
        rows = s // 32 if port.endswith("column_scale") else s
        width = d // 32 if port.endswith("row_scale") else d
        dtype = torch.float8_e8m0fnu if port.endswith("scale") else torch.float8_e4m3fn
        store = torch.full((rows, b, h, width), 255, dtype=torch.uint8)
        buffers[port] = store.view(dtype).permute(1, 2, 0, 3)
    return buffers


def run_mxfp8(engine: str, given: dict[str, Tensor], nope: int, **outputs: Tensor):
    b, h, s, width = given["kv"].shape
    key = nope + given["k_rope"].shape[3]
    buffers = byte_buffers(b, h, s, key, width - nope) | outputs
    got = run(MlaKvRope(nope, "mxfp8"), given, buffers, manifest.load(engine))
    return {port: t.view(torch.uint8) for port, t in got.items()}


def assert_same_bytes(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    for port, expected in want.items():
        off = (got[port] != expected).nonzero()
        place = tuple(off[0].tolist()) if len(off) else ()
        assert not len(off), (
            f"{what} {port}: {len(off)} of {expected.numel()} bytes differ, at {list(place)} "
            f"{int(got[port][place]):#x} instead of {int(expected[place]):#x}"
        )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("table", [BF16, F32])
def test_every_byte_of_mxfp8(engine: str, table: torch.dtype):
    given = edges(inputs(1, 2, 64, 32, 64, 32, BF16, table), 32)
    got = run_mxfp8(engine, given, 32)
    assert_same_bytes(got, by_hand.mla(**given, nope=32), f"{engine} {table}")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rotation_may_begin_inside_a_block(engine: str):
    given = inputs(2, 1, 32, 48, 32, 16, BF16, BF16, layout="gapped")
    assert_same_bytes(run_mxfp8(engine, given, 48), by_hand.mla(**given, nope=48))


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_of_every_magnitude(engine: str):
    """Each bf16 number as the largest of a block, and each beside each power of two."""
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    kv = torch.zeros(1, 16, 64, 64, dtype=BF16)
    kv[..., :32] = (every.view(16, 64, 32) * 1.0)[None]
    kv[..., 32:] = every.view(16, 64, 32).flip(0)[None]
    given = inputs(1, 16, 64, 32, 32, 32, BF16, BF16) | {"kv": kv}
    assert_same_bytes(run_mxfp8(engine, given, 32), by_hand.mla(**given, nope=32))


def test_the_engines_agree_on_transformer_engines_sizes():
    given = edges(inputs(2, 4, 128, 128, 128, 64, BF16, F32, layout="bshd"), 128)
    assert_same_bytes(run_mxfp8("torch", given, 128), run_mxfp8("reference", given, 128))


def test_bytes_may_be_declared_as_such():
    given = inputs(1, 2, 32, 32, 32, 32)
    plain = {p: t.view(torch.uint8) for p, t in byte_buffers(1, 2, 32, 64, 32).items()}
    assert_same_bytes(run_mxfp8("torch", given, 32, **plain), run_mxfp8("reference", given, 32))


def test_the_scales_by_hand():
    """448 fits a scale of 1, 449 needs 2; a block of zeros and one of NaN have byte 0; Inf 254."""
    given = inputs(1, 1, 32, 32, 32, 32)
    given["kv"][..., 32:] = 0.0
    value = given["kv"][0, 0, :, 32:]
    value[0, 3], value[1, 3], value[2, :], value[3, 1] = 448.0, -450.0, torch.nan, -torch.inf
    value[4, 0], value[4, 1] = 1e30, -0.0
    got = run_mxfp8("torch", given, 32)
    assert got["value_row_scale"][0, 0, :6, 0].tolist() == [127, 128, 0, 254, 218, 0]
    assert got["value_row"][0, 0, 0, 3] == 0x7E
    assert got["value_row"][0, 0, 1, 3] == 0xF6
    assert (got["value_row"][0, 0, 2] == 0x7F).all()
    assert got["value_row"][0, 0, 3, :2].tolist() == [0x00, 0xFE]
    assert got["value_row"][0, 0, 4, 1] == 0x80


def test_empty_mxfp8():
    for dim in ((0, 2, 32), (1, 0, 32), (1, 2, 0)):
        assert run_mxfp8("torch", inputs(*dim, 32, 32, 32), 32)
        assert run_mxfp8("reference", inputs(*dim, 32, 32, 32), 32)
