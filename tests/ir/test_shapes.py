"""Every shape rule: the dims it gives, and the message where dims do not fit."""

from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.errors import GraphError
from ropegraph.ir.ops import (
    Op,
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    RopePair,
    Scale,
    Sdpa,
    SdpaBackward,
    Sum,
)
from ropegraph.ir.shapes import infer
from ropegraph.ir.types import check_dtypes, default_dtype, output_dtype

X, TABLE = (2, 3, 5, 8), (5, 1, 1, 8)
ATTENTION = {"q": (2, 6, 5, 8), "k": (2, 2, 7, 8), "v": (2, 3, 7, 4)}
GIVEN = {"o": (2, 6, 5, 4), "dO": (2, 6, 5, 4), "stats": (2, 6, 5, 1)}
PAGED = {
    **ATTENTION,
    "k": (9, 2, 4, 8),
    "v": (9, 3, 2, 4),
    "paged_attention_k_table": (2, 1, 3, 1),
    "paged_attention_v_table": (2, 1, 6, 1),
}
ROPE = Rope(8, 0)
PAIR = RopePair((ROPE, Rope(4, 2)))


@pytest.mark.parametrize(
    ("op", "dims", "want"),
    [
        (ROPE, {"input": X, "freqs": TABLE}, {"output": X}),
        (ROPE, {"input": X, "freqs": (9, 2, 1, 8)}, {"output": X}),
        (Rope(4, 1, half_width=True), {"input": X, "freqs": (5, 1, 1, 2)}, {"output": X}),
        (Rope(6, 0), {"input": (1, 1, 1, 6), "freqs": (1, 1, 1, 6)}, {"output": (1, 1, 1, 6)}),
        (RopeBackward(8, 0), {"dY": X, "freqs": TABLE}, {"dX": X}),
        (
            RopeFreqsGrad(8, 0),
            {"input": X, "dY": X, "freqs": (7, 2, 1, 8)},
            {"dfreqs": (7, 2, 1, 8)},
        ),
        (
            PAIR,
            {"input0": X, "freqs0": TABLE, "input1": (2, 1, 4, 7), "freqs1": (4, 1, 1, 4)},
            {"output0": X, "output1": (2, 1, 4, 7)},
        ),
        (Sdpa(), ATTENTION, {"O": (2, 6, 5, 4), "Stats": (2, 6, 5, 1)}),
        (Sdpa(max_seq_len_kv=12), PAGED, {"O": (2, 6, 5, 4), "Stats": (2, 6, 5, 1)}),
        (
            SdpaBackward(),
            ATTENTION | GIVEN | {"bias": (1, 1, 5, 7), "sink_token": (1, 6, 1, 1)},
            {
                "dQ": ATTENTION["q"],
                "dK": ATTENTION["k"],
                "dV": ATTENTION["v"],
                "dBias": (1, 1, 5, 7),
                "dSink_token": (1, 6, 1, 1),
            },
        ),
        (
            SdpaBackward(),
            ATTENTION | GIVEN,
            {"dQ": (2, 6, 5, 8), "dK": (2, 2, 7, 8), "dV": (2, 3, 7, 4)},
        ),
        (Scale(2.0), {"input": (3, 4)}, {"output": (3, 4)}),
        (Sum(), {"0": X, "1": X, "2": X}, {"output": X}),
    ],
)
def test_output_dims(op: Op, dims: dict[str, Any], want: dict[str, Any]):
    assert infer("n", op, dims) == want


def attention(**changed: Any) -> dict[str, Any]:
    return ATTENTION | changed


def paged(**changed: Any) -> dict[str, Any]:
    return PAGED | changed


def backward(**changed: Any) -> dict[str, Any]:
    return ATTENTION | GIVEN | changed


