"""Parts of packed QKV that lie in memory of their own: copied from the whole, or into it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ropegraph.ir.ops import JoinQkv, SplitQkv
from ropegraph.ir.packed import PARTS, view_of
from ropegraph.lowering.engine import Step


class SplitStep:
    """Copies those parts that the caller binds."""

    def __init__(self, step: Step, attrs: SplitQkv) -> None:
        whole = step.value("qkv")
        self.whole = step.slot("qkv")
        self.parts = [
            (step.slot(part), view_of(attrs, part, whole.dim, whole.stride))
            for part in PARTS
            if step.has(part) and step.value(part).within is None
        ]

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        whole = env[self.whole]
        for slot, (start, dim, stride) in self.parts:
            env[slot].copy_(whole.as_strided(dim, stride, whole.storage_offset() + start))


class JoinStep:
    """Copies those parts that were not written into the whole; a part that is missing is zero."""

    def __init__(self, step: Step, attrs: JoinQkv) -> None:
        whole = step.value("qkv")
        self.whole = step.slot("qkv")
        self.parts = [
            (step.slot(part), view_of(attrs, part, whole.dim, whole.stride))
            for part in PARTS
            if not step.has(part) or step.value(part).within != (whole.within or whole.name)
        ]

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        whole = env[self.whole]
        for slot, (start, dim, stride) in self.parts:
            view = whole.as_strided(dim, stride, whole.storage_offset() + start)
            if slot < 0:
                view.zero_()
            else:
                view.copy_(env[slot])
