"""The notebooks run in a fresh kernel, show what is committed, and find a wrong scale."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.missing import missing

try:
    import matplotlib.pyplot as plt
    import nbclient  # noqa: F401 - as are ipykernel and matplotlib, by the extra `notebooks`
    import nbformat

    from examples.notebooks import execute
    from tests.notebooks import stale
except ImportError as lacking:
    missing(f"the extra 'notebooks': {lacking}")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = execute.notebooks()
TOPICS = (
    "01_build_and_execute",
    "02_fold_rules",
    "03_where_alpha_flows",
    "04_inv_ln2",
    "05_when_folding_is_declined",
    "06_conventions",
    "07_long_context_angles",
    "08_training_loop",
)
BYTES = 1_500_000

# A notebook, what stands in its cells, and what is put there instead.
WRONG = [
    ("01_build_and_execute", "attn_scale=D**-0.5", "attn_scale=1.001 * D**-0.5"),
    ("01_build_and_execute", "ALPHA = D**-0.5", "ALPHA = 1.001 * D**-0.5"),
    ("02_fold_rules", "INV_LN2 = 1 / math.log(2)", "INV_LN2 = 1.4426"),
    ("02_fold_rules", "ROOT = math.sqrt(ALPHA)", "ROOT = 1.001 * math.sqrt(ALPHA)"),
    ("02_fold_rules", "attn_scale=D**-0.5", "attn_scale=1.001 * D**-0.5"),
    ("03_where_alpha_flows", '"Q-only": (ALPHA, 1.0, 1.0)', '"Q-only": (1.001 * ALPHA, 1.0, 1.0)'),
    (
        "03_where_alpha_flows",
        "attention_backward(ALPHA * q_rot",
        "attention_backward(0.999 * q_rot",
    ),
    ("03_where_alpha_flows", "attn_scale=D**-0.5", "attn_scale=1.001 * D**-0.5"),
    ("04_inv_ln2", "K = 1 / LN2", "K = 1.4426"),
    ("04_inv_ln2", "LN2 = math.log(2)", "LN2 = 0.6931"),
    ("05_when_folding_is_declined", "return (scale * q", "return (1.001 * scale * q"),
    ("05_when_folding_is_declined", "output_scale=2.0**90", "output_scale=1.001 * 2.0**90"),
    ("06_conventions", "base=10_000.0", "base=9_000.0"),
    ("06_conventions", "matrix(R, output_scale=0.5)", "matrix(R, output_scale=0.501)"),
    ("07_long_context_angles", "OMEGA = ROPE.inv_freq", "OMEGA = ROPE.inv_freq * 1.0001"),
    ("07_long_context_angles", "angle_precision=precision", "output_scale=1.001"),
    ("08_training_loop", "scale=D**-0.5, is_causal", "scale=1.001 * D**-0.5, is_causal"),
]


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(code: list[Any], name: str, old: str, new: str) -> None:
    """Execute the cells in this process, with something else in the place of ``old``."""
    scope: dict[str, object] = {"__name__": name}
    for cell in code:
        source = cell.source.replace(old, new)
        exec(compile(source, f"{name}, cell {cell.id}", "exec"), scope)


def test_all_of_them_are_there() -> None:
    assert tuple(path.stem for path in NOTEBOOKS) == TOPICS
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert all(f"`{topic}`" in page for topic in TOPICS)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_fresh_kernel_shows_what_is_committed(path: Path) -> None:
    fresh = execute.execute(path)
    assert any(cell.outputs for cell in cells(fresh))
    if not torch.cuda.is_available():  # what is committed was made on a CPU
        assert not stale.differences(execute.load(path), fresh), "`make notebooks` writes it anew"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new"), WRONG, ids=[f"{n}: {new}" for n, _, new in WRONG])
def test_a_wrong_scale_makes_it_fail(
    name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    code = cells(execute.load(execute.HERE / f"{name}.ipynb"))
    assert any(old in cell.source for cell in code)
    with pytest.raises(AssertionError):
        run(code, name, old, new)
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_file_holds_what_the_cells_show_and_no_more(path: Path) -> None:
    notebook, raw = execute.load(path), path.read_text(encoding="utf-8")
    code = cells(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any("assert" in cell.source for cell in code)
    assert notebook == execute.clean(copy.deepcopy(notebook))
    assert all(re.fullmatch("[a-z0-9-]+", cell.id) for cell in notebook.cells)
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    shown = json.dumps([o.get("text", o.get("data", {}).get("text/plain")) for o in outputs])
    assert not re.search(r"/\w+/\w+|0x[0-9a-f]{6}|\d ?[mµu]?s\b", shown), "a path, address or time"
    assert len(raw) < BYTES / 3


def test_together_they_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < BYTES


@pytest.mark.parametrize(
    ("was", "now", "is_same"),
    [
        ("error 3e-16", "error 9e-13", True),
        ("error 3e-08", "error 5e-08", True),
        ("error 3e-08", "error 3e-06", False),
        ("1.02 times", "1.03 times", True),
        ("1.02 times", "1.20 times", False),
        ("2 launches", "3 launches", False),
        ("512 tokens", "513 tokens", False),
        ("33,554,432 on scores", "33,554,433 on scores", False),
        ("f32", "f16", False),
        ("attn_scale=0.144338", "attn_scale=0.144339", True),
        ("attn_scale=0.144337567297", "attn_scale=0.144337567301", True),
        ("attn_scale=0.144338", "attn_scale=0.144482", False),
        ("7.88861e-31", "7.88871e-31", False),
        ("loss 3.303", "loss 3.313", False),
        ("score -1.647675", "score 1.647675", False),
        ("right", "wrong", False),
    ],
)
def test_what_counts_as_stale(was: str, now: str, is_same: bool) -> None:
    assert (not stale.text(was, now)) == is_same


def test_a_changed_picture_or_a_missing_output_is_stale() -> None:
    notebook = execute.load(execute.HERE / "02_fold_rules.ipynb")
    assert not stale.differences(notebook, copy.deepcopy(notebook))
    for change in (lambda outputs: outputs.clear(), _another_picture):
        other = copy.deepcopy(notebook)
        drawn = next(cell for cell in other.cells if "plt.show()" in cell.source)
        change(drawn.outputs)
        assert len(stale.differences(notebook, other)) == 1


@pytest.mark.parametrize(
    ("was", "now"),
    [('fill="#fce4ec"', 'fill="#fff3e0"'), ("<path ", "<line "), (">rope_q", ">rope")],
)
def test_a_diagram_of_other_colours_shapes_or_labels_is_stale(was: str, now: str) -> None:
    notebook = execute.load(execute.HERE / "01_build_and_execute.ipynb")
    outputs = [o for cell in cells(notebook) for o in cell.outputs if was in _drawing(o)]
    for output in outputs:
        other = _drawing(output).replace(was, now, 1)
        assert stale.differences(_showing(_drawing(output)), _showing(other))
    assert outputs


def _drawing(output: Any) -> str:
    return output.get("data", {}).get("image/svg+xml", "")


def _showing(drawing: str) -> Any:
    """A notebook whose one cell shows a diagram."""
    cell = nbformat.v4.new_code_cell("g")
    cell.outputs = [nbformat.v4.new_output("display_data", {"image/svg+xml": drawing})]
    return nbformat.v4.new_notebook(cells=[cell])


def test_every_number_of_a_text_is_looked_at() -> None:
    """Twenty times as much is never the same, but of an error in fp64."""
    for path in NOTEBOOKS:
        for output in (o for cell in cells(execute.load(path)) for o in cell.outputs):
            was = output.get("text") or output.get("data", {}).get("text/plain", "")
            for found in stale.NUMBER.finditer(was):
                value = float(found.group().replace(",", ""))
                if value > stale.NO_MATTER:
                    other = f"{20 * value:.6g}"
                    assert stale.text(was, was[: found.start()] + other + was[found.end() :])


def _another_picture(outputs: list[Any]) -> None:
    picture = execute.load(execute.HERE / "03_where_alpha_flows.ipynb")
    drawn = next(cell for cell in picture.cells if "plt.show()" in cell.source)
    outputs[0].data["image/png"] = drawn.outputs[0].data["image/png"]
