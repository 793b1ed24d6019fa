"""One line of a benchmark table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ropegraph.cli.bench.timing import RATIO_ROUNDS


@dataclass(frozen=True)
class Row:
    """A figure, what it is to reach, and what others took; smaller is better.

    value and target are in ``unit``: us, ms, or x for a ratio.  ours_us and others: microseconds.
    """

    work: str
    ours_us: float
    value: float
    target: float | None
    unit: str
    others: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of_time(
        cls, work: str, us: float, target: float | None, others: dict[str, float] | None = None
    ) -> Row:
        """A row whose figure is our time itself, in microseconds."""
        return cls(work, us, us, target, "us", others or {})

    @classmethod
    def of_ratio(cls, work: str, times: Mapping[str, float], target: float | None) -> Row:
        """A row whose figure is the first of these times, which is ours, over the second."""
        (_, ours), *others = times.items()
        return cls(work, ours, ours / others[0][1], target, "x", dict(others))

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "-"
        return f"<= {self.target:g} {'reached' if self.value <= self.target else 'missed'}"


RATIOS = {
    "cpu": "x is ours / theirs: the median of the ratios of rounds that time both in turn, over "
    "five processes, between which it varies by up to a tenth",
    "cuda": f"x is ours / the first of theirs: the ratio of the medians of {RATIO_ROUNDS} rounds, "
    "in which they take turns; two runs of one kernel differ by up to half a percent",
}
NOTES = {
    "us more": "us more is how much longer ours takes",
    "us": "us is what ours takes",
    "ms": "ms is what ours takes, in milliseconds",
}


def notes(rows: list[Row], device: str) -> str:
    """What the figures mean: a line for their units, and one for each unit in use."""
    texts = {"x": RATIOS[device], **NOTES}
    used = [text for unit, text in texts.items() if any(row.unit == unit for row in rows)]
    head = "Times are medians, in microseconds (us). In every figure smaller is better:"
    return "\n".join((head, *(f"- {text}" for text in used)))


def time_text(us: float) -> str:
    """Microseconds as a table shows them."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["work", "ours, us", "theirs, us", "figure", "target"]
    body = [
        [
            row.work,
            time_text(row.ours_us),
            ", ".join(f"{name} {time_text(us)}" for name, us in row.others.items()) or "-",
            f"{row.value:.3f} x" if row.unit == "x" else f"{row.value:.3g} {row.unit}",
            row.verdict,
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *body]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
