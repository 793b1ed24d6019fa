"""Which kernel of rope.cu: the macros that specialise it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.job import Job
from ropegraph.engines.cuda_rope.kind import Kind
from ropegraph.engines.cuda_rope.shape import Shape
from ropegraph.engines.cuda_rope.unit import Unit

SOURCE = Path(__file__).with_name("rope.cu")

FLIGHT = 2  # units in flight a warp


@dataclass(frozen=True)
class Variant(Unit):
    """One translation unit: rope_vector for ``vec`` > 1, and rope_any.

    cache: type of the rows where something goes into a cache, None if nothing does.
    """

    kind: Kind
    passes: bool
    vec: int
    angles: int
    warps: int
    groups: bool = False
    cache: DType | None = None

    @property
    def resident(self) -> int:
        """Warps that an SM holds at least, which bounds registers: as many as spill none."""
        kind = self.kind
        is_wide = self.vec * kind.read.itemsize > 16
        is_placed, is_apart = kind.position != "rows", kind.sequences != "dense"
        demands = sum((self.passes, is_placed, is_apart, is_wide, kind.is_full))
        if self.cache is not None:
            return 16 if is_wide or kind.is_full else 20
        if kind.source == "freqs" and not is_placed and kind.sequences != "packed":
            return 20 if kind.is_full else 24 if demands else 32
        if demands > 2 and (is_wide or kind.is_full):
            return 16
        if kind.is_full:
            return 20
        if demands > 1 or (is_apart and kind.source == "exact"):
            return 20
        return 24 if demands and not is_placed else 32

    @property
    def macros(self) -> dict[str, str]:
        return self.kind.macros | {
            "ROPE_PASS": str(int(self.passes)),
            "ROPE_GROUPS": str(int(self.groups)),
            "ROPE_CACHE": str(int(self.cache is not None)),
            "ROPE_ROW": (self.cache or DType.INT32).c_name,
            "ROPE_VEC": str(self.vec),
            "ROPE_ANGLES": str(self.angles),
            "ROPE_FLIGHT": str(FLIGHT),
            "ROPE_WARPS": str(self.warps),
            "ROPE_RESIDENT": str(self.resident),
        }

    @property
    def code(self) -> str:
        return SOURCE.read_text(encoding="utf-8")

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("rope_vector", "rope_any") if self.vec > 1 else ("rope_any",)


def variant_of(jobs: Sequence[Job], shape: Shape) -> Variant:
    """The variant for jobs of one kind."""
    return Variant(
        # Any kind serves what turns nothing.
        kind=next((job.kind for job in jobs if job.pairs), jobs[0].kind),
        passes=any(job.passes for job in jobs),
        vec=shape.vec,
        angles=shape.angles,
        warps=shape.warps,
        groups=any(job.x.group or job.y.group for job in jobs),
        cache=next((job.cache.dtype for job in jobs if job.cache is not None), None),
    )
