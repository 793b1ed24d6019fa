"""Norm and rotation become one launch where the value between is nobody else's."""

from dataclasses import replace
from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import NormRope, NormRopeBackward, RmsNorm, RmsNormBackward
from ropegraph.passes import pipeline
from ropegraph.passes.fuse_norm_rope import fuse_norm_rope
from ropegraph.passes.merge_rope_qk import merge_rope_qk
from tests.ir.build import Build
from tests.passes.text import declines, done, nodes, run


def inputs(b: Build, d: int = 8) -> None:
    b.tensor("x", 2, 6, 5, d), b.tensor("w", 1, 1, 1, d), b.tensor("all", 1, 6, 1, d)


def norm(b: Build, name: str, x: str, out: str, scale: str = "w", **attrs: Any) -> None:
    outs = {"Y": out, **({"inv_variance": attrs.pop("inverse")} if "inverse" in attrs else {})}
    b.node(name, RmsNorm(**attrs), {"input": x, "scale": scale}, outs)


def norm_first(**rope: Any) -> Build:
    b = Build()
    inputs(b)
    norm(b, "norm", "x", "n", inverse="inv")
    b.rope("rope", "n", "y", **rope)
    return b


def rope_first() -> Build:
    b = Build()
    inputs(b)
    b.rope("rope", "x", "r", output_scale=0.5)
    norm(b, "norm", "r", "y", epsilon=1e-5)
    return b


def test_norm_then_rope():
    g = norm_first(output_scale=0.3).graph("y", saved=["inv"])
    assert nodes(run(fuse_norm_rope, g)) == [
        (
            "y*, inv+ = norm_rope 'norm+rope' (input=x, scale=w, freqs=freqs, epsilon=1e-06, "
            "output_scale=0.3)"
        )
    ]
    assert done(fuse_norm_rope, g) == ["norm: one launch for norm and rope"]
    assert run(fuse_norm_rope, g).nodes[0].attrs.names == ("norm", "rope")


def test_rope_then_norm():
    assert nodes(run(fuse_norm_rope, rope_first().graph("y"))) == [
        (
            "y* = norm_rope 'rope+norm' (input=x, scale=w, freqs=freqs, epsilon=1e-05, "
            "output_scale=0.5, norm_first=False)"
        )
    ]


def backward(norm_first: bool = True, scale: str = "w", d: int = 8, **rope: Any) -> Build:
    b = Build()
    inputs(b, d)
    b.tensor("dy", 2, 6, 5, d)
    b.tensor("inv", 2, 1 if scale == "all" else 6, 5, 1)
    ports = {"scale": scale, "inv_variance": "inv"}
    if norm_first:
        b.rope_backward("rope_b", "dy", "g", **rope)
        ports = {"grad": "g", "input": "x", **ports}
        b.node("norm_b", RmsNormBackward(), ports, {"DX": "dx", "Dscale": "dw"})
    else:
        b.rope("rope", "x", "r")
        ports = {"grad": "dy", "input": "r", **ports}
        b.node("norm_b", RmsNormBackward(), ports, {"DX": "g", "Dscale": "dw"})
        b.rope_backward("rope_b", "g", "dx", **rope)
    return b


def test_gradients():
    assert nodes(run(fuse_norm_rope, backward().graph("dx", "dw"))) == [
        (
            "dx*, dw* = norm_rope_backward 'rope_b+norm_b' (dY=dy, input=x, scale=w, "
            "inv_variance=inv, freqs=freqs, output_scale=1)"
        )
    ]
    assert nodes(run(fuse_norm_rope, backward(norm_first=False).graph("dx", "dw"))) == [
        (
            "dx*, dw* = norm_rope_backward 'norm_b+rope_b' (dY=dy, input=x, scale=w, "
            "inv_variance=inv, freqs=freqs, output_scale=1, norm_first=False)"
        )
    ]


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_gradient_of_a_norm_over_all_heads_is_fused_too(norm_first: bool):
    g = run(fuse_norm_rope, backward(norm_first, scale="all").graph("dx", "dw"))
    assert len(g.nodes) == 1
    assert isinstance(g.nodes[0].attrs, NormRopeBackward)
    assert g.values["dw"].dim == (1, 6, 1, 8)


def read_twice() -> Graph:
    b = norm_first()
    b.scale("other", "n", "z", 2.0)
    return b.graph("y", "z")


def as_table() -> Graph:
    b = Build()
    b.tensor("x", 8, 1, 1, 8), b.tensor("w", 1, 1, 1, 8)
    norm(b, "norm", "x", "freqs")
    b.tensor("q", 1, 2, 5, 8)
    b.rope("rope", "q", "y")
    return b.graph("y")


def lone() -> Graph:
    b = Build()
    inputs(b)
    norm(b, "norm", "x", "n")
    b.scale("s", "n", "y", 2.0)
    return b.graph("y")


def within() -> Graph:
    g = norm_first().graph("y")
    values = dict(g.values)
    values["n"] = replace(values["n"], within="x", start=0)
    return replace(g, values=values)


def wide(dtype: DType) -> Graph:
    b = Build(dtype)
    inputs(b, 516)
    compute = dtype if dtype is DType.DOUBLE else DType.FLOAT
    norm(b, "norm", "x", "n", compute=compute)
    b.rope("rope", "n", "y", compute=compute)
    return b.graph("y")


