"""verify: the fold table holds on this machine, and a wrong one gives exit status 1."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from ropegraph.__main__ import main
from ropegraph.cli.demo.graphs import SETTINGS
from ropegraph.cli.verify import command
from ropegraph.cli.verify.rows import CASES, ON_CPU, Row, measure
from ropegraph.engines.torch_executor.rotator import Rotator

RIGHT = Row("torch", "full", "q", ("torch",), 0.0, 1e-15, 5e-3, 5e-3, 0.3)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(measure(torch.device("cpu")))


def test_every_row_of_the_table_by_every_engine(rows: list[Row]):
    wanted = [(c, e, s.name) for c in CASES for e in ON_CPU for s in SETTINGS]
    assert [(r.rotation, r.engines, r.fold) for r in rows] == wanted
    for row in rows:
        assert row.holds, row
        assert row.ran == (row.engines,)
        assert 0 < row.f64 < 1e-14
        assert 1e-4 < row.bf16 < 1e-2
        assert row.table_gap <= 1e-15


def test_what_it_prints(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "measure", lambda device: iter(rows))
    assert main(["verify", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.count(" ok\n") == len(rows)
    assert text.strip().endswith(f"{len(rows)} rows, all hold")
    assert main(["verify", "--device", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["holds"] is True
    assert [row["fold"] for row in data["rows"]] == [row.fold for row in rows]


WRONG: list[dict[str, Any]] = [
    {"table_gap": 1e-9},
    {"f64": 1e-11},
    {"share": 1.01},
    {"bf16": float("nan"), "share": float("nan")},
    {"table_gap": float("nan")},
]


@pytest.mark.parametrize("changed", WRONG)
def test_a_row_that_fails_gives_status_1(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "measure", lambda device: iter([RIGHT, replace(RIGHT, **changed)]))
    assert main(["verify", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert text.count("FAILED") == 2
    assert "1 FAILED" in text


def test_a_kernel_that_is_wrong_by_a_little_fails(monkeypatch: pytest.MonkeyPatch):
    right = Rotator.__call__

    def wrong(self: Rotator, x: Any, out: Any, tables: Any) -> None:
        right(self, x, out, tables)
        out.mul_(1 + 1e-9)

    monkeypatch.setattr(Rotator, "__call__", wrong)
    row = next(measure(torch.device("cpu")))
    assert row.engines == "torch"
    assert not row.holds


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says where there is no GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--device", "cuda"]) == 2
    err = capsys.readouterr().err
    assert err == "python -m ropegraph: verify: torch sees no CUDA device; use --device cpu\n"
