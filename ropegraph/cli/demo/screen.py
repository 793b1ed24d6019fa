"""What the demo draws on a terminal: headings, tables, a progress bar, a curve in one line."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

WIDTH = 80
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-:=+*#"


def can_print(characters: str) -> bool:
    """Whether standard output's encoding has these characters."""
    try:
        characters.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def heading(text: str) -> None:
    """Print a title, underlined, after an empty line."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first flush left, the others flush right."""
    grid = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in grid) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join((row[0].ljust(widths[0]), *cells)).rstrip()

    return "\n".join((line(grid[0]), "  ".join("-" * w for w in widths), *map(line, grid[1:])))


def sparkline(values: Sequence[float], width: int = 50) -> str:
    """The values as bars of eight heights, each the mean of its share; '?' where not finite."""
    marks = _BLOCKS if can_print(_BLOCKS) else _ASCII
    bins = min(width, len(values))
    edges = [i * len(values) // bins for i in range(bins + 1)] if bins else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return "?" * bins
    low, span = min(finite), max(finite) - min(finite) or 1.0
    top = len(marks) - 1
    return "".join(
        marks[round((mean - low) / span * top)] if math.isfinite(mean) else "?" for mean in means
    )


class Progress:
    """A bar that redraws itself on a terminal, and a single closing line anywhere else."""

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._is_live = sys.stdout.isatty()
        self._started = time.perf_counter()
        self._drawn = -math.inf

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._is_live:
            print("\r\x1b[2K", end="", flush=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def advance(self, note: str = "") -> None:
        """One step more; drawn ten times a second at most, for drawing must not cost time."""
        self.done += 1
        now = time.perf_counter()
        if not self._is_live or (self.done < self.total and now - self._drawn < 0.1):
            return
        self._drawn = now
        filled = 24 * self.done // self.total
        full, empty = ("█", "░") if can_print("█░") else ("#", ".")
        bar = full * filled + empty * (24 - filled)
        text = f"  {self.label:<22} {bar} {self.done:>4}/{self.total} {note} {self.seconds:5.1f} s"
        print(f"\r\x1b[2K{text[:WIDTH]}", end="", flush=True)

    def close(self, note: str) -> None:
        """Leave one line behind."""
        start = "\r\x1b[2K" if self._is_live else ""
        print(f"{start}  {self.label:<22} {note}", flush=True)
        self._is_live = False
