"""Shapes, data types and text of mla_kv_rope: every message says what would fit."""

import pytest

from ropegraph.dtypes import DType
from ropegraph.errors import GraphError
from ropegraph.ir.ops import MlaKvRope, MlaKvRopeBackward
from ropegraph.ir.serialize import dumps, key, loads
from ropegraph.ir.shapes import infer
from ropegraph.ir.types import check_dtypes, output_dtype, output_dtypes
from tests.ir.build import Build

BF16, F32 = DType.BFLOAT16, DType.FLOAT
DIMS = {"kv": (2, 3, 5, 12), "k_rope": (2, 1, 5, 6), "cos": (9, 1, 1, 6), "sin": (9, 1, 1, 6)}
TE = {
    "kv": (2, 4, 64, 256), "k_rope": (2, 1, 64, 64), "cos": (64, 1, 1, 64), "sin": (64, 1, 1, 64),
}  # fmt: skip
GRADS = {"dKey": (2, 3, 5, 13), "dValue": (2, 3, 5, 5), "cos": (9, 1, 1, 6), "sin": (9, 1, 1, 6)}


def test_key_and_value():
    found = infer("mla", MlaKvRope(7), DIMS)
    assert found == {"key": (2, 3, 5, 13), "value": (2, 3, 5, 5)}


def test_the_eight_outputs_of_mxfp8():
    found = infer("mla", MlaKvRope(128, "mxfp8"), TE)
    assert found == {
        "key_row": (2, 4, 64, 192), "key_row_scale": (2, 4, 64, 6),
        "key_column": (2, 4, 64, 192), "key_column_scale": (2, 4, 2, 192),
        "value_row": (2, 4, 64, 128), "value_row_scale": (2, 4, 64, 4),
        "value_column": (2, 4, 64, 128), "value_column_scale": (2, 4, 2, 128),
    }  # fmt: skip


def test_gradients():
    found = infer("mla", MlaKvRopeBackward(7, 5), GRADS)
    assert found == {"dKV": (2, 3, 5, 12), "dK_rope": (2, 1, 5, 6)}
    for port in ("dKey", "dValue"):
        alone = {p: d for p, d in GRADS.items() if p not in ("dKey", "dValue") or p == port}
        assert infer("mla", MlaKvRopeBackward(7, 5), alone) == found


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv": (2, 3, 5)}, "kv [2, 3, 5] has 3 dims; use [b, h, s, d]"),
        ({"kv": (2, 3, 5, 6)}, "nope_dim=7 of the 6 channels of kv [2, 3, 5, 6]"),
        ({"k_rope": (2, 3, 5, 6)}, "k_rope [2, 3, 5, 6] does not belong to kv [2, 3, 5, 12]"),
        ({"k_rope": (2, 3, 5, 6)}, "use [2, 1, 5, r]"),
        ({"k_rope": (2, 1, 5, 5)}, "r=5 channels; a rotation acts on pairs"),
        ({"cos": (9, 1, 1, 3)}, "cos [9, 1, 1, 3] and sin [9, 1, 1, 6] differ"),
        ({"cos": (9, 1, 1, 3), "sin": (9, 1, 1, 3)}, "use [s_max, 1, 1, 6], a column for each"),
        ({"cos": (9, 2, 1, 6), "sin": (9, 2, 1, 6)}, "use [s_max, 1, 1, 6]"),
        ({"cos": (4, 1, 1, 6), "sin": (4, 1, 1, 6)}, "4 rows for 5 tokens"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict[str, tuple[int, ...]], text: str):
    with pytest.raises(GraphError) as caught:
        infer("mla", MlaKvRope(7), DIMS | changes)
    assert str(caught.value).startswith("mla_kv_rope 'mla': ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("nope", "s", "text"),
    [
        (128, 48, "s=48, no multiple of 32; MXFP8 scales blocks of 32 tokens, so pad to 64"),
        (120, 64, "nope_dim + r = 184, no multiple of 32; MXFP8 scales blocks of 32 channels"),
    ],
)
def test_mxfp8_needs_whole_blocks(nope: int, s: int, text: str):
    dims = TE | {"kv": (2, 4, s, 256), "k_rope": (2, 1, s, 64)}
    with pytest.raises(GraphError) as caught:
        infer("mla", MlaKvRope(nope, "mxfp8"), dims)
    assert text in str(caught.value)
    assert infer("mla", MlaKvRope(nope), dims)


