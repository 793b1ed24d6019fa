"""The code and the links of README.md and docs/ are true."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ropegraph.cli.bench.row import time_text
from ropegraph.cli.doctor.probes import DTYPES, PROBES, Sketch
from ropegraph.compile import lower
from ropegraph.lowering.engine import Device

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [code for name, code in BLOCK.findall(text) if name == language]


def name_of(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_the_python_blocks_run_in_order(page: Path) -> None:
    scope: dict[str, object] = {"__name__": page.stem}
    for number, code in enumerate(blocks(page, "python"), start=1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), scope)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows the launches on a CPU")
def test_the_readme_shows_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "README.md"
    exec(compile(blocks(page, "python")[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == blocks(page, "text")[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not broken


def test_the_fold_table_is_the_same_everywhere() -> None:
    def rows(page: str) -> list[str]:
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith(("| `off`", "| `q`", "| `symmetric`"))]

    assert len(rows("README.md")) == 5
    assert rows("README.md") == rows("docs/fold.md")


def section(title: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def cells(title: str) -> list[list[str]]:
    """The rows of the tables of a section, heads and rules left out."""
    lines = [line.strip("| ") for line in section(title).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    rules = [i for i, row in enumerate(rows) if set("".join(row)) == {"-"}]
    heads = {i - 1 for i in rules}
    return [row for i, row in enumerate(rows) if i not in heads and i not in rules]


@pytest.mark.skipif(torch.cuda.is_available(), reason="its code is built for a CPU")
def test_the_picture_is_of_its_first_graph() -> None:
    scope: dict[str, Any] = {}
    exec(compile(blocks(ROOT / "README.md", "python")[0], "README.md", "exec"), scope)
    both = [scope["g"].to_svg(stage) for stage in ("recorded", "lowered")]
    drawn = ROOT / "docs" / "images" / "fold.svg"
    assert drawn.read_text(encoding="utf-8") == side_by_side(both)


def side_by_side(svgs: list[str]) -> str:
    """One picture of several."""
    sizes = [re.search(r'width="(\d+)" height="(\d+)"', svg) for svg in svgs]
    wide, high = ([int(size[i]) for size in sizes if size] for i in (1, 2))
    lefts = [sum(wide[:i]) for i in range(len(wide))]
    inner = (s.replace("<svg ", f'<svg x="{x}" ', 1) for s, x in zip(svgs, lefts, strict=True))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(wide)}" height="{max(high)}">'
    return "\n".join((head, *inner, "</svg>", ""))


def served(op: str, dtype: str) -> str:
    """The engines that take a graph on an H200 with cuDNN 9.19."""
    sketch = Sketch(DTYPES[dtype])
    PROBES[op](sketch)
    sketch.g.validate()
    plan = lower(sketch.g._look(), Device("cuda", 0, 90, 91900), None).plan
    return ", ".join(dict.fromkeys(step.engine for step in plan.steps))


def test_what_runs_where() -> None:
    rows = cells("What runs where")
    assert [row[0] for row in rows] == list(PROBES)
    for op, half, single, double in rows:
        assert served(op, "f16") == served(op, "bf16") == half
        assert (served(op, "f32"), served(op, "f64")) == (single, double)


def test_what_is_measured_stands_in_the_records() -> None:
    records = [ROOT / "docs" / "benchmarks" / f"{name}.json" for name in ("h200", "cpu")]
    known = {r["work"]: r for path in records for r in json.loads(path.read_text())["rows"]}
    rows = cells("Measured")
    assert len(rows) > 10
    for work, ours, beside, *ratio in rows:
        row = known[work]
        assert ours == time_text(row["ours_us"])
        others = (f"{name} {time_text(us)}" for name, us in row["others"].items())
        assert beside == (", ".join(others) or "-")
        assert ratio == ([] if row["unit"] == "us" else [f"{row['value']:.3f}"])
