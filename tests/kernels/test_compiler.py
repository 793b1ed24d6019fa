"""What loads the kernels of each source file, with a CuPy that writes down what it is asked."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope import compiler
from ropegraph.engines.cuda_rope.kind import Kind
from ropegraph.engines.cuda_rope.mla import Mode
from ropegraph.engines.cuda_rope.mla_variant import MlaVariant
from ropegraph.engines.cuda_rope.variant import Variant
from tests.kernels.test_norm_nvrtc import USUAL

BF16 = DType.BFLOAT16


class Cupy:
    """Every kernel that is asked for gets the next number."""

    def __init__(self) -> None:
        self.modules: list[dict[str, Any]] = []
        self.names: list[str] = []
        driver = SimpleNamespace(ctxGetCurrent=lambda: 77)
        self.cuda = SimpleNamespace(driver=driver, Device=nullcontext)

    def RawModule(self, **given: Any) -> Any:
        self.modules.append(given)

        def get_function(name: str) -> Any:
            self.names.append(name)
            return SimpleNamespace(kernel=SimpleNamespace(ptr=len(self.names)))

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    made = Cupy()
    monkeypatch.setattr(compiler, "import_cupy", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    compiler.load.cache_clear()
    return made


@pytest.mark.parametrize("vec", [8, 1])
def test_rope_and_mla(cupy: Cupy, vec: int) -> None:
    for word, variant in (
        ("rope", Variant(Kind(BF16, BF16), False, vec, 1, 4)),
        ("mla", MlaVariant(Mode.FORWARD, BF16, BF16, vec)),
    ):
        cupy.names.clear()
        loaded = compiler.load(variant, 0)
        assert cupy.names == ([f"{word}_vector"] if vec > 1 else []) + [f"{word}_any"]
        assert loaded.kernels == {name: i + 1 for i, name in enumerate(cupy.names)}
        assert loaded.context == 77
        given = cupy.modules[-1]
        assert given["options"] == variant.options
        assert f"{word}_any" in given["code"]
        assert compiler.load(variant, 0) is loaded, "once per variant and GPU"


@pytest.mark.parametrize("is_backward", [False, True])
def test_norm(cupy: Cupy, is_backward: bool) -> None:
    variant = next(v for v in USUAL if v.is_backward is is_backward and v.vec > 1)
    loaded = compiler.load(variant, 0)
    assert variant.kernels == ("norm_vector", "norm_any", *(("norm_sum",) if is_backward else ()))
    assert loaded.kernels == {name: i + 1 for i, name in enumerate(variant.kernels)}
    assert "norm_any" in cupy.modules[-1]["code"]
