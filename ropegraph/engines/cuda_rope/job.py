"""One rotation of a step, as the plain numbers that the kernel works with."""

from __future__ import annotations

from dataclasses import dataclass

from ropegraph.dtypes import DType
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Rope, RopeBackward, RopePair, Rotation
from ropegraph.lowering.engine import Step

Four = tuple[int, int, int, int]


@dataclass(frozen=True)
class Side:
    """A tensor [b, h, s, d] that is read or written.  stride: 0 where the extent is 1."""

    slot: int
    dtype: DType
    stride: Four


@dataclass(frozen=True)
class Angles:
    """A table of radians.  Steps in elements: to the next batch entry, position and pair.

    second: from the column of a pair's first written channel to that of its second one.
    """

    slot: int
    batch: int
    row: int
    pair: int
    second: int


@dataclass(frozen=True)
class Offsets:
    """Where the sequences of a ragged tensor start: [b + 1], times ``multiplier`` elements."""

    slot: int
    dtype: DType
    multiplier: int


@dataclass(frozen=True)
class Job:
    """One rotation.  begin, pairs: channels [begin, begin + 2 pairs) turn.

    read_pairs, write_pairs: pairs lie side by side, else half a segment apart.
    is_adjoint: sines come from the partner's column, where each channel has its own.
    sign: of the sines.  factor, scale: of the channels that turn, of the others.
    """

    x: Side
    y: Side
    angles: Angles
    offsets: Offsets | None
    dim: Four
    begin: int
    pairs: int
    read_pairs: bool
    write_pairs: bool
    is_full: bool
    is_adjoint: bool
    sign: float
    factor: float
    scale: float

    @property
    def passes(self) -> bool:
        """True if some channels lie outside the rotation."""
        return 2 * self.pairs < self.dim[3]

    @property
    def is_empty(self) -> bool:
        return 0 in self.dim


def parts_of(step: Step) -> list[tuple[Rope | RopeBackward, str]]:
    """Each rotation of the step, with the suffix of its ports."""
    attrs = step.node.attrs
    if isinstance(attrs, RopePair):
        return [(part, str(i)) for i, part in enumerate(attrs.parts)]
    assert isinstance(attrs, (Rope, RopeBackward))
    return [(attrs, "")]


def ports_of(attrs: Rotation, suffix: str) -> tuple[str, str]:
    """The ports of what is read and what is written."""
    read, written = ("dY", "dX") if isinstance(attrs, RopeBackward) else ("input", "output")
    return read + suffix, written + suffix


def jobs_of(step: Step) -> tuple[Job, ...]:
    """The one or two jobs of a step that the engine takes."""
    return tuple(_job(step, attrs, suffix) for attrs, suffix in parts_of(step))


def _job(step: Step, attrs: Rope | RopeBackward, suffix: str) -> Job:
    read, written = ports_of(attrs, suffix)
    x = step.value(read)
    is_adjoint = isinstance(attrs, RopeBackward)
    pairs = (attrs.interleaved, attrs.interleaved_output)
    read_pairs, write_pairs = pairs[::-1] if is_adjoint else pairs
    return Job(
        x=_side(step, read),
        y=_side(step, written),
        angles=_angles(step, attrs, "freqs" + suffix),
        offsets=_offsets(step, x),
        dim=_four(x.dim),
        begin=attrs.rope_offset,
        pairs=attrs.rope_dim // 2,
        read_pairs=read_pairs,
        write_pairs=write_pairs,
        is_full=is_full(attrs),
        is_adjoint=is_adjoint,
        sign=1.0 if is_adjoint == attrs.inverse else -1.0,
        factor=attrs.output_scale * attrs.attention_factor,
        scale=attrs.output_scale,
    )


def is_full(attrs: Rotation) -> bool:
    """True if each written channel has a column of its own."""
    return attrs.table_layout == "full" and not attrs.half_width


def _side(step: Step, port: str) -> Side:
    value = step.value(port)
    stride = tuple(0 if n == 1 else s for n, s in zip(value.dim, value.stride, strict=True))
    if value.ragged_offset is not None:
        # Tokens are laid out in strides of s whatever the number of positions of a sequence.
        stride = (0, stride[1], value.stride[2], stride[3])
    return Side(step.slot(port), value.dtype, _four(stride))


def _angles(step: Step, attrs: Rotation, port: str) -> Angles:
    table = step.value(port)
    row, batch, _, column = table.stride
    if attrs.half_width or attrs.table_layout == "first_half":
        pair, second = column, 0
    elif attrs.table_layout == "pairs":
        pair, second = 2 * column, 0
    elif attrs.interleaved_output:
        pair, second = 2 * column, column
    else:
        pair, second = column, attrs.rope_dim // 2 * column
    return Angles(step.slot(port), 0 if table.dim[1] == 1 else batch, row, pair, second)


def _offsets(step: Step, value: Value) -> Offsets | None:
    name = value.ragged_offset
    if name is None:
        return None
    return Offsets(step.slots[name], step.values[name].dtype, value.ragged_multiplier)


def _four(numbers: tuple[int, ...]) -> Four:
    a, b, c, d = numbers
    return a, b, c, d
