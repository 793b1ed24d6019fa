"""The bench command: one table, printed, and kept as Markdown and JSON where asked."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import ropegraph as rg
from ropegraph.cli.bench import cpu, gpu
from ropegraph.cli.bench.row import notes, table
from ropegraph.cli.device import chosen
from ropegraph.cli.doctor.facts import processor
from ropegraph.cli.refusal import Refusal


def add_to(commands: Any) -> None:
    """Add ``bench`` to the command line."""
    command = commands.add_parser(
        "bench",
        help="time rope + attention beside what else is installed, in one run",
        description="Rotary attention beside plain torch on a CPU; on a GPU, every fused form too, "
        "beside a device copy and those of Hugging Face, torch.compile and Liger that are "
        "installed. All in one run; results are compared before they are timed.",
    )
    command.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to run (a GPU if there is one, else the CPU with two threads)",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of the table")
    command.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="also write the table to FILE.md and the numbers to FILE.json",
    )
    command.add_argument(
        "--only",
        action="extend",
        nargs="+",
        choices=list({**gpu.GROUPS, **cpu.GROUPS}),
        metavar="GROUP",
        help=f"measure these groups alone; on a GPU there are {', '.join(gpu.GROUPS)}, on a CPU "
        f"{', '.join(cpu.GROUPS)}",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and keep the record; the status is 0 whatever the figures are."""
    device = chosen(options.device, "bench")
    place = gpu if device == "cuda" else cpu
    missing = [name for name in options.only or () if name not in place.GROUPS]
    if missing:
        raise Refusal(
            f"bench: on this device ({device}) there is no group {', '.join(missing)}; use "
            f"{', '.join(place.GROUPS)}"
        )
    print("measuring, for a few minutes ...", file=sys.stderr, flush=True)
    measured = place.rows([name for name in place.GROUPS if name in (options.only or place.GROUPS)])
    facts = _facts(device)
    data = json.dumps({**facts, "rows": [asdict(r) for r in measured]}, indent=1)
    text = f"{table(measured)}\n\n{notes(measured, device)}"
    print(data if options.json else text)
    if options.record is not None:
        part = f' ARGS="--only {" ".join(options.only)}"' if options.only else ""
        _record(options.record, f"make bench{part}", facts, text, data)
    return 0


def _record(file: Path, made_by: str, facts: dict[str, str], text: str, data: str) -> None:
    """Write FILE.md and FILE.json; FILE may be given with either ending."""
    if file.suffix in (".md", ".json"):
        file = file.with_suffix("")
    about = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    page = f"# Benchmark on {facts['device']}\n\nOne run of `{made_by}`.\n\n{about}\n\n{text}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_name(f"{file.name}.md").write_text(page)
    file.with_name(f"{file.name}.json").write_text(data + "\n")


def _facts(device: str) -> dict[str, str]:
    """What the figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "ropegraph": rg.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **({"threads": str(torch.get_num_threads())} if device == "cpu" else _versions()),
    }


def _versions() -> dict[str, str]:
    """Of what takes part on a GPU, as far as it is installed."""
    names = (
        "nvidia-cudnn-frontend",
        "cupy-cuda13x",
        "cupy-cuda12x",
        "transformers",
        "liger-kernel",
    )
    found = {"cuda": str(torch.version.cuda), "cudnn": rg.backend_version_string()}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