BAD = {
    "rank": (ROPE, {"input": (3, 5, 8), "freqs": TABLE}, "input [3, 5, 8] has 3 dims"),
    "odd": (Rope(33, 0), {"input": (1, 1, 1, 33), "freqs": TABLE}, "rope_dim=33 of the 33 channel"),
    "wide": (Rope(6, 0), {"input": (1, 1, 1, 4), "freqs": TABLE}, "rope_dim=6 is more than the 4"),
    "wide, odd head": (Rope(6, 0), {"input": (1, 1, 1, 5)}, "use an even one up to 4"),
    "offset": (Rope(4, 5), {"input": X}, "rope_offset=5 with rope_dim=4 leaves the 8 channels"),
    "offset below 0": (Rope(4, -1), {"input": X}, "rope_offset=-1 with rope_dim=4 ... use 0 to 4"),
    "table too wide": (
        Rope(4, 0),
        {"input": X, "freqs": TABLE},
        "freqs [5, 1, 1, 8] is 8 wide, but rope_dim=4 of 8 channels ... wide or rope_dim=8",
    ),
    "table half as wide": (
        ROPE,
        {"input": X, "freqs": (5, 1, 1, 4)},
        (
            "4 wide, but rope_dim=8 of 8 channels ... reads 8 columns; ... or rope_dim=4 if it is "
            "for a part of each head, half_width=True if it has each angle once"
        ),
    ),
    "table of full width": (
        Rope(8, 0, half_width=True),
        {"input": X, "freqs": TABLE},
        "half_width=True reads 4 columns; use a table 4 wide or half_width=False",
    ),
    "table of 3 heads": (ROPE, {"input": X, "freqs": (5, 1, 3, 8)}, "is not a table of angles"),
    "table of 3 batches": (
        ROPE,
        {"input": X, "freqs": (5, 3, 1, 8)},
        "freqs [5, 3, 1, 8] is not a table of angles; use [s, 1, 1, 8], or [s, 2, 1, 8]",
    ),
    "table of rank 2": (ROPE, {"input": X, "freqs": (5, 8)}, "freqs [5, 8] is not a table"),
    "table too short": (ROPE, {"input": X, "freqs": (4, 1, 1, 8)}, "has 4 rows for 5 positions"),
    "backward table": (RopeBackward(8, 0), {"dY": X, "freqs": (4, 1, 1, 8)}, "4 rows for 5"),
    "backward width": (RopeBackward(10, 0), {"dY": X}, "more than the 8 channels of dY"),
    "freqs gradient": (
        RopeFreqsGrad(8, 0),
        {"input": X, "dY": (2, 3, 5, 6), "freqs": TABLE},
        "dY [2, 3, 5, 6] differs from input [2, 3, 5, 8]",
    ),
    "second of a pair": (
        PAIR,
        {"input0": X, "freqs0": TABLE, "input1": X, "freqs1": TABLE},
        "8 wide, but rope_dim=4",
    ),
    "q rank": (Sdpa(), attention(q=(6, 5, 8)), "q [6, 5, 8] has 3 dims; use [b, h, s, d]"),
    "k rank": (Sdpa(), attention(k=(2, 2, 7, 8, 1)), "k [2, 2, 7, 8, 1] has 5 dims"),
    "v rank": (Sdpa(), attention(v=()), "v [] has 0 dims"),
    "d_qk": (Sdpa(), attention(k=(2, 2, 7, 6)), "k [2, 2, 7, 6] has d_qk=6 but q"),
    "heads of k": (
        Sdpa(),
        attention(k=(2, 4, 7, 8)),
        "is not a multiple of the 4 heads of k",
    ),
    "heads of v": (
        Sdpa(),
        attention(v=(2, 5, 7, 4)),
        "is not a multiple of the 5 heads of v",
    ),
    "no heads of k": (Sdpa(), attention(k=(2, 0, 7, 8)), "not a multiple of the 0 heads of k"),
    "no heads of q": (Sdpa(), attention(q=(2, 0, 5, 8)), "h_q=0 is not a multiple of the 2 heads"),
    "batches": (Sdpa(), attention(k=(1, 2, 7, 8)), "k [1, 2, 7, 8] and v [2, 3, 7, 4] differ"),
    "keys": (Sdpa(), attention(v=(2, 3, 6, 4)), "has s_kv=7 keys but v [2, 3, 6, 4] has 6"),
    "bias": (Sdpa(), attention(bias=(2, 6, 7, 5)), "does not broadcast to the logits [2, 6, 5, 7]"),
    "bias rank": (Sdpa(), attention(bias=(5, 7)), "bias [5, 7] does not broadcast"),
    "seq_len_q": (Sdpa(), attention(seq_len_q=(3, 1, 1, 1)), "seq_len_q is [3, 1, 1, 1]; use [2,"),
    "seq_len_kv": (Sdpa(), attention(seq_len_kv=(2,)), "seq_len_kv is [2]; use [2, 1, 1, 1]"),
    "sink": (Sdpa(), attention(sink_token=(1, 2, 1, 1)), "sink_token is [1, 2, 1, 1]; use [1, 6,"),
    "attn_scale": (Sdpa(), attention(attn_scale=(2, 1, 1, 1)), "attn_scale [2, 1, 1, 1] must hold"),
    "seed": (Sdpa(), attention(seed=(1, 1, 1, 2)), "seed [1, 1, 1, 2] must hold one number"),
    "offset of dropout": (Sdpa(), attention(offset=(5,)), "offset [5] must hold one number"),
    "page table": (
        Sdpa(max_seq_len_kv=12),
        paged(paged_attention_k_table=(2, 3)),
        "paged_attention_k_table [2, 3] must be [2, 1, pages per sequence, 1]",
    ),
    "page table of another batch": (
        Sdpa(max_seq_len_kv=12),
        paged(paged_attention_v_table=(3, 1, 6, 1)),
        "paged_attention_v_table [3, 1, 6, 1] must be [2, 1, pages",
    ),
    "too few pages": (
        Sdpa(max_seq_len_kv=13),
        paged(),
        "paged_attention_max_seq_len_kv=13 is more than the 3 pages of 4 tokens",
    ),
    "o": (SdpaBackward(), backward(o=(2, 6, 5, 8)), "o is [2, 6, 5, 8]; use [2, 6, 5, 4]"),
    "dO": (SdpaBackward(), backward(dO=(2, 6, 4, 4)), "dO is [2, 6, 4, 4]; use [2, 6, 5, 4]"),
    "stats": (SdpaBackward(), backward(stats=(2, 6, 5)), "stats is [2, 6, 5]; use [2, 6, 5, 1]"),
    "backward of q": (SdpaBackward(), backward(q=(6, 5, 8)), "q [6, 5, 8] has 3 dims"),
    "sum": (Sum(), {"0": X, "1": (2, 3, 5, 6)}, "1 [2, 3, 5, 6] differs from 0 [2, 3, 5, 8]"),
}


