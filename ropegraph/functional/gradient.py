"""What passes from forward to backward, the same for autograd in eager mode and for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ropegraph.functional.kind import NORMS, Kind

T = TypeVar("T")


def read_by_backward(
    kind: Kind,
    slots: Sequence[T | None],
    results: Sequence[T | None],
    wanted: tuple[bool, ...],
) -> tuple[T | None, ...]:
    """Results, then slots (or what stands for them), None where the backward reads nothing.

    A tensor whose rotation is kept is read itself only for the gradient of the angles, and for that
    of a norm, which reads it as it was; of a single rotation only the angles are.
    """
    reads_it = ("freqs" in kind.gradients and wanted[kind.gradients.index("freqs")]) or any(
        name in kind.slots and slots[kind.slots.index(name)] is not None for name in NORMS
    )
    found = list(slots)
    for slot, result in kind.turned.items():
        is_turned = results[kind.results.index(result)] is not None
        if is_turned and not reads_it:
            found[kind.slots.index(slot)] = None
    return (*results, *found) if kind.reads_result else (None, *results[1:], *found)
