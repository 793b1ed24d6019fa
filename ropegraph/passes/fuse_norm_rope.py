"""Norm and rotate in one launch.

    n = rmsnorm(x); y = rope(n)                         ->   y = norm_rope(x)
    r = rope(x); y = rmsnorm(r)                         ->   y = norm_rope(x, norm_first=False)
    g = rope_backward(dy); dx, dw = rmsnorm_backward(g) ->   dx, dw = norm_rope_backward(dy)
    r = rope(x); g, dw = rmsnorm_backward(dy, r);
    dx = rope_backward(g)                               ->   dx, dw = norm_rope_backward(dy)

Equal in exact arithmetic. One rounding goes: the value between is never stored. It must be virtual,
of memory of its own, and read by nobody else. This runs after the folds, which see the rope.

A fused node falls to torch as a whole, so only what a kernel of ours takes on a GPU is fused: a
rotation in fp32 arithmetic over heads in one level, and rows of up to MAX_WIDTH channels. In fp64
all runs on torch anyway, and is fused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ropegraph.dtypes import DType, short
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import (
    NormRope,
    NormRopeBackward,
    RmsNorm,
    RmsNormBackward,
    Rope,
    RopeBackward,
    shared,
)
from ropegraph.passes.rewrite import Decline, Edit, Rule

MAX_WIDTH = 512
_DATA = ("input", "dY")


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
    match node.attrs:
        case RmsNorm():
            return _forward(graph, node)
        case _:
            return _backward(graph, node)


def _forward(graph: Graph, norm: Node[RmsNorm]) -> Edit | Decline:
    y = norm.outputs.get("Y")
    readers = [] if y is None else graph.reading(y)
    before = graph.producer(norm.inputs["input"])
    ropes = [n for n in readers if isinstance(n.attrs, Rope) and n.inputs["input"] == y]
    if y is not None and ropes:
        rope: Node[Any] = ropes[0]
        between, first, last = y, norm, rope
    elif before is not None and isinstance(before.attrs, Rope):
        rope = before
        between, first, last = norm.inputs["input"], rope, norm
    else:
        return Decline("no rope comes right before or after it")
    if reason := _why_not_between(graph, between, last) or _why_not(graph, norm, rope):
        return Decline(reason)
    norm_first = first is norm
    inputs = {"input": first.inputs["input"], "scale": norm.inputs["scale"], **_angles(rope)}
    outputs = {"output": last.outputs["output" if norm_first else "Y"]}
    outputs |= {p: v for p, v in norm.outputs.items() if p == "inv_variance"}
    op = NormRope(norm.attrs, cast(Rope, rope.attrs), norm_first, (norm.name, rope.name))
    return _edit(graph, Node(f"{first.name}+{last.name}", op, inputs, outputs), first, last)


def _backward(graph: Graph, norm: Node[RmsNormBackward]) -> Edit | Decline:
    grad, dx = norm.inputs["grad"], norm.outputs.get("DX")
    maker = graph.producer(grad)
    if maker is not None and isinstance(maker.attrs, RopeBackward):
        if reason := _why_not_between(graph, grad, norm) or _why_not(graph, norm, maker):
            return Decline(reason)
        return _backward_edit(graph, norm, maker, maker.inputs["dY"], norm.inputs["input"], dx)
    turned = norm.inputs["input"]
    again = graph.producer(turned)
    ropes = [] if dx is None else graph.reading(dx)
    if again is None or not isinstance(again.attrs, Rope):
        return Decline("no rope_backward comes before it, and its input is not made by rope here")
    if reason := _why_not_between(graph, turned, norm):
        return Decline(reason)
    if dx is None or len(ropes) != 1 or not isinstance(ropes[0].attrs, RopeBackward):
        return Decline("its DX is not read by one rope_backward of its own")
    back: Node[Any] = ropes[0]
    if reason := _why_not_between(graph, dx, back) or _why_not(graph, norm, back):
        return Decline(reason)
    if shared(back.attrs) != shared(again.attrs) or _angles(back) != _angles(again):
        return Decline(f"{back.name!r} does not undo the rotation of {again.name!r}")
    x = again.inputs["input"]
    return _backward_edit(graph, norm, back, grad, x, back.outputs["dX"], again)


def _backward_edit(
    graph: Graph, norm: Node[RmsNormBackward], rope: Node[Any], dy: str, x: str, dx: str | None,
    again: Node[Any] | None = None,
) -> Edit:  # fmt: skip
    inputs = {"dY": dy, "input": x}
    inputs |= {port: norm.inputs[port] for port in ("scale", "inv_variance")} | _angles(rope)
    outputs = {} if dx is None else {"dX": dx}
    outputs |= {p: v for p, v in norm.outputs.items() if p == "Dscale"}
    op = NormRopeBackward(norm.attrs, rope.attrs, again is None, (norm.name, rope.name))
    ends = (rope, norm) if again is None else (norm, rope)
    fused = Node[Any](f"{ends[0].name}+{ends[1].name}", op, inputs, outputs)
    return _edit(graph, fused, *ends, *(() if again is None else (again,)))


def _edit(graph: Graph, fused: Node[Any], *parts: Node[Any]) -> Edit:
    fused = replace(fused, name=graph.free_name(fused.name))
    names = " and ".join(p.name for p in parts)
    return Edit((fused,), tuple(p.name for p in parts), f"one launch for {names}")


def _angles(rope: Node[Any]) -> dict[str, str]:
    return {port: v for port, v in rope.inputs.items() if port not in _DATA}


def _why_not_between(graph: Graph, value: str, reader: Node[Any]) -> str | None:
    """Why ``value`` must be stored, so that only ``reader`` cannot have it from a register."""
    if graph.values[value].within is not None:
        return f"{value!r} lies within {graph.values[value].within!r}"
    if not graph.is_virtual(value):
        return f"{value!r} is a visible output or saved"
    if others := graph.readers(value) - {reader.name}:
        return f"{value!r} is also read by {sorted(others)}"
    if list(reader.inputs.values()).count(value) > 1:
        return f"{value!r} is two inputs of {reader.name!r}"
    return None


def _why_not(graph: Graph, norm: Node[Any], rope: Node[Any]) -> str | None:
    """Why the two cannot be one launch, whatever lies between them."""
    attrs = rope.attrs
    if attrs.numerics != "fp32":
        return f"{rope.name!r} is bit-exact (numerics={attrs.numerics!r})"
    if writes_cache(rope):
        return f"{rope.name!r} writes into a cache"
    if attrs.head_groups:
        return f"{rope.name!r} reads heads in two levels"
    x, scale = graph.values[norm.inputs["input"]], graph.values[norm.inputs["scale"]]
    used = (*norm.inputs.values(), *norm.outputs.values(), *rope.inputs.values())
    if any(graph.values[v].dtype is DType.DOUBLE for v in used):
        return None
    if DType.DOUBLE in (norm.attrs.compute, attrs.compute):
        return None
    typed = {"inv_variance": DType.FLOAT, "Dscale": scale.dtype}
    for port, value in norm.outputs.items():
        own = graph.values[value].dtype
        if own is not typed.get(port, own):
            return f"{value!r} is {short(own)}; one launch writes {short(typed[port])} there"
    if x.dim[3] > MAX_WIDTH:
        return f"{x.name!r} has rows of {x.dim[3]} channels; one launch takes up to {MAX_WIDTH}"
    return None


fuse_norm_rope = Rule("fuse-norm-rope", root=(RmsNorm, RmsNormBackward), apply=_apply)
