"""``python -m ropegraph``: the commands, and what an error looks like on a terminal."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import torch

import ropegraph as rg
from ropegraph.cli.bench import command as bench
from ropegraph.cli.demo import command as demo
from ropegraph.cli.doctor import command as doctor
from ropegraph.cli.refusal import Refusal
from ropegraph.cli.show import command as show
from ropegraph.cli.verify import command as verify


def parser() -> argparse.ArgumentParser:
    """The command line: each command's module adds its own options and sets ``run``."""
    whole = argparse.ArgumentParser(
        prog="python -m ropegraph",
        description="Graphs for rotary attention: record, fold, lower, execute, differentiate.",
    )
    version = f"ropegraph {rg.__version__}, torch {torch.__version__}"
    whole.add_argument("--version", action="version", version=version)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, verify, bench, doctor, show):
        command.add_to(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode gets question marks
            stream.reconfigure(errors="replace")
    try:
        return options.run(options)
    except Refusal as refusal:
        print(f"python -m ropegraph: {' '.join(str(refusal).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
