"""Every variant of mla.cu compiles on every architecture; the fast path spills nothing."""

import itertools

import pytest

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.mla import TUNED, Mode
from ropegraph.engines.cuda_rope.mla_variant import MlaVariant
from tests.kernels.nvrtc import compile_variant

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
TABLES = (DType.BFLOAT16, DType.FLOAT)
DTYPES = (DType.BFLOAT16, DType.HALF, DType.FLOAT)


def variants(mode: Mode) -> list[MlaVariant]:
    found: list[MlaVariant] = []
    for tuning in (TUNED[mode, "heads"], TUNED[mode, "tokens"]):
        if mode is Mode.MXFP8:
            vecs = sorted({tuning.vec, 8, 1})
            found += [
                MlaVariant(mode, DType.BFLOAT16, t, v, tuning, turn=64, scales=80)
                for t in TABLES for v in vecs
            ]  # fmt: skip
            continue
        usual = itertools.product(DTYPES, TABLES)
        found += [MlaVariant(mode, d, t, 16 // d.itemsize, tuning) for d, t in usual]
        found += [MlaVariant(mode, DType.BFLOAT16, DType.FLOAT, vec, tuning) for vec in (4, 2, 1)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_spills(mode: Mode, arch: str, record_property) -> None:
    for i, variant in enumerate(variants(mode)):
        if i % 2 != ARCHS.index(arch) % 2 and mode is not Mode.MXFP8:
            continue
        found = compile_variant(variant, arch)
        assert set(found) == ({"mla_any", "mla_vector"} if variant.vec > 1 else {"mla_any"})
        for name, resources in found.items():
            record_property(f"{arch} {name} {' '.join(variant.options)}", str(resources))
            assert bool(resources.shared) is (name == "mla_vector" and mode is Mode.MXFP8)
            assert not resources.spill, f"{name}, {variant} on {arch}: {resources}"
            assert resources.registers <= 168, f"{name}, {variant} on {arch}: {resources}"
