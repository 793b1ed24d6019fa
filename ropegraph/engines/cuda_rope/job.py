"""One rotation of a step, as the plain numbers that the kernel works with."""

from __future__ import annotations

from dataclasses import dataclass

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.kind import Kind, is_full, kind_of, ports_of
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import ANGLE_PORTS, CacheWrite, Rope, RopeBackward, RopePair, Rotation
from ropegraph.ir.rotation_shapes import merged_heads
from ropegraph.lowering.engine import Step

Four = tuple[int, int, int, int]
Part = Rope | RopeBackward | CacheWrite


@dataclass(frozen=True)
class Side:
    """A tensor [b, h, s, d] that is read or written.  stride: 0 where the extent is 1.

    group: where its heads lie in two levels, what each group before it adds to a head's place.
    """

    slot: int
    dtype: DType
    stride: Four
    group: int = 0


@dataclass(frozen=True)
class Table:
    """Numbers for each pair.  Steps in elements: to the next batch entry, row and pair.

    second: from the column of a pair's first written channel to that of its second one.
    offset: where it starts in its tensor.
    """

    slot: int
    batch: int
    row: int
    pair: int
    second: int
    offset: int = 0


@dataclass(frozen=True)
class Positions:
    """Positions of tokens, or the positions at which sequences start.  Steps in elements."""

    slot: int
    batch: int
    row: int


@dataclass(frozen=True)
class CacheRows:
    """The row of a cache where each batch entry's first one goes, ``last`` at most."""

    slot: int
    dtype: DType
    batch: int
    last: int


@dataclass(frozen=True)
class Offsets:
    """Where ``count`` sequences start: [count + 1], in ``multiplier`` elements, or in tokens."""

    slot: int
    count: int
    multiplier: int = 1


@dataclass(frozen=True)
class Job:
    """One rotation.  begin, pairs: channels [begin, begin + 2 pairs) turn, none in a CacheWrite.

    angles: those of the cosines where there are sines.  rows: positions that the tables have,
    0 for any.  is_adjoint: sines come from the partner's column, where each channel has its own.
    sign: of the sines.  factor, scale: of the channels that turn, of the others.
    group_heads: heads of a group, where they lie in two levels.  cache: where y is one.
    """

    kind: Kind
    x: Side
    y: Side
    angles: Table | None
    sines: Table | None
    rows: int
    positions: Positions | None
    offsets: Offsets | None
    dim: Four
    begin: int
    pairs: int
    is_adjoint: bool
    sign: float
    factor: float
    scale: float
    cp_size: int = 1
    cp_rank: int = 0
    group_heads: int = 1
    cache: CacheRows | None = None

    @property
    def passes(self) -> bool:
        """True if some channels lie outside the rotation."""
        return 2 * self.pairs < self.dim[3]

    @property
    def is_empty(self) -> bool:
        return 0 in self.dim

    @property
    def is_watched(self) -> bool:
        """True if the kernel reads integers that may be wrong."""
        reads_rows = self.offsets is not None or self.cache is not None
        return reads_rows or bool(self.positions and self.rows)


def parts_of(step: Step) -> list[tuple[Part, str]]:
    """Each part of the step, with the suffix of its ports."""
    attrs = step.node.attrs
    if isinstance(attrs, RopePair):
        return [(part, str(i)) for i, part in enumerate(attrs.parts)]
    assert isinstance(attrs, Part)
    return [(attrs, "")]


def jobs_of(step: Step) -> tuple[Job, ...]:
    """The jobs of a step that the engine takes, one for each part."""
    return tuple(
        _write(step, attrs, suffix) if isinstance(attrs, CacheWrite) else _job(step, attrs, suffix)
        for attrs, suffix in parts_of(step)
    )


def _write(step: Step, attrs: CacheWrite, suffix: str) -> Job:
    """What goes into a cache as it is: none of its channels turns."""
    read, written = ports_of(attrs, suffix)
    return Job(
        kind=kind_of(step, attrs, suffix),
        x=side_of(step, read),
        y=side_of(step, written),
        angles=None,
        sines=None,
        rows=0,
        positions=None,
        offsets=None,
        dim=_four(step.value(read).dim),
        begin=0,
        pairs=0,
        is_adjoint=False,
        sign=1.0,
        factor=1.0,
        scale=1.0,
        cache=_cache(step, suffix),
    )


