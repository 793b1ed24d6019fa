"""What the kernels compute of data does not flush subnormal numbers, as CuPy compiles them."""

import pytest

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.kind import NUMERICS, Kind
from ropegraph.engines.cuda_rope.mla import Mode
from ropegraph.engines.cuda_rope.mla_variant import MlaVariant
from ropegraph.engines.cuda_rope.variant import Variant
from tests.kernels.nvrtc import ptx_as_cupy_makes_it


def flushing(ptx: str) -> list[str]:
    """Instructions that flush what they compute; scales are compared with 1, which is none."""
    lines = (line.strip() for line in ptx.splitlines())
    return [line for line in lines if ".ftz" in line and not line.startswith("setp.")]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.HALF, DType.FLOAT])
def test_rotations_by_a_table(dtype: DType, numerics: str) -> None:
    kind = Kind(dtype, dtype, source="tables", table=DType.FLOAT, numerics=numerics)
    text = ptx_as_cupy_makes_it(Variant(kind, True, 16 // dtype.itemsize, 2, 4))
    assert "fma.rn.f32" in text or "mul.rn.f32" in text
    assert not flushing(text)


@pytest.mark.parametrize("mode", Mode)
def test_mla(mode: Mode) -> None:
    text = ptx_as_cupy_makes_it(MlaVariant(mode, DType.BFLOAT16, DType.FLOAT, 8))
    assert not flushing(text)
