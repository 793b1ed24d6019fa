"""Paired timing: both sides in turn, so that a slow moment of the machine hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
T = TypeVar("T")
DEVICE_ROUNDS, HOST_ROUNDS = 15, 300
RATIO_ROUNDS = 45  # a ratio to within half a percent needs more


@dataclass(frozen=True)
class Paired:
    """Medians of one run, in microseconds, and the median of the paired ratios."""

    ours_us: float
    other_us: float
    ratio: float


def paired(ours: Call, other: Call, rounds: int, calls: int = 1) -> Paired:
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


def _once(work: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls * 1e6


def device_us(work: Call) -> float:
    """Median device time of one call in microseconds, by CUDA events."""
    return device_in_turn({"": work})[""]


def device_in_turn(works: Mapping[str, Call], rounds: int = DEVICE_ROUNDS) -> dict[str, float]:
    """Median device times of works that take turns: a warm card is as warm for each of them.

    A buffer larger than the L2 cache is written before each call: its data leave the cache, and the
    host is ahead of the device when the first event is reached.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for work in works.values():
        for _ in range(3):
            work()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in works}
    for _ in range(rounds):
        for name, work in works.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            work()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in own) * 1e3
        for name, own in marks.items()
    }


def host_us(work: Callable[[int], object]) -> float:
    """Median host time of one call in microseconds, on an idle queue.  work: gets 0, 1, 2, ..."""
    times: list[float] = []
    for i in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work(i)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A step in one CUDA graph, the way any training or decoding loop captures one.

    Returns the graph, and what the step returned, which a replay writes anew.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made
