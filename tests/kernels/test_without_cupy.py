"""Where CuPy is missing, a rotation goes to the next engine, and the reason is kept."""

import pytest

from ropegraph.compile import Lowered, compile_plan, lower
from ropegraph.engines.cuda_rope import compiler, cupy_types
from ropegraph.errors import UnsupportedError
from ropegraph.lowering.engine import Device
from tests.ir.build import Build

H200 = Device("cuda", 0, 90, 91900)


def missing(name: str) -> None:
    raise ImportError(f"No module named {name!r}")


def lowered(engines: tuple[str, ...] | None = None) -> Lowered:
    b = Build()
    b.tensor("x", 2, 6, 5, 8)
    b.rope("turn", "x", "y")
    return lower(b.graph("y"), H200, engines)


@pytest.fixture(autouse=True)
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_types, "import_module", missing)
    compiler.load.cache_clear()


def test_torch_takes_over():
    before = lowered()
    assert [s.engine for s in before.plan.steps] == ["cuda.rope"]
    after, runnable = compile_plan(before)
    assert [s.engine for s in after.plan.steps] == ["torch"]
    assert len(runnable.executables) == 1
    (reason,) = after.why_not("cuda.rope")["turn"]
    assert "CuPy cannot be imported (No module named 'cupy')" in reason


def test_by_name_it_raises():
    with pytest.raises(UnsupportedError, match="CuPy cannot be imported") as caught:
        compile_plan(lowered(("cuda.rope",)))
    assert caught.value.__cause__ is not None
