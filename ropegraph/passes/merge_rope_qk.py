"""Rotate Q and K in one launch.

    q2 = rope(q); k2 = rope(k); o = sdpa(q2, k2, v)   ->   q2, k2 = rope_pair(q, k); o = sdpa(..)
    dq = rope_backward(dq2); dk = rope_backward(dk2)  ->   dq, dk = rope_pair(dq2, dk2)

Changes no bit: each part keeps its own scale, strides and head count. The parts must rotate alike,
and neither may wait for the other. norm_rope and norm_rope_backward are merged in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ropegraph.dtypes import DType, short
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.norm import is_over_heads
from ropegraph.ir.ops import (
    CACHE_PORTS,
    NormRope,
    NormRopeBackward,
    NormRopePair,
    Pair,
    Rope,
    RopeBackward,
    RopePair,
    Sdpa,
    SdpaBackward,
)
from ropegraph.passes.rewrite import Decline, Edit, Rule


def _apply(graph: Graph, node: Node[Any]) -> Edit | Decline | None:
    found = _forward(graph, node) if isinstance(node.attrs, Sdpa) else _backward(graph, node)
    if isinstance(found, Decline):
        return found
    first, second = found
    if first.name == second.name:
        return Decline(f"q and k are made by the same node {first.name!r}")
    return merged(graph, first, second)


def merged(graph: Graph, first: Node[Any], second: Node[Any]) -> Edit | Decline:
    """Two rotations as one launch, or why they cannot be."""
    if _alike(first.attrs) != _alike(second.attrs):
        return Decline(f"{first.name!r} and {second.name!r} rotate differently")
    if _weight_heads(graph, first) != _weight_heads(graph, second):
        return Decline(f"only one of {first.name!r} and {second.name!r} normalises over all heads")
    if _types(graph, first) != _types(graph, second):
        return Decline(f"{first.name!r} and {second.name!r} read or write different data types")
    # Where the results go is each part's own business too.
    if odd := sorted((first.inputs.keys() ^ second.inputs.keys()) - set(CACHE_PORTS)):
        return Decline(f"only one of {first.name!r} and {second.name!r} reads {', '.join(odd)}")
    if waits(graph, first, second) or waits(graph, second, first):
        return Decline(f"one of {first.name!r} and {second.name!r} needs the other's result")
    is_cached = writes_cache(first) or writes_cache(second)
    if is_cached and (reason := why_not_types(graph, (first, second))):
        return Decline(reason)
    return joined(graph, (first, second), removed=(first.name, second.name))


def joined(graph: Graph, parts: Sequence[Node[Any]], removed: tuple[str, ...]) -> Edit:
    """One launch for two or three nodes.  removed: the nodes that it takes the place of."""
    names = tuple(part.name for part in parts)
    is_normed = isinstance(parts[0].attrs, (NormRope, NormRopeBackward))
    kind: Any = NormRopePair if is_normed else RopePair
    pair = Node(
        graph.free_name("+".join(names)),
        kind(tuple(part.attrs for part in parts), names),
        {f"{p}{i}": v for i, n in enumerate(parts) for p, v in n.inputs.items()},
        {f"{p}{i}": v for i, n in enumerate(parts) for p, v in n.outputs.items()},
    )
    return Edit((pair,), removed, f"one launch for {', '.join(names[:-1])} and {names[-1]}")


def why_not_types(graph: Graph, parts: Sequence[Node[Any]]) -> str | None:
    """Why parts that write into caches take a launch each: it reads and writes one type alone."""
    found = {
        part.name: tuple(
            short(graph.values[value].dtype)
            for value in (part.inputs["input"], part.outputs["output"])
        )
        for part in parts
    }
    rows = [graph.values[p.inputs["cache_positions"]].dtype for p in parts if writes_cache(p)]
    if len(set(rows)) > 1:
        return f"cache_positions are {' and '.join(map(short, rows))}"
    if len(set(found.values())) == 1:
        return None
    texts = (f"{name!r} reads {read} and writes {wrote}" for name, (read, wrote) in found.items())
    return ", ".join(texts)


def _alike(attrs: Any) -> Any:
    """The attributes without what each part has to itself.

    That is its scale, how the heads it reads are laid out, epsilon, and whether w is 1 + scale.
    """
    if isinstance(attrs, (NormRope, NormRopeBackward)):
        return type(attrs), attrs.norm.compute, _alike(attrs.rope), attrs.norm_first
    return replace(attrs, output_scale=1.0, head_groups=0)


def _types(graph: Graph, node: Node[Any]) -> dict[str, DType]:
    """The data type at every port of a node with a norm, whose kernel has but one for each."""
    if not isinstance(node.attrs, (NormRope, NormRopeBackward)):
        return {}
    ports = {**node.inputs, **{p: v for p, v in node.outputs.items() if p in ("output", "dX")}}
    return {port: graph.values[value].dtype for port, value in ports.items()}


def _weight_heads(graph: Graph, node: Node[Any]) -> bool:
    """True if a norm is over all heads of a token."""
    return "scale" in node.inputs and is_over_heads(graph.values[node.inputs["scale"]].dim)


def _forward(graph: Graph, node: Node[Any]) -> tuple[Node[Any], Node[Any]] | Decline:
    found: list[Node[Any]] = []
    for value in (node.inputs["q"], node.inputs["k"]):
        maker = graph.producer(value)
        if maker is None or not isinstance(maker.attrs, (Rope, NormRope, Pair)):
            return Decline(f"{value!r} is not made by rope")
        if isinstance(maker.attrs, Pair):
            return Decline(f"{maker.name!r} is a merged launch already")
        found.append(maker)
    return found[0], found[1]


def _backward(graph: Graph, node: Node[Any]) -> tuple[Node[Any], Node[Any]] | Decline:
    found: list[Node[Any]] = []
    for port in ("dQ", "dK"):
        grad = node.outputs.get(port)
        readers = [] if grad is None else graph.reading(grad)
        ropes = [n for n in readers if isinstance(n.attrs, (RopeBackward, NormRopeBackward))]
        if len(ropes) != 1:
            return Decline(f"{port} is not read by one rope_backward of its own")
        found.append(ropes[0])
    return found[0], found[1]


def waits(graph: Graph, node: Node[Any], other: Node[Any]) -> bool:
    """True if ``node`` needs, directly or not, something that ``other`` writes."""
    todo, seen = list(node.inputs.values()), set[str]()
    while todo:
        producer = graph.producer(todo.pop())
        if producer is None or producer.name in seen:
            continue
        if producer.name == other.name:
            return True
        seen.add(producer.name)
        todo += producer.inputs.values()
    return False


merge_rope_qk = Rule("merge-rope-qk", root=(Sdpa, SdpaBackward), apply=_apply)
