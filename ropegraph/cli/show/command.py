"""The show command: a serialized graph as text, Mermaid, SVG or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ropegraph as rg
from ropegraph.cli.refusal import Refusal
from ropegraph.ir import serialize


def _text(graph: rg.pygraph, stage: str) -> str:
    if stage == "recorded":
        return str(graph)
    return f"{graph.plan.graph}\n\n{graph.plan}"


def _json(graph: rg.pygraph, stage: str) -> str:
    """The graph in the form of a serialized file, which ``show`` reads again."""
    found = graph.lowered.recorded if stage == "recorded" else graph.plan.graph
    return json.dumps(json.loads(serialize.dumps(found)), indent=1)


FORMATS: dict[str, Callable[[rg.pygraph, str], str]] = {
    "text": _text,
    "mermaid": lambda graph, stage: graph.to_mermaid(stage),
    "svg": lambda graph, stage: graph.to_svg(stage),
    "json": _json,
}


def add_to(commands: Any) -> None:
    """Add ``show`` to the command line."""
    command = commands.add_parser(
        "show",
        help="print a serialized graph as text, Mermaid, SVG or JSON",
        description="Read what graph.serialize() wrote, and show the graph as it was recorded or "
        "as it is lowered on this machine. Exits with 2 if the file cannot be read.",
    )
    command.add_argument("file", metavar="FILE", help="the serialized graph; - is standard input")
    command.add_argument("--format", choices=tuple(FORMATS), default="text", help="(text)")
    command.add_argument(
        "--json", action="store_const", const="json", dest="format", help="same as --format json"
    )
    command.add_argument(
        "--stage",
        choices=("recorded", "lowered"),
        default="recorded",
        help="before the passes, or after them with the engines of this machine (recorded)",
    )
    command.add_argument("-o", "--output", metavar="OUT", help="write to OUT instead of printing")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, draw, write.  Raises Refusal."""
    try:
        data = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
    except OSError as error:
        raise Refusal(f"{options.file}: {error.strerror or error}") from error
    try:
        shown = FORMATS[options.format](rg.pygraph().deserialize(data), options.stage)
    except (rg.GraphError, rg.UnsupportedError) as error:
        raise Refusal(f"{options.file}: {error}") from error
    if options.output is None:
        print(shown)
        return 0
    try:
        Path(options.output).write_text(shown + "\n", encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{options.output}: {error.strerror or error}") from error
    return 0
