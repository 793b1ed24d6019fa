"""A product with a host number moves into the rotation before or after it."""

import pytest

from ropegraph.dtypes import DType
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import RopeFreqsGrad
from ropegraph.passes.fold_scale_node import fold_scale_node
from tests.ir.build import Build
from tests.passes.text import declines, done, nodes, run


def start(dtype: DType = DType.FLOAT) -> Build:
    b = Build(dtype)
    b.tensor("x", 2, 3, 5, 8)
    return b


def behind(factor: float = 0.5, dtype: DType = DType.FLOAT, **rope: object) -> Build:
    """rope, then scale: x -> y -> z."""
    b = start(dtype)
    b.rope("turn", "x", "y", **rope)
    b.scale("s", "y", "z", factor)
    return b


def ahead(factor: float = 0.5, dtype: DType = DType.FLOAT, **rope: object) -> Build:
    """scale, then rope: x -> y -> z."""
    b = start(dtype)
    b.scale("s", "x", "y", factor)
    b.rope("turn", "y", "z", **rope)
    return b


TURNED = "z* = rope 'turn' (input=x, freqs=freqs, output_scale={})"


@pytest.mark.parametrize("make", [behind, ahead])
def test_the_factor_multiplies_the_scale_of_the_rotation(make):
    assert nodes(run(fold_scale_node, make().graph("z"))) == [TURNED.format("0.5")]
    own = make(0.5, output_scale=3.0).graph("z")
    assert nodes(run(fold_scale_node, own)) == [TURNED.format("1.5")]
    negative = make(-0.25, output_scale=-2.0).graph("z")
    assert nodes(run(fold_scale_node, negative)) == [TURNED.format("0.5")]
    assert done(fold_scale_node, own) == ["s: factor 0.5 moved to 'turn'"]


def test_a_rope_backward_takes_it_as_well():
    b = start()
    b.scale("before", "x", "y", 0.5)
    b.rope_backward("turn", "y", "z", output_scale=3.0)
    b.scale("after", "z", "w", 0.25)
    assert nodes(run(fold_scale_node, b.graph("w"))) == [
        "w* = rope_backward 'turn' (dY=x, freqs=freqs, output_scale=0.375)"
    ]


def test_scales_in_a_row_become_one():
    b = start()
    b.scale("a", "x", "y", 0.5), b.scale("b", "y", "z", 3.0), b.scale("c", "z", "w", -1.0)
    after = run(fold_scale_node, b.graph("w"))
    assert nodes(after) == ["w* = scale 'c' (input=x, factor=-1.5)"]


def test_every_reader_takes_it_or_none_does():
    b = ahead()
    b.rope("other", "y", "w", output_scale=2.0)
    assert nodes(run(fold_scale_node, b.graph("z", "w"))) == [
        "z* = rope 'turn' (input=x, freqs=freqs, output_scale=0.5)",
        "w* = rope 'other' (input=x, freqs=freqs, output_scale=1)",
    ]
    b.sum("plus", ["y", "y"], "u")
    assert declines(fold_scale_node, b.graph("z", "w", "u")) == {
        "s": "'x' is not made by rope or scale; 'y' is read by ['plus'], which rotate nothing"
    }


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (
            ahead().graph("y", "z"),
            "'x' is not made by rope or scale; 'y' is a visible output",
        ),
        (
            ahead().graph("z", saved=["y"]),
            "'x' is not made by rope or scale; 'y' is a visible output",
        ),
        (
            behind().graph("y", "z"),
            "'y' is a visible output; 'z' is a visible output",
        ),
        (
            behind(2.0**101).graph("z"),
            (
                "the total output_scale of 'turn' would be 2.5353e+30, outside "
                "[7.88861e-31, 1.26765e+30] for fp32; 'z' is a visible output"
            ),
        ),
        (
            behind(32.0, DType.HALF).graph("z"),
            (
                "the total output_scale of 'turn' would be 32, outside [0.000976562, 16] for fp16; "
                "'z' is a visible output"
            ),
        ),
        (
            ahead(2.0**-11, DType.HALF).graph("z"),
            (
                "'x' is not made by rope or scale; the total output_scale of 'turn' would be "
                "0.000488281, outside [0.000976562, 16] for fp16"
            ),
        ),
        (
            behind(0.0).graph("z"),
            (
                "the total output_scale of 'turn' would be 0, outside [7.88861e-31, 1.26765e+30] "
                "for fp32; 'z' is a visible output"
            ),
        ),
        (
            behind(numerics="nemo").graph("z"),
            "'turn' is bit-exact (numerics='nemo'); 'z' is a visible output",
        ),
        (
            ahead(numerics="hf").graph("z"),
            "'x' is not made by rope or scale; 'turn' is bit-exact (numerics='hf')",
        ),
    ],
)
def test_reasons_to_leave_it(graph: Graph, reason: str):
    assert declines(fold_scale_node, graph) == {"s": reason}


def test_a_rope_that_others_read_keeps_its_scale():
    b = behind()
    b.sum("plus", ["y", "y"], "w")
    assert declines(fold_scale_node, b.graph("z", "w")) == {
        "s": "'y' is also read by ['plus']; 'z' is a visible output"
    }


def test_a_scaled_table_of_angles_is_no_scaled_rotation():
    b = start()
    b.tensor("angles", 5, 1, 1, 8), b.scale("s", "angles", "freqs", 0.5)
    b.rope("turn", "x", "z")
    assert declines(fold_scale_node, b.graph("z")) == {
        "s": "'angles' is not made by rope or scale; 'freqs' is read by ['turn'], which rotate "
        "nothing"
    }


def test_the_gradient_of_angles_is_no_rotation():
    b = start()
    b.tensor("freqs", 5, 1, 1, 8), b.tensor("dy", 2, 3, 5, 8)
    b.scale("s", "dy", "dy2", 0.5)
    ports = {"input": "x", "dY": "dy2", "freqs": "freqs"}
    b.node("grad", RopeFreqsGrad(8, 0), ports, {"dfreqs": "df"})
    assert "which rotate nothing" in declines(fold_scale_node, b.graph("df"))["s"]
