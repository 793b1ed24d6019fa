"""The bench command: one table, printed, and kept as Markdown and JSON where asked."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

import ropegraph
from ropegraph.cli.bench.cpu import Row, rows


def add_to(commands: Any) -> None:
    """Add ``bench`` to the command line."""
    command = commands.add_parser(
        "bench",
        help="time rope + attention beside plain torch, in one run",
        description="Ratios to the usual rotate-half formula and torch's own attention, measured "
        "in turn in one run. Results are compared before they are timed.",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of the table")
    command.add_argument(
        "--record", type=Path, metavar="DIR", help="also write DIR/cpu.md and DIR/cpu.json"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and keep the record; the status is 0 whatever the figures are."""
    measured = rows()
    facts = _facts()
    data = json.dumps({**facts, "rows": [asdict(r) for r in measured]}, indent=1)
    table = _table(measured)
    print(data if options.json else table)
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        about = "\n".join(f"- {name}: {value}" for name, value in facts.items())
        text = f"# CPU benchmark\n\nOne run of `make bench`.\n\n{about}\n\n{table}\n"
        (options.record / "cpu.md").write_text(text)
        (options.record / "cpu.json").write_text(data + "\n")
    return 0


def _facts() -> dict[str, str]:
    """What the figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "ropegraph": ropegraph.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _table(measured: list[Row]) -> str:
    head = ["work", "beside", "ours us", "theirs us", "figure", "target"]
    body = [
        [
            row.work,
            row.beside,
            f"{row.ours_us:.1f}",
            "-" if row.other_us is None else f"{row.other_us:.1f}",
            f"{row.value:.3g} {row.unit}",
            f"{row.target:g} {'reached' if row.is_reached else 'missed'}",
        ]
        for row in measured
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *body]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
