"""Every kind of variant of rope.cu compiles on every architecture; the fast path spills nothing.

The product of all macros is thousands of variants. Each value of each macro is compiled, each pair
of dtypes with each pair of layouts, and the usual variants for every architecture.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.kind import (
    NUMERICS,
    POSITIONS,
    SEQUENCES,
    SOURCES,
    Kind,
)
from ropegraph.engines.cuda_rope.variant import Variant
from tests.kernels.nvrtc import compile_variant

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
DTYPES = (DType.BFLOAT16, DType.HALF, DType.FLOAT)
LAYOUTS = ((False, False), (True, True), (True, False), (False, True))
INDEXES = (None, None, DType.INT32, DType.INT64)


def widest(read: DType, written: DType) -> int:
    return 16 // min(read.itemsize, written.itemsize)


def usual() -> Iterator[tuple[str, Variant]]:
    """Rotations of one dtype and layout, dense or ragged, whole or partial, everywhere."""
    for arch, dtype, (passes, index) in itertools.product(
        ARCHS, DTYPES, ((False, None), (True, None), (True, DType.INT32))
    ):
        warps = 4 if passes else 1
        # bf16 everywhere, the others where it is their turn.
        if dtype is not DType.BFLOAT16 and DTYPES[ARCHS.index(arch) % 3] is not dtype:
            continue
        vec = widest(dtype, dtype)
        kind = Kind(dtype, dtype, sequences="ragged" if index else "dense")
        yield arch, Variant(kind, passes, vec, 2, warps)


def mixed() -> Iterator[tuple[str, Variant]]:
    """Each pair of dtypes with each pair of layouts; everything else in turn."""
    for i, ((read, written), layout) in enumerate(
        itertools.product(itertools.product(DTYPES, DTYPES), LAYOUTS)
    ):
        # Half of them, in a pattern that leaves each pair of dtypes and each layout in.
        if (i // 4 + i % 4) % 2:
            continue
        vec = max(1, widest(read, written) >> i % 5 % 4)
        angles = min(vec, 1 << i % 4)
        full, passes, index = bool(i // 2 % 2), bool(i // 3 % 2), INDEXES[i % 4]
        kind = Kind(read, written, *layout, full)
        if index is not None:
            kind = replace(kind, sequences="ragged", index=index)
        groups = index is None and i // 4 % 2 == 1
        yield ARCHS[i % 4], Variant(kind, passes, vec, angles, 1 if i % 3 else 4, groups)


def placed() -> Iterator[tuple[str, Variant]]:
    """Each source with each kind of positions and of sequences; everything else in turn."""
    for i, (source, position, sequences) in enumerate(
        itertools.product(SOURCES, POSITIONS, SEQUENCES)
    ):
        read, written = DTYPES[i % 3], DTYPES[i // (3 if i % 4 else 1) % 3]
        has_table = source in ("freqs", "tables")
        kind = Kind(
            read, written, *LAYOUTS[i // 3 % 4], has_table and i % 2 == 1,
            source, DTYPES[i // 3 % 3] if source == "tables" else DType.FLOAT,
            position, INDEXES[2 + i % 2] or DType.INT32,
            sequences, INDEXES[2 + i // 2 % 2] or DType.INT32,
            NUMERICS[i % 3] if source == "tables" else "fp32",
        )  # fmt: skip
        vec = widest(read, written)
        passes = bool(i // 2 % 2)
        yield ARCHS[i % 4], Variant(kind, passes, vec, min(vec, 1 << i % 4), 4 if i % 3 else 1)


def cached() -> Iterator[tuple[str, Variant]]:
    """Into caches: what decoding takes, every type of rows, and what turns nothing at all."""
    plain = Kind(DType.BFLOAT16, DType.BFLOAT16)
    starts = replace(plain, position="chunks")
    ids = Kind(
        DType.HALF, DType.HALF, True, True, source="tables", table=DType.HALF, position="ids",
        id=DType.INT64,
    )  # fmt: skip
    exact = Kind(DType.FLOAT, DType.BFLOAT16, source="exact", position="chunks")
    for arch, kind, passes, vec, groups, cache in (
        ("sm_90", starts, True, 8, False, DType.INT32),
        ("sm_100", starts, False, 8, False, DType.INT64),
        ("sm_80", ids, True, 8, True, DType.INT64),
        ("sm_120", exact, True, 4, False, DType.INT32),
        ("sm_90", plain, True, 8, False, DType.INT32),
    ):
        yield arch, Variant(kind, passes, vec, 2, 4, groups, cache)


@pytest.mark.parametrize("plan", [usual, mixed, placed, cached])
def test_compiles_without_spills(
    plan: Callable[[], Iterator[tuple[str, Variant]]],
    record_property: Callable[[str, object], None],
) -> None:
    for arch, variant in plan():
        found = compile_variant(variant, arch)
        expected = {"rope_any", "rope_vector"} if variant.vec > 1 else {"rope_any"}
        assert set(found) == expected, f"{variant} on {arch}"
        for name, resources in found.items():
            record_property(f"{arch} {name} {' '.join(variant.options)}", str(resources))
            assert not resources.shared, f"{name}, {variant} on {arch}: {resources}"
        if variant.vec > 1:
            fast = found["rope_vector"]
            assert fast.registers <= 128, f"{variant} on {arch}: {fast}"
            assert not fast.spill, f"{variant} on {arch}: {fast}"


def test_the_plans_name_every_value_of_every_macro() -> None:
    seen: dict[str, set[str]] = {}
    for _, variant in itertools.chain(usual(), mixed(), placed(), cached()):
        for name, value in variant.macros.items():
            seen.setdefault(name, set()).add(value)
    types = {"__nv_bfloat16", "__half", "float"}
    assert seen["ROPE_IN"] == types
    assert seen["ROPE_OUT"] == types
    assert seen["ROPE_TABLE"] == types
    for flag in ("READ_PAIRS", "WRITE_PAIRS", "FULL", "PASS", "GROUPS", "CACHE"):
        assert seen[f"ROPE_{flag}"] == {"0", "1"}
    for choice in ("POSITION", "SEQUENCES", "NUMERICS"):
        assert seen[f"ROPE_{choice}"] == {"0", "1", "2"}
    assert seen["ROPE_SOURCE"] == {"0", "1", "2", "3"}
    assert seen["ROPE_INDEX"] == seen["ROPE_ID"] == seen["ROPE_ROW"] == {"int", "long long"}
    assert seen["ROPE_VEC"] == {"1", "2", "4", "8"}
    assert seen["ROPE_ANGLES"] == {"1", "2", "4", "8"}
