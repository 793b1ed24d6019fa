"""The code and the links of README.md and docs/ are true."""

import re
from pathlib import Path

import pytest
import torch

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
