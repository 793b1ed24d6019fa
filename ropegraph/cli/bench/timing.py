"""Paired timing: both sides in turn, so that a slow moment of the machine hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], object]


@dataclass(frozen=True)
class Paired:
    """Medians of one run, in microseconds, and the median of the paired ratios."""

    ours_us: float
    other_us: float
    ratio: float


def paired(ours: Work, other: Work, rounds: int, calls: int = 1) -> Paired:
    """Time both sides ``rounds`` times in turn, ``calls`` calls each, after a warm-up."""
    for work in (ours, other):
        work()
        work()
    pairs = [(_once(ours, calls), _once(other, calls)) for _ in range(rounds)]
    return Paired(
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def _once(work: Work, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls * 1e6