def test_a_nope_part_may_end_inside_a_block():
    dims = TE | {"k_rope": (2, 1, 64, 16), "cos": (64, 1, 1, 16), "sin": (64, 1, 1, 16)}
    dims["kv"] = (2, 4, 64, 48 + 32)
    assert infer("mla", MlaKvRope(48, "mxfp8"), dims)["key_row"] == (2, 4, 64, 64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dKey": (2, 3, 5, 12)}, "dKey is [2, 3, 5, 12]; with nope_dim=7, v_dim=5"),
        ({"dValue": (2, 3, 5, 6)}, "use [2, 3, 5, 5]"),
        ({"dValue": (2, 1, 5, 5)}, "dValue is [2, 1, 5, 5]"),
        ({"cos": (3, 1, 1, 6), "sin": (3, 1, 1, 6)}, "3 rows for 5 tokens"),
        ({"cos": (9, 1, 1, 5), "sin": (9, 1, 1, 5)}, "5 wide; use an even width"),
    ],
)
def test_gradients_that_do_not_fit(changes: dict[str, tuple[int, ...]], text: str):
    with pytest.raises(GraphError) as caught:
        infer("mla", MlaKvRopeBackward(7, 5), GRADS | changes)
    assert text in str(caught.value)


def types(**changes: DType) -> dict[str, DType]:
    return {"kv": BF16, "k_rope": BF16, "cos": F32, "sin": F32} | changes


@pytest.mark.parametrize(
    ("quantize", "dtypes", "text"),
    [
        (None, types(k_rope=F32), "k_rope is fp32 but kv is bf16"),
        (None, types(cos=BF16), "cos is bf16 but sin is fp32"),
        (None, types(cos=DType.HALF, sin=DType.HALF), "cos and sin are fp16; use bf16 or fp32"),
        (None, types(kv=DType.FP8_E4M3), "kv is fp8_e4m3; use fp16, bf16, fp32, fp64"),
        ("mxfp8", types(kv=F32, k_rope=F32), "kv is fp32, but quantize='mxfp8' takes bf16"),
    ],
)
def test_types_that_do_not_fit(quantize, dtypes: dict[str, DType], text: str):
    with pytest.raises(GraphError) as caught:
        check_dtypes("mla", MlaKvRope(7, quantize), dtypes)
    assert text in str(caught.value)


def test_types_of_what_is_written():
    op = MlaKvRope(128, "mxfp8")
    assert output_dtype(op, "key_row", types()) is DType.FP8_E4M3
    assert output_dtype(op, "value_column_scale", types()) is DType.FP8_E8M0
    assert output_dtype(MlaKvRope(7), "key", types()) is BF16
    assert DType.UINT8 in output_dtypes("key_column")
    assert DType.UINT8 not in output_dtypes("key")


def graph(quantize=None):
    b = Build(BF16)
    for name, dim in TE.items():
        b.tensor(name, *dim)
    port = "key" if quantize is None else "key_row"
    b.node("mla", MlaKvRope(128, quantize), {p: p for p in TE}, {port: "k"})
    return b.graph("k")


def test_text_file_and_key():
    assert "= mla_kv_rope 'mla' (kv=kv, k_rope=k_rope, cos=cos, sin=sin, nope_dim=128)" in str(
        graph()
    )
    assert "nope_dim=128, quantize=mxfp8)" in str(graph("mxfp8"))
    assert loads(dumps(graph("mxfp8"))) == graph("mxfp8")
    assert key(graph()) != key(graph("mxfp8"))
