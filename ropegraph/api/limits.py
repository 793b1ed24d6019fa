"""What the machine can do, measured beside what is to be judged: copies, and matmuls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cached_property

import torch

# Written before each timed call on a GPU: data leave the L2 cache, and the host runs ahead.
_FLUSH_BYTES = 256 << 20
ROUNDS = (5, 200)


class Clock:
    """Times work on one device, and keeps the limits it measured.

    seconds: how long to repeat each thing for, about.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self._rates: dict[torch.dtype, float] = {}

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def _flush(self) -> torch.Tensor:
        # Launches are timed in inference mode and whole graphs outside: it is written in both.
        with torch.inference_mode(mode=False):
            return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def measure(
        self, work: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> tuple[float, float]:
        """Median device and host seconds of one call; before each, ``before`` runs untimed.

        On a CPU both are the same. On a GPU device time is between two events on torch's current
        stream, and host time is until the call returns, on an idle queue.
        """
        spent = [sum(self._once(work, before)) for _ in range(2)]
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(self.seconds / max(min(spent), 1e-7))))
        pairs = [self._once(work, before) for _ in range(rounds)]
        device, host = (statistics.median(times) for times in zip(*pairs, strict=True))
        return device, host

    def _once(
        self, work: Callable[[], object], before: Callable[[], object]
    ) -> tuple[float, float]:
        before()
        if not self.is_cuda:
            start = time.perf_counter()
            work()
            spent = time.perf_counter() - start
            return spent, spent
        stream = torch.cuda.current_stream(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        work()
        host = time.perf_counter() - began
        before()
        self._flush.zero_()
        start.record(stream)
        work()
        end.record(stream)
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3, host

    def copy_seconds(self, size_bytes: int) -> float:
        """How long a copy takes that moves this many bytes, half of them read, half written."""
        half = max(1, size_bytes // 2)
        source, target = (
            torch.zeros(half, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        return self.measure(lambda: target.copy_(source))[0]

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """The rate of square matmuls in ``dtype``, or in fp32 where that is faster."""
        wide = torch.promote_types(dtype, torch.float32)
        return max(self._rate(dtype), self._rate(wide))

    def _rate(self, dtype: torch.dtype) -> float:
        if dtype not in self._rates:
            n = 4096 if self.is_cuda else 512
            a, b = (torch.full((n, n), 0.5, device=self.device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            self._rates[dtype] = 2 * n**3 / self.measure(lambda: torch.mm(a, b, out=out))[0]
        return self._rates[dtype]
