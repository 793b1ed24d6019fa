"""One attention over dense sequences of equal length, cut into tiles of bounded size.

A padded, ragged or paged batch is several problems, one a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import torch

from ropegraph.engines.torch_executor.band import Band

# Elements of one tile of logits, a thread: small enough to stay in cache between the passes over
# it.  A GPU has no such wish; there fewer launches count.
TILE_ELEMS = 1 << 18
GPU_TILE_ELEMS = 1 << 24
# Fewer rows than this make the matrix products slow; a tile then grows up to the hard limit.
MIN_ROWS = 64
MAX_TILE_ELEMS = 1 << 24


@dataclass(frozen=True)
class Tile:
    """Batches ``b``, q heads ``h``, rows from row0 on and columns from col0 on."""

    b: slice
    h: slice
    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h = self.b.stop - self.b.start, self.h.stop - self.h.start
        return b, h, self.row1 - self.row0, self.col1 - self.col0

    @property
    def rows(self) -> slice:
        return slice(self.row0, self.row1)

    @property
    def columns(self) -> slice:
        return slice(self.col0, self.col1)

    @property
    def index(self) -> tuple[slice, slice, slice]:
        """Where the tile's rows lie in q, o and stats."""
        return self.b, self.h, self.rows


@dataclass(frozen=True)
class Shape:
    """The sizes of one problem.  h_q is a multiple of h_k and of h_v."""

    b: int
    h_q: int
    h_k: int
    h_v: int
    s_q: int
    s_kv: int

    @property
    def head_unit(self) -> int:
        """The fewest q heads that use whole heads of k and of v."""
        return lcm(self.h_q // self.h_k, self.h_q // self.h_v)


@dataclass(frozen=True)
class Group:
    """Batches and q heads whose tiles share k and v, and the rows of each tile."""

    b: slice
    h: slice
    n_rows: int

    def heads(self, x: torch.Tensor, shape: Shape) -> tuple[slice, slice]:
        """Where the heads that the group uses lie in ``x``: k, v, or a gradient of them."""
        ratio = shape.h_q // x.shape[1]
        return self.b, slice(self.h.start // ratio, self.h.stop // ratio)


def tile_elems(device: torch.device) -> int:
    """How many elements a tile of logits should have on this device."""
    if device.type != "cpu":
        return GPU_TILE_ELEMS
    return min(MAX_TILE_ELEMS, TILE_ELEMS * torch.get_num_threads())


def groups(shape: Shape, band: Band, elems: int) -> Iterator[Group]:
    """Cut batches and heads so that a tile of a useful number of rows stays in cache."""
    if 0 in (shape.b, shape.h_q, shape.s_q):
        return
    span = _band_span(shape, band)
    widest = max(1, min(shape.s_kv, span + MIN_ROWS))
    unit = shape.head_unit
    # The q heads that share a head of k or v are rows of one matrix product.
    min_rows = min(shape.s_q, max(1, MIN_ROWS // (shape.h_q // max(shape.h_k, shape.h_v))))
    n_heads = unit * max(1, min(shape.h_q // unit, elems // (unit * min_rows * widest)))
    n_batches = 1
    if n_heads == shape.h_q:
        n_batches = max(1, min(shape.b, elems // (shape.h_q * shape.s_q * widest)))
    row_elems = n_batches * n_heads * widest
    least = min(min_rows, MAX_TILE_ELEMS // row_elems)
    # Rows far apart see different keys: a tile taller than its band would be mostly struck out.
    n_rows = max(1, least, min(shape.s_q, elems // row_elems, max(MIN_ROWS, span // 2)))
    for b0 in range(0, shape.b, n_batches):
        for h0 in range(0, shape.h_q, n_heads):
            b1, h1 = min(shape.b, b0 + n_batches), min(shape.h_q, h0 + n_heads)
            yield Group(slice(b0, b1), slice(h0, h1), n_rows)


def tiles(group: Group, shape: Shape, band: Band) -> Iterator[Tile]:
    """The row blocks of a group, each over the columns that its rows see."""
    for row0 in range(0, shape.s_q, group.n_rows):
        row1 = min(shape.s_q, row0 + group.n_rows)
        yield Tile(group.b, group.h, row0, row1, *band.columns(row0, row1, shape.s_kv))


def _band_span(shape: Shape, band: Band) -> int:
    """Columns that one row sees at most."""
    if band.low is None or band.high is None:
        return shape.s_kv
    return min(shape.s_kv, max(0, band.high - band.low + 1))


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[b, h, rows, c] as [b * heads, h / heads * rows, c]: the q heads of a group as more rows."""
    b, h, rows, c = x.shape
    return x.reshape(b * heads, h // heads * rows, c)
