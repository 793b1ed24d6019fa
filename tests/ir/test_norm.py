"""Shapes, data types and text of rmsnorm: every message says what would fit."""

import pytest

from ropegraph.dtypes import DType
from ropegraph.errors import GraphError
from ropegraph.ir.ops import NormRope, RmsNorm, RmsNormBackward, Rope
from ropegraph.ir.serialize import dumps, key, loads
from ropegraph.ir.shapes import infer
from ropegraph.ir.types import check_dtypes, output_dtype
from tests.ir.build import Build

BF16, F32, F64 = DType.BFLOAT16, DType.FLOAT, DType.DOUBLE
DIMS = {"input": (2, 3, 5, 8), "scale": (1, 1, 1, 8)}
GRADS = {"grad": (2, 3, 5, 8), **DIMS, "inv_variance": (2, 3, 5, 1)}


def test_dims():
    assert infer("n", RmsNorm(), DIMS) == {"Y": (2, 3, 5, 8), "inv_variance": (2, 3, 5, 1)}
    whole = DIMS | {"scale": (1, 3, 1, 8)}
    assert infer("n", RmsNorm(), whole)["inv_variance"] == (2, 1, 5, 1)
    assert infer("n", RmsNormBackward(), GRADS) == {"DX": (2, 3, 5, 8), "Dscale": (1, 1, 1, 8)}
    one = {"input": (2, 1, 5, 8), "scale": (1, 1, 1, 8)}
    assert infer("n", RmsNorm(), one)["inv_variance"] == (2, 1, 5, 1)


@pytest.mark.parametrize(
    ("op", "changes", "text"),
    [
        (RmsNorm(), {"input": (2, 3, 5)}, "input [2, 3, 5] has 3 dims; use [b, h, s, d]"),
        (RmsNorm(), {"scale": (8,)}, "scale is [8] for input [2, 3, 5, 8]; use [1, 1, 1, 8]"),
        (RmsNorm(), {"scale": (1, 2, 1, 8)}, "or [1, 3, 1, 8] for all heads of a token together"),
        (RmsNormBackward(), {"grad": (2, 3, 5, 6)}, "grad is [2, 3, 5, 6]; use [2, 3, 5, 8]"),
        (RmsNormBackward(), {"inv_variance": (2, 1, 5, 1)}, "use [2, 3, 5, 1]"),
    ],
)
def test_shapes_that_do_not_fit(op: RmsNorm, changes: dict[str, tuple[int, ...]], text: str):
    with pytest.raises(GraphError) as caught:
        infer("n", op, GRADS | changes)
    assert text in str(caught.value)
    assert "'n': " in str(caught.value)


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        ({"input": BF16, "scale": DType.HALF}, "scale is fp16 but input is bf16; use bf16 or fp32"),
        ({"input": F32, "scale": BF16}, "scale is bf16 but input is fp32; use fp32"),
        ({"input": DType.INT32, "scale": F32}, "input is int32; use fp16, bf16, fp32, fp64"),
        ({"input": BF16, "scale": F32, "inv_variance": BF16}, "inv_variance is bf16; use fp32"),
        ({"input": F64, "scale": F64, "inv_variance": F32}, "use fp64, as rmsnorm writes it"),
    ],
)
def test_types_that_do_not_fit(dtypes: dict[str, DType], text: str):
    with pytest.raises(GraphError) as caught:
        check_dtypes("n", RmsNorm(), dtypes)
    assert text in str(caught.value)


def test_types_of_what_is_written():
    given = {"grad": BF16, "input": F32, "scale": F32}
    assert output_dtype(RmsNormBackward(), "DX", given) is F32
    assert output_dtype(RmsNormBackward(), "Dscale", given) is F32
    assert output_dtype(RmsNorm(), "inv_variance", {"input": BF16}) is F32
    assert output_dtype(RmsNorm(), "Y", {"input": BF16}) is BF16


def test_text_file_and_key():
    def graph(epsilon: float = 1e-5, centred: bool = False):
        b = Build(BF16)
        b.tensor("x", 2, 3, 5, 8), b.tensor("w", 1, 1, 1, 8)
        b.node("n", RmsNorm(centred, epsilon=epsilon), {"input": "x", "scale": "w"}, {"Y": "y"})
        return b.graph("y")

    assert "= rmsnorm 'n' (input=x, scale=w, epsilon=1e-05)" in str(graph())
    assert "zero_centered=True, epsilon=1e-05)" in str(graph(centred=True))
    assert loads(dumps(graph())) == graph()
    assert len({key(graph()), key(graph(1e-6)), key(graph(centred=True))}) == 3


def test_text_of_a_fused_one():
    b = Build(BF16)
    b.tensor("x", 2, 3, 5, 8), b.tensor("w", 1, 1, 1, 8), b.tensor("f", 5, 1, 1, 8, dtype=F32)
    op = NormRope(RmsNorm(), Rope(8, 0, output_scale=0.3), False, ("n", "r"))
    b.node("n+r", op, {"input": "x", "scale": "w", "freqs": "f"}, {"output": "y"})
    graph = b.graph("y")
    assert (
        "= norm_rope 'n+r' (input=x, scale=w, freqs=f, epsilon=1e-06, rope_dim=8, rope_offset=0, "
        "output_scale=0.3, norm_first=False)"
    ) in str(graph)
    assert loads(dumps(graph)) == graph
