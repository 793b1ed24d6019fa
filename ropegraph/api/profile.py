"""What profile() found: a row a step, as a table, numbers, HTML or a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib import import_module
from typing import Any

HEAD = ("step", "op", "engine", "device us", "host us", "MB", "GB/s", "GFLOP", "TFLOP/s", "limit")
NOTES = (
    "MB: what the step must read and write. GFLOP: products of matrices; of masked pairs none.",
    "limit: what a copy of as many bytes, or a matmul of as many FLOPs, takes, as a share.",
)


@dataclass(frozen=True)
class StepProfile:
    """One launch.  Times are medians in seconds; on a CPU host and device time are the same.

    copy_seconds: of a copy that moves as many bytes.  matmul_seconds: of a matmul with as many
    FLOPs, 0 where there are none. Both were measured in the same run.
    """

    name: str
    op: str
    engine: str
    device_seconds: float
    host_seconds: float
    bytes_read: int
    bytes_written: int
    flops: int
    copy_seconds: float
    matmul_seconds: float

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.device_seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.device_seconds

    @property
    def limited_by(self) -> str:
        """Which of the two limits takes longer: "memory" or "compute"."""
        return "compute" if self.matmul_seconds > self.copy_seconds else "memory"

    @property
    def share(self) -> float:
        """The time that the limit alone takes, as a share of the time that the step takes."""
        return max(self.copy_seconds, self.matmul_seconds) / self.device_seconds

    def to_dict(self) -> dict[str, Any]:
        derived = {
            name: getattr(self, name)
            for name in ("bytes", "bytes_per_second", "flops_per_second", "limited_by", "share")
        }
        return {**asdict(self), **derived}

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table, under HEAD."""
        flops = self.flops_per_second
        return (
            self.name,
            self.op,
            self.engine,
            f"{self.device_seconds * 1e6:,.1f}",
            f"{self.host_seconds * 1e6:,.1f}",
            f"{self.bytes / 1e6:.3g}",
            f"{self.bytes_per_second / 1e9:.3g}",
            f"{self.flops / 1e9:.3g}" if self.flops else "-",
            f"{flops / 1e12:.3g}" if self.flops else "-",
            f"{100 * self.share:.2g} % {self.limited_by}",
        )


@dataclass(frozen=True)
class Profile:
    """A graph's launches in order, and an execute() of all of them.

    execute_seconds: until all is done, and execute_host_seconds: until the call returns.
    """

    graph: str
    device: str
    rows: tuple[StepProfile, ...]
    execute_seconds: float
    execute_host_seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.to_dict() for row in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @property
    def _title(self) -> str:
        whole, host = self.execute_seconds * 1e6, self.execute_host_seconds * 1e6
        return (
            f"graph {self.graph!r} on {self.device}: execute() takes {whole:,.1f} us, "
            f"the host {host:,.1f} us"
        )

    def __str__(self) -> str:
        table = [HEAD, *(row.cells for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [_line(cells, widths) for cells in table]
        return "\n".join([self._title, "", *lines, "", *NOTES])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in HEAD)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.cells)}</tr>"
            for row in self.rows
        )
        notes = "<br>".join(map(escape, NOTES))
        return (
            f"<p>{escape(self._title)}</p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table><p>{notes}</p>"
        )

    def plot(self) -> Any:
        """A matplotlib figure: the time of each step, and beside it the time of its limit.

        Raises ImportError where matplotlib is not installed.
        """
        try:
            figure_module: Any = import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError(
                'plot() needs matplotlib; pip install matplotlib, or "ropegraph[notebooks]"'
            ) from error
        figure = figure_module.Figure(figsize=(8, 1.2 + 0.6 * len(self.rows)), layout="constrained")
        axes = figure.add_subplot()
        bars = {
            "step": ("#f57c00", [row.device_seconds for row in self.rows]),
            "copy of its bytes": ("#1976d2", [row.copy_seconds for row in self.rows]),
            "matmul of its FLOPs": ("#c2185b", [row.matmul_seconds for row in self.rows]),
        }
        places = range(len(self.rows))
        for i, (label, (colour, seconds)) in enumerate(bars.items()):
            heights = [place + 0.27 * (i - 1) for place in places]
            axes.barh(heights, [x * 1e6 for x in seconds], 0.25, label=label, color=colour)
        axes.set_yticks(list(places), [f"{row.name}\n{row.engine}" for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel("us")
        axes.set_title(self._title, fontsize="medium")
        axes.legend()
        return figure


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, figures to the right."""
    parts = [
        cell.ljust(width) if i < 3 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()