@pytest.mark.parametrize(("op", "dims", "text"), BAD.values(), ids=BAD)
def test_a_shape_that_does_not_fit_is_named(op: Op, dims: dict[str, Any], text: str):
    with pytest.raises(GraphError) as caught:
        infer("node_7", op, dims)
    message = str(caught.value)
    assert "'node_7'" in message
    for part in text.split(" ... "):
        assert part in message


HALF, FLOAT, DOUBLE, INT32 = DType.HALF, DType.FLOAT, DType.DOUBLE, DType.INT32
DTYPES = {
    "integer data": (ROPE, {"input": INT32, "freqs": FLOAT}, "input is int32; use fp16, bf16"),
    "fp8 data": (ROPE, {"input": DType.FP8_E4M3, "freqs": FLOAT}, "input is fp8_e4m3; use fp16"),
    "16-bit angles": (ROPE, {"input": HALF, "freqs": HALF}, "freqs is fp16; use fp32, fp64"),
    "k": (Sdpa(), {"q": HALF, "k": FLOAT, "v": HALF}, "k is fp32 but q is fp16; both must have"),
    "v": (Sdpa(), {"q": HALF, "k": HALF, "v": DType.BFLOAT16}, "v is bf16 but q is fp16"),
    "boolean bias": (
        Sdpa(),
        {"q": HALF, "k": HALF, "v": HALF, "bias": DType.BOOLEAN},
        "bias is boolean; use fp16, bf16, fp32, fp64",
    ),
    "fractional lengths": (Sdpa(), {"q": HALF, "seq_len_kv": FLOAT}, "seq_len_kv is fp32; use int"),
    "8-bit pages": (
        Sdpa(),
        {"q": HALF, "paged_attention_k_table": DType.INT8},
        "paged_attention_k_table is int8; use int32, int64",
    ),
    "seed": (Sdpa(), {"q": HALF, "seed": DOUBLE}, "seed is fp64; use int32, int64"),
    "sink": (Sdpa(), {"q": HALF, "sink_token": HALF}, "sink_token is fp16; use fp32, fp64"),
    "stats": (SdpaBackward(), {"q": HALF, "stats": HALF}, "stats is fp16; use fp32, fp64"),
    "dO": (SdpaBackward(), {"q": HALF, "dO": FLOAT}, "dO is fp32 but q is fp16"),
    "score_mod": (Sdpa(), {"q": HALF, "score_mod.0": DType.UINT8}, "score_mod.0 is uint8; use"),
    "scale": (Scale(2.0), {"input": INT32}, "input is int32; use fp16"),
}


