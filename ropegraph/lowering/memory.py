"""Where virtual values live: one arena, offsets planned at build, space reused after last use."""

from __future__ import annotations

from dataclasses import dataclass

from ropegraph.ir.graph import Graph, Value

# cuDNN wants 16 bytes; 256 is what CUDA allocators give and keeps every vector load aligned.
ALIGNMENT = 256


@dataclass(frozen=True)
class _Block:
    start: int
    end: int
    first: int
    last: int


def span_bytes(value: Value) -> int:
    """Bytes from the first to the last element of a value, the longest that its offsets may need.

    A ragged value keeps the stride of its rows, whatever lies between them: b * s rows at most.
    """
    if value.ragged_offset is None:
        return value.span_elems * value.dtype.itemsize
    b, h, s, d = value.dim
    row = 1 + sum((n - 1) * stride for n, stride in zip((h, d), value.stride[1::2], strict=True))
    return max(0, (b * s - 1) * value.stride[2] + row) * value.dtype.itemsize


def aligned(size_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def place(graph: Graph) -> tuple[dict[str, int], int]:
    """Byte offset of every virtual value, and the size of the arena, all aligned.

    A value lives from when it, or what lies within it, is first written until that is last read.
    """
    last_use = {graph.place(v): i for i, n in enumerate(graph.nodes) for v in n.inputs.values()}
    blocks: list[_Block] = []
    offsets: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for value in map(graph.place, node.outputs.values()):
            if not graph.is_virtual(value) or value in offsets:
                continue
            size = aligned(span_bytes(graph.values[value]))
            start = _first_gap([b for b in blocks if b.last >= i], size)
            blocks.append(_Block(start, start + size, i, last_use.get(value, i)))
            offsets[value] = start
    return offsets, max((b.end for b in blocks), default=0)


def _first_gap(alive: list[_Block], size: int) -> int:
    start = 0
    for block in sorted(alive, key=lambda b: b.start):
        if start + size <= block.start:
            break
        start = max(start, block.end)
    return start
