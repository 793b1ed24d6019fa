"""What differs between the outputs a notebook has and those it would have now.

Times and addresses are in no output, but rounding errors are, and they differ from machine to
machine: errors and ratios are compared by size, values of three decimals and more in all their
digits but the last, pictures by eye, all else, whole numbers included, to the letter.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections import Counter
from typing import Any

import matplotlib.image
from nbformat import NotebookNode

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")
SVG_SHAPE = re.compile(r"<(\w+)")
SVG_FILL = re.compile(r'fill="([^"]*)"')
SVG_TEXT = re.compile(r">([^<>]+)<")
NO_MATTER = 1e-11  # an error in fp64 is smaller, and may be anything


def differences(committed: NotebookNode, fresh: NotebookNode) -> list[str]:
    """A line for every cell whose outputs are not the same."""
    found: list[str] = []
    for old, new in zip(committed.cells, fresh.cells, strict=True):
        if old.cell_type != "code":
            continue
        a, b = _outputs(old), _outputs(new)
        if [kind for kind, _ in a] != [kind for kind, _ in b]:
            kinds = [[kind for kind, _ in outputs] for outputs in (a, b)]
            found.append(f"cell {old.id}: shows {kinds[0]}, now {kinds[1]}")
            continue
        for (kind, was), (_, now) in zip(a, b, strict=True):
            if why := _COMPARE[kind](was, now):
                found.append(f"cell {old.id}: {kind}: {why}")
    return found


def _outputs(cell: NotebookNode) -> list[tuple[str, str]]:
    """Kind and content: the richest form of each output, the text of standard output."""
    found: list[tuple[str, str]] = []
    for output in cell.outputs:
        data: Any = output.get("data", {"text/plain": output.get("text", "")})
        kind = next(k for k in _COMPARE if k in data)
        found.append((kind, data[kind]))
    return found


def text(was: str, now: str) -> str:
    """Why two texts are not the same, or nothing."""
    if NUMBER.sub("0", was) != NUMBER.sub("0", now):
        return f"the words differ: {was!r:.300} is now {now!r:.300}"
    for a, b in zip(NUMBER.findall(was), NUMBER.findall(now), strict=True):
        if not _is_same(a, b):
            return f"{a} is now {b} in {now!r:.300}"
    return ""


def _is_same(a: str, b: str) -> bool:
    """True if a number that was shown as ``a`` may be shown as ``b``."""
    x, y = (float(number.replace(",", "")) for number in (a, b))
    whole, _, fraction = a.partition(".")
    decimals = len(fraction.partition("e")[0])
    if decimals >= 3:
        # A value: the last digit, or those that fp32 does not have, may be rounded otherwise.
        unit = 10.0 ** (int(fraction.partition("e")[2] or 0) - decimals)
        return abs(x - y) <= max(2.5 * unit, 2e-6 * abs(x))
    if "e" in a + b:
        # An error: its size matters, and fp64's not even that.
        return max(x, y) < NO_MATTER or (min(x, y) > 0 and abs(math.log10(x / y)) < 1)
    if not decimals and "." not in b:
        return whole.rstrip(",") == b.rstrip(",")
    return math.isclose(x, y, rel_tol=0.05)


def _svg(was: str, now: str) -> str:
    """Labels count, shapes and colours; where the boxes stand is the layout's affair."""
    for shapes in (SVG_SHAPE, SVG_FILL):
        counts = [Counter(shapes.findall(picture)) for picture in (was, now)]
        if counts[0] != counts[1]:
            return f"{dict(counts[0])} in the picture, now {dict(counts[1])}"
    return text(*("\n".join(SVG_TEXT.findall(picture)) for picture in (was, now)))


def _png(was: str, now: str) -> str:
    """Another version of matplotlib moves a label by a pixel, another result moves a bar."""
    a, b = (matplotlib.image.imread(io.BytesIO(base64.b64decode(data))) for data in (was, now))
    if any(abs(m - n) > 0.05 * m for m, n in zip(a.shape, b.shape, strict=True)):
        return f"a picture of {a.shape[:2]} is now one of {b.shape[:2]}"
    height, width = (min(sizes) for sizes in zip(a.shape[:2], b.shape[:2], strict=True))
    gap = float(abs(a[:height, :width] - b[:height, :width]).mean())
    return "" if gap < 0.04 else f"the pictures differ by {gap:.1%}"


_COMPARE = {"image/png": _png, "image/svg+xml": _svg, "text/plain": text}
