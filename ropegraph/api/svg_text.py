"""Text for an SVG: as wide as a monospaced font makes it, cut where it is too long, escaped."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from xml.sax.saxutils import escape

FONT_SIZE = 12
LINE = 16.0
# A column of the usual monospaced fonts is 0.55 to 0.61 of the font size wide.
COLUMN = 0.62 * FONT_SIZE
COLUMNS = 44
# What XML 1.0 has no place for: control characters, halves of surrogate pairs, non-characters.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """The text with a mark in place of what no XML file may hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def columns(text: str) -> int:
    """Columns of a monospaced font: letters of East Asia take two, accents none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "FW" else 1
        for c in text
    )


def wrapped(lines: Sequence[str]) -> list[str]:
    """Lines of at most COLUMNS columns, cut behind the last space that fits, or anywhere."""
    done: list[str] = []
    for line in lines:
        rest = re.sub(r"[\t\n\r]", " ", clean(line))
        while columns(rest) > COLUMNS:
            fits = next(i for i in range(len(rest), 0, -1) if columns(rest[:i]) <= COLUMNS)
            cut = rest.rfind(" ", COLUMNS // 3, fits) + 1 or fits
            done.append(rest[:cut].rstrip())
            rest = rest[cut:]
        done.append(rest)
    return done


def rows(text: Sequence[str], x: float, y: float, is_bold: bool = False) -> str:
    """Lines of text around a centre, the first in bold where asked for."""
    top = y - len(text) * LINE / 2 + LINE * 0.75
    bold = ' font-weight="bold"'
    return "".join(
        f'<text x="{x:.1f}" y="{top + i * LINE:.1f}" text-anchor="middle"'
        f"{bold if is_bold and i == 0 else ''}>{escape(row)}</text>"
        for i, row in enumerate(text)
    )
