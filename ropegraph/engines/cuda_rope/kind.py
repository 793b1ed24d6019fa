"""What of a rotation is compiled into its kernel; two in one launch must be of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ropegraph.dtypes import DType
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    CacheWrite,
    Numerics,
    RopeBackward,
    Rotation,
    data_ports,
)
from ropegraph.lowering.engine import Step

Source = Literal["freqs", "tables", "inv_freq", "exact"]
PositionKind = Literal["rows", "ids", "chunks"]
SequenceKind = Literal["dense", "ragged", "packed"]

# Each in the order of the numbers that rope.cu knows them by.
SOURCES: tuple[Source, ...] = ("freqs", "tables", "inv_freq", "exact")
POSITIONS: tuple[PositionKind, ...] = ("rows", "ids", "chunks")
SEQUENCES: tuple[SequenceKind, ...] = ("dense", "ragged", "packed")
NUMERICS: tuple[Numerics, ...] = ("fp32", "nemo", "hf")


@dataclass(frozen=True)
class Kind:
    """One kind of rotation.

    read_pairs, write_pairs: pairs lie side by side, else half a segment apart.
    is_full: each written channel has a column of its own.
    source, table: what carries the angles, and its type.
    position, id: the row itself, read for each token, or a start and chunks; type of what is read.
    sequences, index: one a batch entry, at ragged offsets, or packed along s; type of the offsets.
    """

    read: DType
    written: DType
    read_pairs: bool = False
    write_pairs: bool = False
    is_full: bool = False
    source: Source = "freqs"
    table: DType = DType.FLOAT
    position: PositionKind = "rows"
    id: DType = DType.INT32
    sequences: SequenceKind = "dense"
    index: DType = DType.INT32
    numerics: Numerics = "fp32"

    @property
    def macros(self) -> dict[str, str]:
        """Macro -> value."""
        return {
            "ROPE_IN": self.read.c_name,
            "ROPE_OUT": self.written.c_name,
            "ROPE_READ_PAIRS": str(int(self.read_pairs)),
            "ROPE_WRITE_PAIRS": str(int(self.write_pairs)),
            "ROPE_FULL": str(int(self.is_full)),
            "ROPE_SOURCE": str(SOURCES.index(self.source)),
            "ROPE_TABLE": self.table.c_name,
            "ROPE_POSITION": str(POSITIONS.index(self.position)),
            "ROPE_ID": self.id.c_name,
            "ROPE_SEQUENCES": str(SEQUENCES.index(self.sequences)),
            "ROPE_INDEX": self.index.c_name,
            "ROPE_NUMERICS": str(NUMERICS.index(self.numerics)),
        }


def ports_of(attrs: Rotation | CacheWrite, suffix: str) -> tuple[str, str]:
    """The ports of what is read and what is written."""
    read, written = data_ports(attrs)
    return read + suffix, written + suffix


def is_full(attrs: Rotation) -> bool:
    """True if each written channel has a column of its own."""
    return attrs.table_layout == "full" and not attrs.half_width and attrs.angles != "inv_freq"


def kind_of(step: Step, attrs: Rotation | CacheWrite, suffix: str) -> Kind:
    """The kind of the part whose ports end in ``suffix``."""
    read, written = (step.value(port) for port in ports_of(attrs, suffix))
    if isinstance(attrs, CacheWrite):
        return Kind(read.dtype, written.dtype)
    pairs = (attrs.interleaved, attrs.interleaved_output)
    read_pairs, write_pairs = pairs[::-1] if isinstance(attrs, RopeBackward) else pairs
    position, id_type = _position(step, attrs, suffix)
    sequences, index = _sequences(step, read.ragged_offset, suffix)
    return Kind(
        read=read.dtype,
        written=written.dtype,
        read_pairs=read_pairs,
        write_pairs=write_pairs,
        is_full=is_full(attrs),
        source=_source(attrs),
        table=step.value(ANGLE_PORTS[attrs.angles][0] + suffix).dtype,
        position=position,
        id=id_type,
        sequences=sequences,
        index=index,
        numerics=attrs.numerics,
    )


def _source(attrs: Rotation) -> Source:
    if attrs.angles == "freqs":
        return "freqs"
    if attrs.angles == "inv_freq":
        return "exact" if attrs.angle_precision == "exact" else "inv_freq"
    return "tables"


def _position(step: Step, attrs: Rotation, suffix: str) -> tuple[PositionKind, DType]:
    if step.has(port := "position_ids" + suffix):
        return "ids", step.value(port).dtype
    if step.has(port := "start_positions" + suffix):
        return "chunks", step.value(port).dtype
    return "chunks" if attrs.cp_size > 1 else "rows", DType.INT32


def _sequences(step: Step, ragged: str | None, suffix: str) -> tuple[SequenceKind, DType]:
    if step.has(port := "cu_seqlens" + suffix):
        return "packed", step.value(port).dtype
    if ragged is not None:
        return "ragged", step.values[ragged].dtype
    return "dense", DType.INT32
