"""Mermaid flowcharts of a graph, in the colours and shapes of cuDNN's own RoPE page."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ropegraph.ir.graph import Graph
from ropegraph.ir.picture import BOLD, COLOURS, Box, picture

_RULE = "───────"
# Quotes end a label, backticks make it Markdown, # and & begin a code, < and > are HTML.
_CODES = str.maketrans({'"': "'", "`": "#96;", "#": "#35;", "&": "#amp;", "<": "#lt;", ">": "#gt;"})
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def to_mermaid(graph: Graph, before: Graph | None = None) -> str:
    """A flowchart of ``graph``: tensors the caller binds, nodes with their scales, labelled edges.

    before: the graph as recorded; nodes whose attributes changed since are marked ``scaled``.
    """
    drawn = picture(graph, before)
    lines = ["flowchart LR"]
    lines += [f'    {box.id}["{_text(box)}"]:::{box.kind}' for box in drawn.boxes]
    for arrow in drawn.arrows:
        label = f'|"{_joined(arrow.label)}"|' if arrow.label else ""
        lines.append(f"    {arrow.source} -->{label} {arrow.target}")
    for kind, (fill, line) in COLOURS.items():
        weight = ",font-weight:bold" if kind in BOLD else ""
        lines.append(f"    classDef {kind} fill:{fill},stroke:{line}{weight}")
    return "\n".join(lines)


def _text(box: Box) -> str:
    head, *rest = box.lines
    parts = (head, _RULE, *rest) if box.kind in BOLD else box.lines
    return _joined(parts)


def _joined(lines: Iterable[str]) -> str:
    """Lines of a label, with nothing in them that Mermaid or HTML would read as its own."""
    return "<br/>".join(_CONTROL.sub(" ", line).translate(_CODES) for line in lines)
