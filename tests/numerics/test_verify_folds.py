"""verify() on 1,000 wrong folds and 1,000 right ones made by hand, and on what engines make."""

import random
from typing import Any

import pytest

from ropegraph.api.contract_check import ScaleCheck
from tests.numerics.fold_trials import Case, Wrong, random_case, random_delta

CASES, TRIALS = 25, 10
# Of these, two leave the product right, and only the raw rows can tell.
WRONG: tuple[Wrong, ...] = ("q", "k", "stats", "split", "both")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_wrong_folds_are_caught_and_right_ones_pass(seed: int):
    rng = random.Random(seed)
    missed: list[Any] = []
    for case in [random_case(rng) for _ in range(CASES)]:
        for i in range(TRIALS):
            pack, raw = case.pack(rng, "", 0.0)
            found = case.backward.verify(pack, raw=raw)
            assert not found.wrong_scales, f"a right fold was flagged: {about(case)}\n{found}"
            assert all(is_told(s) for s in found.scales), f"{about(case)}\n{found}"
            wrong, delta = WRONG[i % len(WRONG)], random_delta(rng, case)
            pack, raw = case.pack(rng, wrong, delta)
            given = raw if wrong in ("split", "both") else None
            found = case.backward.verify(pack, raw=given)
            if not found.wrong_scales:
                missed.append((wrong, delta / case.unit, about(case), str(found)))
    assert not missed


@pytest.mark.slow
def test_what_the_engine_makes_is_never_flagged():
    rng = random.Random(7)
    for _ in range(60):
        case = random_case(rng)
        ahead, behind, raw = case.made_by_engine(rng)
        for found in (case.forward.verify(ahead), case.backward.verify(behind, raw=raw)):
            assert found.is_ok, f"{about(case)}\n{found}"
            assert [is_told(s) for s in found.scales] == [True, True, True]


def is_told(scale: ScaleCheck) -> bool:
    return scale.is_sharp and not scale.unchecked


def about(case: Case) -> Any:
    sizes = case.b, case.h_q, case.h_kv, case.s_q, case.s_kv, case.d, case.rotated
    return case.dtype, case.settings, sizes, case.attn_scale, case.mask
