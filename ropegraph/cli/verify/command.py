"""The verify command: the fold table on this machine, every row forward and backward."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import ropegraph as rg
from ropegraph.cli.demo.screen import table
from ropegraph.cli.device import chosen
from ropegraph.cli.verify.rows import Row, measure

NOTES = """\
Errors are the largest of o, stats, dq, dk, dv beside the formula in fp64, relative to the largest
element of each. f64: at most 1e-12. bf16: at most twice (that of "off" + one rounding), for "off"
that of plain torch; share is how much of it is used. Scales of the lowered graphs: to 1e-12."""


def add_to(commands: Any) -> None:
    """Add ``verify`` to the command line."""
    command = commands.add_parser(
        "verify",
        help="the fold table on this machine, every row, forward and backward, every engine",
        description="Lower and run every row of the fold table by every engine of this machine and "
        "compare scales, results and gradients with the formula in fp64. Exits with 1 if any is "
        "wrong. It takes a few seconds on a CPU.",
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to run (a GPU if there is one)"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of the table")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; 0 if every row holds.  Raises Refusal."""
    device = chosen(options.device, "verify")
    rows: list[Row] = []
    for row in measure(torch.device(device)):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r{len(rows)} rows ", end="", file=sys.stderr, flush=True)
    failed = [row for row in rows if not row.holds]
    if options.json:
        print(json.dumps(_data(device, rows), indent=1))
    else:
        print(_text(device, rows, len(failed)))
    return 1 if failed else 0


def _data(device: str, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "ropegraph": rg.__version__,
        "torch": torch.__version__,
        "device": device,
        "holds": all(row.holds for row in rows),
        "rows": [{**asdict(row), "holds": row.holds} for row in rows],
    }


def _text(device: str, rows: Sequence[Row], failed: int) -> str:
    head = ("engines", "rotation", "fold", "scales", "f64", "bf16", "bf16 off", "share", "")
    body = [
        (
            row.engines,
            row.rotation,
            row.fold,
            f"{row.table_gap:.0e}",
            f"{row.f64:.1e}",
            f"{row.bf16:.1e}",
            f"{row.unfused:.1e}",
            f"{row.share:.2f}",
            "ok" if row.holds else "FAILED",
        )
        for row in rows
    ]
    verdict = f"{failed} FAILED" if failed else "all hold"
    title = f"The fold table on {device}, torch {torch.__version__}, forward and backward"
    return f"{title}\n\n{table(head, body)}\n\n{NOTES}\n\n{len(rows)} rows, {verdict}"
