"""doctor: it says what there is, and never stops at what is missing or broken."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.__main__ import main
from ropegraph.cli.doctor import command, facts, probes
from ropegraph.cli.doctor.probes import DTYPES, PROBES, Served

ROOT = Path(__file__).resolve().parents[2]


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status = main(["doctor", "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return {**json.loads(out), "status": status}


def test_the_report(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (rg.__version__, torch.__version__, "Versions", "Devices", "cuDNN", "cupy"):
        assert word in text
    table = text.split("Who serves what\n")[1].split("\n\n")[0].splitlines()
    assert table[0].split() == list(DTYPES)
    assert [line.strip().split("  ")[0] for line in table[2:]] == list(PROBES)
    assert "Served by no engine" not in text


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]):
    found = told(capsys)
    assert found["status"] == 0
    assert found["versions"]["torch"] == torch.__version__
    assert {(s["op"], s["dtype"]) for s in found["served"]} == {
        (op, dtype) for op in PROBES for dtype in DTYPES
    }
    for served in found["served"]:
        assert served["engines"]
        assert not served["trouble"]
        assert set(served["engines"]).isdisjoint(served["why_not"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says where there is no GPU")
def test_on_a_bare_cpu_torch_serves_all_and_the_others_say_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = told(capsys)
    for served in found["served"]:
        assert served["engines"] == ["torch"]
        reasons = " ".join(r for rules in served["why_not"].values() for r in rules)
        assert "needs a CUDA device, this is cpu" in reasons


def broken(*_: Any, **__: Any) -> Any:
    raise OSError("libcuda.so.1: cannot open\nshared object file")


@pytest.mark.parametrize(
    "target",
    [
        "torch.backends.cudnn.version",
        "torch.cuda.device_count",
        "torch.cuda.is_available",
        "ropegraph.cli.doctor.facts._libraries",
        "ropegraph.cli.doctor.facts.find_spec",
        "ropegraph.cli.doctor.facts.processor",
        "subprocess.run",
        "platform.platform",
    ],
)
def test_what_breaks_is_a_line_of_the_report(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "find_spec", lambda name: object())
    monkeypatch.setattr(target, broken)
    status = main(["doctor"])
    out, err = capsys.readouterr()
    assert status in (0, 1)
    assert err == ""
    assert "Who serves what" in out
    failed = [line for line in out.splitlines() if "failed: OSError" in line]
    assert target == "torch.cuda.is_available" or failed, out


def test_a_package_that_wants_to_end_the_process_is_a_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(probes.PROBES, "sdpa", lambda _: sys.exit("no driver"))
    assert main(["doctor"]) == 1
    assert "sdpa bf16: failed: SystemExit: no driver" in capsys.readouterr().out


def test_an_operation_that_nobody_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(probes.PROBES, "sdpa", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "Served by no engine" in out
    assert "sdpa bf16: failed: OSError: libcuda.so.1: cannot open shared object file" in out


def module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the doctor says of a module ``cupy`` that holds ``text``."""
    (folder / "cupy.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return facts._module("cupy")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__version__ = '13.6.0'", "imports, version 13.6.0"),
        ("raise ImportError('libnvrtc.so.13 not found')", "broken: ImportError: libnvrtc.so.13"),
        ("import os; os.abort()", "broken: exit status -6"),
        ("import sys; sys.exit(3)", "broken: exit status 3"),
        ("import sys; sys.exit('no driver')", "broken: no driver"),
        ("raise RuntimeError('two\\nlines')", "broken: RuntimeError: two lines"),
        ("print('hello')\n__version__ = '13.6.0'", "imports, version 13.6.0"),
        ("import os; os.write(1, b'\\xff\\xfe'); __version__ = '1'", "imports, version 1"),
        ("__version__ = input()", "broken: EOFError"),
        ("def (", "broken: SyntaxError"),
        ("", "imports, version unknown"),
    ],
)
def test_a_broken_module_ends_another_process(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module(tmp_path, text, monkeypatch).startswith(said)


def test_libraries_are_looked_for_where_loaders_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcudnn.so.9").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert str(tmp_path / "libcudnn.so.9") in facts._libraries()  # pyright: ignore[reportPrivateUsage]


def test_reasons_are_said_once():
    same = {"cuda.rope": ("needs a CUDA device",)}
    served = [Served(op, dtype, ("torch",), same) for op in PROBES for dtype in DTYPES]
    text = command._text({}, served)  # pyright: ignore[reportPrivateUsage]
    assert text.count("needs a CUDA device") == 1
    assert f"(rope f16, rope bf16, rope f32, rope f64 and {len(served) - 4} more)" in text


def test_nothing_of_cuda_is_imported_by_asking():
    code = (
        "import sys; from ropegraph.__main__ import main; main(['doctor']);"
        "print([n for n in sys.modules if n.split('.')[0] in ('cupy', 'cudnn')], file=sys.stderr)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    if not torch.cuda.is_available():
        assert run.stderr.strip() == "[]"
