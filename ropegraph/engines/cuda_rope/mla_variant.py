"""Which kernel of mla.cu: the macros that specialise it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.mla import Mode, Task, Tuning
from ropegraph.engines.cuda_rope.mla_shape import cut_of, scales_of, vector_of
from ropegraph.engines.cuda_rope.unit import Unit

SOURCE = Path(__file__).with_name("mla.cu")


@dataclass(frozen=True)
class MlaVariant(Unit):
    """One translation unit: mla_vector for ``vec`` > 1, and mla_any.

    turn, scales: for MXFP8 by vectors, channels that turn, and scales of a token in the heads of a
    block.
    """

    mode: Mode
    data: DType
    table: DType
    vec: int
    tuning: Tuning = field(default_factory=Tuning)
    turn: int = 0
    scales: int = 1

    @property
    def macros(self) -> dict[str, str]:
        return {
            "MLA_MODE": str(int(self.mode)),
            "MLA_DATA": self.data.c_name,
            "MLA_TABLE": self.table.c_name,
            "MLA_VEC": str(self.vec),
            "MLA_FLIGHT": str(self.tuning.flight),
            "MLA_SUM_FLIGHT": str(self.tuning.sum_flight),
            "MLA_TOKENS": str(self.tuning.tokens),
            "MLA_WARPS": str(self.tuning.warps),
            "MLA_RESIDENT": str(self.tuning.resident),
            "MLA_TURN": str(self.turn),
            "MLA_SCALES": str(self.scales),
        }

    @property
    def code(self) -> str:
        return SOURCE.read_text(encoding="utf-8")

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("mla_vector", "mla_any") if self.vec > 1 else ("mla_any",)


def variant_of_task(task: Task) -> MlaVariant:
    """The kernels for a task."""
    vec = vector_of(task)
    kernels = MlaVariant(task.mode, task.data, task.table, vec, task.tuning)
    if task.mode is not Mode.MXFP8 or vec == 1:
        return kernels
    scales = scales_of(task, cut_of(task, vec).part_heads)
    return replace(kernels, turn=2 * task.half, scales=scales)
