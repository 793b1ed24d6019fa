"""The doctor command: what a bug report should say about a machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from ropegraph.cli.demo.screen import table
from ropegraph.cli.doctor.facts import facts
from ropegraph.cli.doctor.probes import DTYPES, PROBES, Served, probe

TITLES = {
    "versions": "Versions",
    "device": "Devices",
    "cudnn": "cuDNN",
    "modules": "Python modules of the CUDA engines",
    "environment": "Environment",
}


def add_to(commands: Any) -> None:
    """Add ``doctor`` to the command line."""
    command = commands.add_parser(
        "doctor",
        help="versions, devices, cuDNN, and which engine serves what: for bug reports",
        description="Print what is installed, where cuDNN was found, and which engine takes which "
        "operation on this machine and why others do not. Paste it into a bug report. Exits with 1 "
        "if an operation is served by no engine.",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask and print; 0 if some engine serves every operation."""
    found = facts()
    served = [probe(op, dtype) for op in PROBES for dtype in DTYPES]
    if options.json:
        print(json.dumps({**found, "served": [asdict(s) for s in served]}, indent=1, default=str))
    else:
        print(_text(found, served))
    return 1 if any(s.trouble for s in served) else 0


def _text(found: Mapping[str, Any], served: Sequence[Served]) -> str:
    parts = [_section(TITLES[name], content) for name, content in found.items() if content]
    rows = [(op, *(_cell(s) for s in served if s.op == op)) for op in PROBES]
    parts.append("Who serves what\n" + _indented(table(("", *DTYPES), rows)))
    reasons: dict[str, dict[str, None]] = {}
    for s in served:
        for engine, rules in s.why_not.items():
            for rule in rules:
                reasons.setdefault(f"{engine}: {rule}", {})[f"{s.op} {s.dtype}"] = None
    lines = [f"{reason}\n    ({_shortened(list(asked))})" for reason, asked in reasons.items()]
    if lines:
        parts.append("Why not the others\n" + _indented("\n".join(lines)))
    trouble = [f"{s.op} {s.dtype}: {s.trouble}" for s in served if s.trouble]
    if trouble:
        parts.append("Served by no engine\n" + _indented("\n".join(trouble)))
    return "\n\n".join(parts)


def _section(title: str, content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"{title}\n  {content}"
    pairs = cast("Mapping[str, Any]", content)
    wide = max(map(len, pairs))
    lines: list[str] = []
    for name, value in pairs.items():
        values = cast("list[Any]", value) if isinstance(value, list) else [value]
        lines += [f"{name if i == 0 else '':<{wide}}  {v}" for i, v in enumerate(values)]
    return f"{title}\n{_indented(chr(10).join(lines))}"


def _cell(served: Served) -> str:
    return ", ".join(served.engines) if served.engines else "none"


def _shortened(names: list[str]) -> str:
    few = ", ".join(names[:4])
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
