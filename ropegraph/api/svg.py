"""A graph as an SVG that stands by itself: no script, no style sheet, no font but the reader's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from ropegraph.api.layout import Layout, lay_out
from ropegraph.api.svg_text import COLUMN, FONT_SIZE, LINE, clean, columns, rows, wrapped
from ropegraph.ir.graph import Graph
from ropegraph.ir.picture import BOLD, COLOURS, Arrow, Box, Kind, picture

PAD, MARGIN, HEADER = 9.0, 14.0, 56.0
LINE_INK = "#757575"
LEGEND: dict[Kind, str] = {
    "user": "you bind it",
    "saved": "saved for the backward",
    "op": "operation",
    "scaled": "changed by a pass",
}


def to_svg(graph: Graph, before: Graph | None = None) -> str:
    """``graph`` from top to bottom: the tensors the caller binds, nodes with their scales.

    before: the graph as recorded; nodes whose attributes changed since are marked.
    """
    drawn = picture(graph, before)
    # A label is a thing of its own between two boxes.
    labels = {f"e{i}": arrow for i, arrow in enumerate(drawn.arrows) if arrow.label}
    texts = {box.id: wrapped(box.lines) for box in drawn.boxes}
    texts |= {name: wrapped(arrow.label) for name, arrow in labels.items()}
    sizes = {name: _size(text) for name, text in texts.items()}
    lines: list[tuple[str, str]] = []
    for i, arrow in enumerate(drawn.arrows):
        between = (f"e{i}",) if arrow.label else ()
        lines += pairwise((arrow.source, *between, arrow.target))
    drawing = Drawing(texts, sizes, lay_out(sizes, lines), tuple(lines))
    stage = "as recorded" if before is None else "lowered"
    title = clean(f"{graph.name}: {stage}, fold={graph.fold}, fold_log2={graph.fold_log2}")
    legend, legend_width = _legend({box.kind for box in drawn.boxes})
    right, bottom = drawing.extent
    width = round(max(right, legend_width, columns(title) * COLUMN) + 2 * MARGIN)
    height = round(bottom + HEADER + 2 * MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-size="{FONT_SIZE}" fill="#212121" '
        'font-family="ui-monospace, Menlo, Consolas, monospace">'
    )
    parts = [
        head,
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="{MARGIN + FONT_SIZE}">{escape(title)}</text>',
        legend,
        f'<g transform="translate({MARGIN} {MARGIN + HEADER})">',
        *(drawing.line(*line, has_head=line[1] not in labels) for line in lines),
        *(drawing.label(name, arrow) for name, arrow in labels.items()),
        *(drawing.box(box) for box in drawn.boxes),
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts)


def _size(text: Sequence[str]) -> tuple[float, float]:
    return max(map(columns, text)) * COLUMN + 2 * PAD, len(text) * LINE + PAD


@dataclass(frozen=True)
class Drawing:
    """Texts and sizes of boxes and labels by id, and where they and the lines between them go."""

    texts: Mapping[str, list[str]]
    sizes: Mapping[str, tuple[float, float]]
    layout: Layout
    lines: tuple[tuple[str, str], ...]

    @property
    def extent(self) -> tuple[float, float]:
        """Width and height of it all."""
        places, none = self.layout.centres.items(), (0.0, 0.0)
        right = max((x + self.sizes.get(n, none)[0] / 2 for n, (x, _) in places), default=0.0)
        heights = self.layout.heights
        return right, max((y + heights[n] / 2 for n, (_, y) in places), default=0.0)

    def box(self, box: Box) -> str:
        fill, stroke = COLOURS[box.kind]
        look = f'rx="4" fill="{fill}" stroke="{stroke}"'
        return self._thing(box.id, box.kind, box.lines, look, is_bold=box.kind in BOLD)

    def label(self, name: str, arrow: Arrow) -> str:
        kinds: dict[str, Kind] = {"user-bound": "user", "saved": "saved"}
        kind = kinds.get(arrow.label[-1]) if len(arrow.label) > 1 else None
        fill = "#ffffff" if kind is None else COLOURS[kind][0]
        return self._thing(name, "label", arrow.label, f'rx="12" fill="{fill}"')

    def _thing(
        self, name: str, kind: str, lines: Sequence[str], look: str, is_bold: bool = False
    ) -> str:
        (x, y), (width, height) = self.layout.centres[name], self.sizes[name]
        title = escape(clean("\n".join(lines)))
        return (
            f'<g data-name="{name}" class="{kind}"><title>{title}</title>'
            f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" {look}/>{rows(self.texts[name], x, y, is_bold)}</g>'
        )

    def line(self, source: str, target: str, has_head: bool) -> str:
        """A curve from the foot of one thing to the head of another, upright at every stop."""
        leaving = [self._stops(*line)[1] for line in self.lines if line[0] == source]
        coming = [self._stops(*line)[-2] for line in self.lines if line[1] == target]
        stops = self._stops(source, target)
        x, y = self.layout.centres[source]
        at = x + self._port(source, leaving, stops[1]), y + self.sizes[source][1] / 2
        path = [f"M{at[0]:.1f},{at[1]:.1f}"]
        for stop in stops[1:-1]:
            x, y = self.layout.centres[stop]
            half = self.layout.heights[stop] / 2
            path += [_curve(at, (x, y - half)), f"V{y + half:.1f}"]
            at = x, y + half
        x, y = self.layout.centres[target]
        end = x + self._port(target, coming, stops[-2]), y - self.sizes[target][1] / 2
        head = ""
        if has_head:
            head = f'<path d="M{end[0]:.1f},{end[1]:.1f} l-4,-8 h8 z" fill="{LINE_INK}"/>'
            end = end[0], end[1] - 7
        curve = " ".join([*path, _curve(at, end)])
        return (
            f'<g class="line" data-from="{source}" data-to="{target}">'
            f'<path d="{curve}" fill="none" stroke="{LINE_INK}"/>{head}</g>'
        )

    def _stops(self, source: str, target: str) -> tuple[str, ...]:
        return source, *self.layout.waypoints[source, target], target

    def _port(self, name: str, others: Sequence[str], other: str) -> float:
        """How far from its centre a line meets a thing: side by side, in the order of its ends."""
        order = sorted(dict.fromkeys(others), key=lambda name: self.layout.centres[name][0])
        step = min(18.0, 0.7 * self.sizes[name][0] / len(order))
        return (order.index(other) - (len(order) - 1) / 2) * step


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    middle = (start[1] + end[1]) / 2
    return f"C{start[0]:.1f},{middle:.1f} {end[0]:.1f},{middle:.1f} {end[0]:.1f},{end[1]:.1f}"


def _legend(present: set[Kind]) -> tuple[str, float]:
    """What the colours in use mean, and how wide that is."""
    parts: list[str] = []
    x, y = MARGIN, MARGIN + 2 * LINE
    for kind, (fill, stroke) in COLOURS.items():
        if kind not in present:
            continue
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="3" fill="{fill}" '
            f'stroke="{stroke}"/><text x="{x + 18:.1f}" y="{y:.1f}">{LEGEND[kind]}</text>'
        )
        x += 36 + len(LEGEND[kind]) * COLUMN
    return f'<g class="legend">{"".join(parts)}</g>', x - MARGIN