def _job(step: Step, attrs: Rope | RopeBackward, suffix: str) -> Job:
    read, written = ports_of(attrs, suffix)
    x = step.value(read)
    is_adjoint = isinstance(attrs, RopeBackward)
    angles, sines = _tables(step, attrs, suffix)
    rows = 0 if attrs.angles == "inv_freq" else step.value(_table_ports(attrs, suffix)[0]).dim[0]
    return Job(
        kind=kind_of(step, attrs, suffix),
        x=side_of(step, read),
        y=side_of(step, written),
        angles=angles,
        sines=sines,
        rows=rows,
        positions=_positions(step, suffix),
        offsets=_offsets(step, x, suffix),
        dim=_four(merged_heads(x.dim)),
        begin=attrs.rope_offset,
        pairs=attrs.rope_dim // 2,
        is_adjoint=is_adjoint,
        sign=1.0 if is_adjoint == attrs.inverse else -1.0,
        factor=attrs.output_scale * attrs.attention_factor,
        scale=attrs.output_scale,
        cp_size=attrs.cp_size,
        cp_rank=attrs.cp_rank,
        group_heads=next((v.dim[2] for v in (x, step.value(written)) if len(v.dim) == 5), 1),
        cache=_cache(step, suffix),
    )


def side_of(step: Step, port: str) -> Side:
    """The tensor at a port, its heads in one axis."""
    value = step.value(port)
    stride = tuple(0 if n == 1 else s for n, s in zip(value.dim, value.stride, strict=True))
    if value.ragged_offset is not None:
        # Tokens are laid out in strides of s whatever the number of positions of a sequence.
        stride = (0, stride[1], value.stride[2], stride[3])
    group = 0
    if len(stride) == 5:
        b, of_groups, h, s, d = stride
        stride, group = (b, h, s, d), of_groups - value.dim[2] * h
    return Side(step.slot(port), value.dtype, _four(stride), group)


def _table_ports(attrs: Rotation, suffix: str) -> tuple[str, ...]:
    return tuple(port + suffix for port in ANGLE_PORTS[attrs.angles])


def _tables(step: Step, attrs: Rotation, suffix: str) -> tuple[Table, Table | None]:
    """The angles, or the cosines and the sines."""
    ports = _table_ports(attrs, suffix)
    if attrs.angles == "inv_freq":
        return Table(step.slot(ports[0]), 0, 0, step.value(ports[0]).stride[-1], 0), None
    if attrs.angles == "packed":
        width = attrs.rope_dim // 2 if attrs.half_width else attrs.rope_dim
        offset = width * step.value(ports[0]).stride[3]
        return _table(step, attrs, ports[0]), _table(step, attrs, ports[0], offset)
    first, *others = (_table(step, attrs, port) for port in ports)
    return first, others[0] if others else None


def _table(step: Step, attrs: Rotation, port: str, offset: int = 0) -> Table:
    table = step.value(port)
    row, batch, _, column = table.stride
    if not is_full(attrs):
        is_spread = attrs.table_layout == "pairs" and not attrs.half_width
        pair, second = column * (2 if is_spread else 1), 0
    elif attrs.interleaved_output:
        pair, second = 2 * column, column
    else:
        pair, second = column, attrs.rope_dim // 2 * column
    return Table(step.slot(port), 0 if table.dim[1] == 1 else batch, row, pair, second, offset)


def _positions(step: Step, suffix: str) -> Positions | None:
    if step.has(port := "position_ids" + suffix):
        ids = step.value(port)
        return Positions(step.slot(port), 0 if ids.dim[0] == 1 else ids.stride[0], ids.stride[1])
    if step.has(port := "start_positions" + suffix):
        return Positions(step.slot(port), step.value(port).stride[0], 0)
    return None


def _cache(step: Step, suffix: str) -> CacheRows | None:
    if not step.has(port := "cache_positions" + suffix):
        return None
    rows, cache = step.value(port), step.value("cache" + suffix)
    last = cache.dim[2] - step.value("input" + suffix).dim[2]
    return CacheRows(step.slot(port), rows.dtype, rows.stride[0], last)


def _offsets(step: Step, x: Value, suffix: str) -> Offsets | None:
    if step.has(port := "cu_seqlens" + suffix):
        return Offsets(step.slot(port), step.value(port).dim[0] - 1)
    if x.ragged_offset is None:
        return None
    return Offsets(step.slots[x.ragged_offset], x.dim[0], x.ragged_multiplier)


def _four(numbers: tuple[int, ...]) -> Four:
    a, b, c, d = numbers
    return a, b, c, d
