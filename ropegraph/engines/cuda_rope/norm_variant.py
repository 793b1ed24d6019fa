"""Which kernel of norm_rope.cu: the macros that specialise it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.kind import Kind
from ropegraph.engines.cuda_rope.norm import NormJob
from ropegraph.engines.cuda_rope.norm_shape import NormShape, norm_shape
from ropegraph.engines.cuda_rope.unit import Unit
from ropegraph.engines.cuda_rope.variant import SOURCE as ROPE_SOURCE

SOURCE = Path(__file__).with_name("norm_rope.cu")
FLIGHT = 2


@dataclass(frozen=True)
class NormVariant(Unit):
    """One translation unit: norm_vector for ``vec`` > 1, norm_any, and norm_sum in the backward.

    Over all heads the backward has mean_vector and mean_any as well.
    """

    kind: Kind
    is_backward: bool
    norm_first: bool
    is_whole: bool
    x: DType
    scale: DType
    vec: int
    turns: int
    passes: int
    any_turns: int
    any_passes: int
    angles: int
    warps: int

    @property
    def resident(self) -> int:
        """Warps that an SM holds at least, which bounds registers."""
        held = self.turns * 2 + self.passes
        wide = held * self.vec * (2 if self.kind.is_full else 1)
        if self.is_backward:
            return 16 if wide <= 16 else 8
        if not self.is_whole and wide <= 16:
            return 24  # weight and rotation lie in shared memory
        return 20 if wide <= 16 else 12

    @property
    def macros(self) -> dict[str, str]:
        """Those of rope.cu are among them."""
        own = {
            "BACKWARD": int(self.is_backward),
            "FIRST": int(self.norm_first),
            "WHOLE": int(self.is_whole),
            "X": self.x.c_name,
            "SCALE": self.scale.c_name,
            "VEC": self.vec,
            "TURNS": self.turns,
            "PASSES": self.passes,
            "ANY_TURNS": self.any_turns,
            "ANY_PASSES": self.any_passes,
            "ANGLES": self.angles,
            "FLIGHT": 1 if self.is_backward else FLIGHT,
            "WARPS": self.warps,
            "RESIDENT": self.resident,
        }
        rope = {"ROPE_PASS": "1", "ROPE_VEC": "1", "ROPE_ANGLES": "1", "ROPE_FLIGHT": "1"}
        rope |= {"ROPE_GROUPS": "0", "ROPE_CACHE": "0", "ROPE_ROW": "int"}
        rope |= {"ROPE_WARPS": str(self.warps), "ROPE_RESIDENT": "16"}
        return self.kind.macros | rope | {f"NORM_{name}": str(v) for name, v in own.items()}

    @property
    def code(self) -> str:
        return source()

    @property
    def kernels(self) -> tuple[str, ...]:
        widths = ("vector", "any") if self.vec > 1 else ("any",)
        passes = ("mean", "norm") if self.is_backward and self.is_whole else ("norm",)
        found = tuple(f"{name}_{width}" for name in passes for width in widths)
        return (*found, "norm_sum") if self.is_backward else found


def source() -> str:
    """rope.cu without its kernels, and norm_rope.cu behind it."""
    library, _, _ = ROPE_SOURCE.read_text(encoding="utf-8").partition("// ---- the grid")
    return f"{library}\n}}  // namespace\n\n{SOURCE.read_text(encoding='utf-8')}"


def norm_variant(jobs: Sequence[NormJob], shape: NormShape) -> NormVariant:
    """The variant for jobs of one kind."""
    job, single = jobs[0], norm_shape(jobs, 1)
    return NormVariant(
        kind=job.rope.kind,
        is_backward=job.is_backward,
        norm_first=job.norm_first,
        is_whole=job.is_whole,
        x=job.rope.kind.read if job.x is None else job.x.dtype,
        scale=job.scale_dtype,
        vec=shape.base.vec,
        turns=shape.turns,
        passes=shape.passes,
        any_turns=single.turns,
        any_passes=single.passes,
        angles=shape.base.angles,
        warps=shape.base.warps,
    )
