"""What the benchmark prints and keeps, on figures that nobody measured."""

import json
from pathlib import Path

import pytest

from ropegraph.__main__ import main
from ropegraph.cli.bench import command, cpu, gpu
from ropegraph.cli.bench.row import Row, notes, table
from ropegraph.cli.bench.timing import paired

ROWS = [
    Row("forward", 41234.5, 0.85, 0.9, "x", {"plain torch": 48511.2}),
    Row("execute", 80.04, 61.0, 60.0, "us more", {"plain torch": 19.04}),
    Row("build", 500.0, 0.5, None, "ms"),
]
TABLE = """\
| work    | ours, us | theirs, us         | figure     | target         |
| ------- | -------- | ------------------ | ---------- | -------------- |
| forward | 41,234   | plain torch 48,511 | 0.850 x    | <= 0.9 reached |
| execute | 80.0     | plain torch 19.0   | 61 us more | <= 60 missed   |
| build   | 500.0    | -                  | 0.5 ms     | -              |"""


def test_the_table_and_what_its_figures_mean() -> None:
    assert table(ROWS) == TABLE
    lines = notes(ROWS, "cpu").splitlines()
    assert "smaller is better" in lines[0]
    assert [line.split()[1] for line in lines[1:]] == ["x", "us", "ms"]
    assert len(notes(ROWS[:1], "cuda").splitlines()) == 2
    assert notes(ROWS[:1], "cuda") != notes(ROWS[:1], "cpu")


@pytest.mark.parametrize("name", ["cpu", "cpu.md", "cpu.json", "v1.2"])
def test_a_record_is_a_page_and_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.cpu, "rows", lambda names: ROWS)
    assert main(["bench", "--device", "cpu", "--record", str(tmp_path / "deep" / name)]) == 0
    stem = "v1.2" if name == "v1.2" else "cpu"
    page = (tmp_path / "deep" / f"{stem}.md").read_text()
    assert capsys.readouterr().out.strip() in page
    assert TABLE in page
    data = json.loads((tmp_path / "deep" / f"{stem}.json").read_text())
    assert [row["value"] for row in data["rows"]] == [0.85, 61.0, 0.5]
    assert {"device", "date", "commit", "torch", "threads"} <= data.keys()


def test_a_row_of_several_processes_is_its_medians() -> None:
    same = [Row("w", us, us / 10, 1.0, "x", {"plain": 2 * us}) for us in (9.0, 1.0, 2.0)]
    assert cpu._median(same) == Row("w", 2.0, 0.2, 1.0, "x", {"plain": 4.0})  # pyright: ignore[reportPrivateUsage]


def test_json_alone_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.cpu, "rows", lambda names: ROWS)
    assert main(["bench", "--device", "cpu", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3


def test_paired_timing_calls_both_sides_in_turn() -> None:
    calls: list[str] = []
    times = paired(lambda: calls.append("ours"), lambda: calls.append("theirs"), rounds=3, calls=2)
    assert calls == ["ours"] * 2 + ["theirs"] * 2 + (["ours"] * 2 + ["theirs"] * 2) * 3
    assert times.ratio > 0


def test_only_some_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(command.cpu, "rows", lambda names: asked.append(names) or ROWS)
    record = ["--record", str(tmp_path / "part")]
    assert main(["bench", "--device", "cpu", "--only", "host", "attention", *record]) == 0
    assert main(["bench", "--device", "cpu"]) == 0
    assert main(["bench", "--device", "cpu", "--only", "host", "--only", "attention"]) == 0
    assert asked == [
        ["attention", "host"],
        ["attention", "training", "host"],
        ["attention", "host"],
    ]
    page = (tmp_path / "part.md").read_text()
    assert '`make bench ARGS="--only host attention"`' in page
    assert main(["bench", "--device", "cpu", "--only", "host", "mla"]) == 2
    assert "no group mla; use attention, training, host" in capsys.readouterr().err


def test_an_unknown_group_is_an_error_that_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--only", "fused"])
    message = capsys.readouterr().err
    assert "fused" in message
    assert all(name in message for name in {**gpu.GROUPS, **cpu.GROUPS})


def test_groups_are_measured_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "GROUPS", {"a": lambda: ROWS[:1], "b": lambda: ROWS[1:]})
    assert gpu.rows(["b", "a"]) == ROWS[1:] + ROWS[:1]
    assert capsys.readouterr().err.splitlines() == ["measuring b ...", "measuring a ..."]
