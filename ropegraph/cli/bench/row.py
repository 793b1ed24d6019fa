"""One line of a benchmark table."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "-"
        return f"{self.target:g} {'reached' if self.value <= self.target else 'missed'}"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["work", "ours us", "others us", "figure", "target"]
    body = [
        [
            row.work,
            f"{row.ours_us:.1f}",
            ", ".join(f"{name} {us:.1f}" for name, us in row.others.items()) or "-",
            f"{row.value:.3g} {row.unit}",
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
