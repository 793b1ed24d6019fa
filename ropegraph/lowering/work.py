"""What a step has to move and to multiply, however an engine does it.

Bytes are those of the values that a step reads and writes, each once: parts of one value that it
also reads whole count once, broadcast extents (stride 0) once, of a table of angles the rows in
use, of a cache the rows that are written.

FLOPs are counted as torch's FlopCounterMode counts: two for a multiplication with its addition, in
products of matrices alone; the backward of attention has five of them, with the scores made again.
Unlike there, only pairs of a query and a key that the diagonal band and the lengths let through
are counted: causal attention is half of full attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ropegraph.ir.graph import Graph, Node, singles
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    POSITION_PORTS,
    Attention,
    Matmul,
    SdpaBackward,
)
from ropegraph.lowering.engine import Step

# Rows of q and of k, v in each batch entry.
Lengths = tuple[Sequence[int], Sequence[int]]
_TABLES = frozenset(port for ports in ANGLE_PORTS.values() for port in ports)


@dataclass(frozen=True)
class Work:
    """Of one step.  flops: 0 where nothing is a product of matrices."""

    bytes_read: int
    bytes_written: int
    flops: int


def work_of(step: Step, graph: Graph, sizes: Mapping[str, int], lengths: Lengths | None) -> Work:
    """Count the work of a step.

    sizes: elements of ragged values, whose dims say only how many they could have.
    lengths: of the sequences of an attention; None elsewhere.
    """
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    for single in singles(step.node):
        inputs = {p: v for p, v in single.inputs.items() if p != "cache"}
        for port, value in inputs.items():
            size = _bytes(graph, value, sizes)
            if port in _TABLES and graph.values[value].dim[0]:
                dim = graph.values[value].dim
                size = size // dim[0] * min(dim[0], _rows(graph, single))
            read[value] = max(size, read.get(value, 0))
        for value in single.outputs.values():
            # Into a cache go the rows of the input.
            source = inputs["input"] if "cache" in single.inputs else value
            written[value] = _bytes(graph, source, sizes)
    return Work(_merged(graph, read), _merged(graph, written), _flops(step, lengths))


def _rows(graph: Graph, node: Node[Any]) -> int:
    """How many rows of a table of angles a node reads at most: those of its tokens."""
    b, *_, s, _ = graph.values[next(iter(node.inputs.values()))].dim
    return s * b if any(p in node.inputs for p in POSITION_PORTS) else s


def _bytes(graph: Graph, name: str, sizes: Mapping[str, int]) -> int:
    value = graph.values[name]
    own = prod(n for n, stride in zip(value.dim, value.stride, strict=True) if stride or not n)
    return sizes.get(name, own) * value.dtype.itemsize


def _merged(graph: Graph, sizes: Mapping[str, int]) -> int:
    """The sum over values, parts of what is there as a whole left out."""
    wholes = {name for name in sizes if graph.place(name) == name}
    parts: dict[tuple[object, ...], int] = {}
    for name, size in sizes.items():
        value, place = graph.values[name], graph.place(name)
        if name in wholes:
            parts[name,] = size
        elif place not in wholes:
            parts[place, value.start, value.dim, value.stride] = size
    return sum(parts.values())


def _flops(step: Step, lengths: Lengths | None) -> int:
    attrs = step.node.attrs
    if isinstance(attrs, Matmul):
        a, c = step.value("A").dim, step.value("C").dim
        inner = a[1] if attrs.transpose_A else a[2]
        batch = max(a[0], step.value("B").dim[0])
        return 2 * batch * inner * c[1] * c[2]
    if not isinstance(attrs, Attention) or lengths is None:
        return 0
    q, v = step.value("q").dim, step.value("v").dim
    pairs = q[1] * sum(visible_pairs(attrs, m, n) for m, n in zip(*lengths, strict=True))
    if isinstance(attrs, SdpaBackward):
        return 2 * pairs * (3 * q[3] + 2 * v[3])
    return 2 * pairs * (q[3] + v[3])


def visible_pairs(attrs: Attention, s_q: int, s_kv: int) -> int:
    """How many pairs of a query and a key one head of one sequence has."""
    shift = s_kv - s_q if attrs.bottom_right else 0
    count = 0
    for i in range(s_q):
        first, last = 0, s_kv - 1
        if attrs.right_bound is not None:
            last = min(last, i + shift + attrs.right_bound)
        if attrs.left_bound is not None:
            first = max(first, i + shift - attrs.left_bound + 1)
        count += max(0, last - first + 1)
    return count
