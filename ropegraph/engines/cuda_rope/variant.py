"""Which kernel of rope.cu: the macros that specialise it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.job import Job
from ropegraph.engines.cuda_rope.shape import Shape

SOURCE = Path(__file__).with_name("rope.cu")

FLIGHT = 2  # units in flight a warp


@dataclass(frozen=True)
class Variant:
    """One translation unit: rope_vector for ``vec`` > 1, and rope_any."""

    read: DType
    written: DType
    read_pairs: bool
    write_pairs: bool
    is_full: bool
    passes: bool
    index: DType | None  # type of ragged offsets
    vec: int
    angles: int
    warps: int

    @property
    def resident(self) -> int:
        """Warps that an SM holds at least, which bounds registers: as many as spill none."""
        if self.is_full:
            return 20
        is_large = self.passes or self.index is not None or self.vec * self.read.itemsize > 16
        return 24 if is_large else 32

    @property
    def macros(self) -> dict[str, str]:
        """Macro -> value."""
        return {
            "ROPE_IN": self.read.c_name,
            "ROPE_OUT": self.written.c_name,
            "ROPE_READ_PAIRS": str(int(self.read_pairs)),
            "ROPE_WRITE_PAIRS": str(int(self.write_pairs)),
            "ROPE_FULL": str(int(self.is_full)),
            "ROPE_PASS": str(int(self.passes)),
            "ROPE_RAGGED": str(int(self.index is not None)),
            "ROPE_INDEX": (self.index or DType.INT32).c_name,
            "ROPE_VEC": str(self.vec),
            "ROPE_ANGLES": str(self.angles),
            "ROPE_FLIGHT": str(FLIGHT),
            "ROPE_WARPS": str(self.warps),
            "ROPE_RESIDENT": str(self.resident),
        }

    @property
    def options(self) -> tuple[str, ...]:
        """The macros as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.macros.items())


def variant_of(jobs: Sequence[Job], shape: Shape) -> Variant:
    """The variant for jobs that are alike in everything but numbers."""
    first = jobs[0]
    return Variant(
        read=first.x.dtype,
        written=first.y.dtype,
        read_pairs=first.read_pairs,
        write_pairs=first.write_pairs,
        is_full=first.is_full,
        passes=any(job.passes for job in jobs),
        index=None if first.offsets is None else first.offsets.dtype,
        vec=shape.vec,
        angles=shape.angles,
        warps=shape.warps,
    )