@pytest.mark.parametrize(("op", "dtypes", "text"), DTYPES.values(), ids=DTYPES)
def test_a_data_type_that_does_not_fit_is_named(op: Op, dtypes: dict[str, DType], text: str):
    with pytest.raises(GraphError) as caught:
        check_dtypes("node_7", op, dtypes)
    assert "'node_7': " + text in str(caught.value)


@pytest.mark.parametrize(
    ("port", "io", "first", "want"),
    [
        ("input", HALF, DType.NOT_SET, HALF),
        ("k", HALF, FLOAT, HALF),
        ("freqs", HALF, HALF, FLOAT),
        ("stats", HALF, HALF, FLOAT),
        ("stats", HALF, DOUBLE, DOUBLE),
        ("attn_scale", HALF, DOUBLE, DOUBLE),
        ("seq_len_q", HALF, HALF, INT32),
        ("seed", HALF, HALF, INT32),
        ("score_mod.0", HALF, HALF, FLOAT),
    ],
)
def test_a_type_that_nobody_declared(port: str, io: DType, first: DType, want: DType):
    assert default_dtype(port, io, first) is want


@pytest.mark.parametrize(
    ("op", "port", "dtypes", "want"),
    [
        (ROPE, "output", {"input": HALF, "freqs": FLOAT}, HALF),
        (Sdpa(), "O", {"q": HALF}, HALF),
        (Sdpa(), "Stats", {"q": HALF}, FLOAT),
        (Sdpa(), "Stats", {"q": DOUBLE}, DOUBLE),
        (SdpaBackward(), "dQ", {"q": HALF}, HALF),
        (SdpaBackward(), "dBias", {"q": HALF, "bias": FLOAT}, FLOAT),
        (SdpaBackward(), "dSink_token", {"q": HALF, "sink_token": DOUBLE}, DOUBLE),
        (RopeFreqsGrad(8, 0), "dfreqs", {"input": HALF, "dY": HALF, "freqs": FLOAT}, FLOAT),
    ],
)
def test_the_type_of_an_output(op: Op, port: str, dtypes: dict[str, DType], want: DType):
    assert output_dtype(op, port, dtypes) is want
