"""show: every format of a serialized graph, and one line for a file that is none."""

import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

import ropegraph as rg
from ropegraph.__main__ import main
from ropegraph.ir import serialize
from tests.api.graphs import attention

ROOT = Path(__file__).resolve().parents[2]


def graph() -> rg.pygraph:
    return attention(settings={"fold": "symmetric", "fold_log2": True})


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "forward.json"
    path.write_bytes(graph().serialize())
    return str(path)


@pytest.mark.parametrize("stage", ["recorded", "lowered"])
@pytest.mark.parametrize("form", ["text", "mermaid", "svg", "json"])
def test_every_format(form: str, stage: str, file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show", file, "--format", form, "--stage", stage]) == 0
    out, err = capsys.readouterr()
    g = graph()
    ir = g.lowered.recorded if stage == "recorded" else g.plan.graph
    assert err == ""
    match form:
        case "text":
            assert str(ir) in out
            assert (str(g.plan) in out) is (stage == "lowered")
        case "mermaid":
            assert out == g.to_mermaid(stage) + "\n"
        case "svg":
            ET.fromstring(out)
            assert out == g.to_svg(stage) + "\n"
        case _:
            assert str(serialize.loads(out)) == str(ir)


def test_what_it_writes_it_reads(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.json"
    assert main(["show", file, "--json", "-o", str(again)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(again.read_text())["format"] == "ropegraph"
    assert main(["show", str(again)]) == 0
    assert capsys.readouterr().out.strip() == str(graph())


def test_an_svg_in_a_file(file: str, tmp_path: Path):
    out = tmp_path / "forward.svg"
    assert main(["show", file, "--format", "svg", "--output", str(out)]) == 0
    assert ET.parse(out).getroot().tag.endswith("svg")


def test_standard_input(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    given = SimpleNamespace(buffer=io.BytesIO(Path(file).read_bytes()))
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["show", "-"]) == 0
    assert capsys.readouterr().out.strip() == str(graph())


def refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m ropegraph: ")
    assert err.count("\n") == 1
    assert said in err
    assert "Traceback" not in err


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a serialized ropegraph graph"),
    "text": (b"hello\nworld", "not a serialized ropegraph graph"),
    "bytes": (bytes(range(256)), "not a serialized ropegraph graph"),
    "other json": (b'{"a": [1, 2]}', "not a serialized ropegraph graph"),
    "newer": (b'{"format": "ropegraph", "version": 9, "sha256": "", "graph": {}}', "version 9"),
    "changed": (graph().serialize().replace(b'"q_rot"', b'"q_rat"'), "checksum does not match"),
    "cut": (graph().serialize()[:500], "not a serialized ropegraph graph"),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_a_damaged_file_is_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, said = BAD[kind]
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    refused([str(path)], said, capsys)


def test_files_that_are_not_there(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([str(tmp_path / "none.json")], "No such file", capsys)
    refused([str(tmp_path)], "Is a directory", capsys)
    refused([file, "-o", str(tmp_path / "no" / "such" / "folder.svg")], "No such file", capsys)


def test_as_a_program(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-m", "ropegraph", "show", str(tmp_path / "none.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["demo", "verify", "bench", "doctor", "show"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 6
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert f"    {command} " in capsys.readouterr().out