def exact() -> Graph:
    b = norm_first(numerics="nemo")
    return b.graph("y")


def undone_otherwise() -> Graph:
    return backward(norm_first=False, output_scale=3.0).graph("dx", "dw")


def statistics_of_another_type() -> Graph:
    g = norm_first().graph("y", "inv")
    values = dict(g.values)
    values["inv"] = replace(values["inv"], dtype=DType.HALF)
    return replace(g, values=values)


REASONS: dict[str, tuple[Graph, str]] = {
    "visible": (norm_first().graph("y", "n"), "'n' is a visible output or saved"),
    "saved": (norm_first().graph("y", saved=["n"]), "'n' is a visible output or saved"),
    "read twice": (read_twice(), "'n' is also read by ['other']"),
    "a table": (as_table(), "no rope comes right before or after it"),
    "alone": (lone(), "no rope comes right before or after it"),
    "within": (within(), "'n' lies within 'x'"),
    "wide": (wide(DType.BFLOAT16), "'x' has rows of 516 channels; one launch takes up to 512"),
    "bits": (exact(), "'rope' is bit-exact (numerics='nemo')"),
    "statistics": (
        statistics_of_another_type(), "'inv' is fp16; one launch writes fp32 there",
    ),
    "gradient seen": (backward().graph("dx", "dw", "g"), "'g' is a visible output or saved"),
    "dx unread": (backward(norm_first=False).graph("dx", "g"), "'g' is a visible output or saved"),
    "rotated seen": (
        backward(norm_first=False).graph("dx", "dw", "r"), "'r' is a visible output or saved",
    ),
    "another": (undone_otherwise(), "'rope_b' does not undo the rotation of 'rope'"),
}  # fmt: skip


@pytest.mark.parametrize(("graph", "reason"), REASONS.values(), ids=REASONS)
def test_declines(graph: Graph, reason: str):
    name = "norm_b" if any(n.name == "norm_b" for n in graph.nodes) else "norm"
    assert declines(fuse_norm_rope, graph) == {name: reason}


def test_in_fp64_everything_runs_on_torch_and_is_fused():
    assert len(run(fuse_norm_rope, wide(DType.DOUBLE)).nodes) == 1


def attention(norm_k: bool = True, k_scale: str = "wk", **k_norm: Any) -> Graph:
    b = Build()
    b.tensor("q", 2, 6, 5, 8), b.tensor("k", 2, 2, 5, 8), b.tensor("v", 2, 2, 5, 8)
    b.tensor("wq", 1, 1, 1, 8), b.tensor("wk", 1, 1, 1, 8), b.tensor("all", 1, 2, 1, 8)
    norm(b, "norm_q", "q", "qn", "wq")
    b.rope("rope_q", "qn", "q_rot")
    if norm_k:
        norm(b, "norm_k", "k", "kn", k_scale, **k_norm)
    b.rope("rope_k", "kn" if norm_k else "k", "k_rot")
    b.sdpa("attn", "q_rot", "k_rot", "v", attn_scale=0.25)
    return b.graph("o")


def test_q_and_k_after_the_folds():
    g = attention(epsilon=1e-3, zero_centered=True)
    final = pipeline.run(g)[-1].graph
    pair = final.nodes[0].attrs
    assert len(final.nodes) == 2
    assert [part.rope.output_scale for part in pair.parts] == [0.25, 1.0]
    assert [part.norm.epsilon for part in pair.parts] == [1e-6, 1e-3]
    assert pair.names == ("norm_q+rope_q", "norm_k+rope_k")


def two_types() -> Graph:
    g = attention()
    values = dict(g.values)
    values["wk"] = replace(values["wk"], dtype=DType.BFLOAT16)
    return replace(g, values=values)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (two_types(), "'norm_q+rope_q' and 'norm_k+rope_k' read or write different data types"),
        (attention(norm_k=False), "'norm_q+rope_q' and 'rope_k' rotate differently"),
        (
            attention(k_scale="all"),
            "only one of 'norm_q+rope_q' and 'norm_k+rope_k' normalises over all heads",
        ),
    ],
)
def test_what_is_no_pair(graph: Graph, reason: str):
    fused, _ = fuse_norm_rope.run(graph)
    assert declines(merge_rope_qk, fused) == {"attn": reason}


def test_a_norm_behind_the_rotation_keeps_the_scale_where_it_is():
    b = Build(fold="q")
    b.tensor("q", 2, 6, 5, 8), b.tensor("wq", 1, 1, 1, 8)
    b.tensor("k", 2, 2, 5, 8)
    b.rope("rope_q", "q", "qr")
    norm(b, "norm_q", "qr", "q_rot", "wq")
    b.rope("rope_k", "k", "k_rot")
    b.sdpa("attn", "q_rot", "k_rot", "k", attn_scale=0.25)
    trace = pipeline.run(b.graph("o"))
    (why,) = [d.text for t in trace for d in t.decisions if d.rule == "fold-attn-scale"]
    assert why == "'q_rot' is not made by rope or scale but by 'norm_q'"
    assert any(isinstance(n.attrs, NormRope) for n in trace[-1].graph.nodes)
