"""verify() on 1,000 wrong folds and 1,000 right ones made by hand, and on what engines make."""

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.api.contract_check import ScaleCheck
from ropegraph.testing import oracle
from ropegraph.testing.inputs import normal
from tests.api.graphs import buffers
from tests.numerics.fold_trials import (
    DTYPES,
    SETTINGS,
    Case,
    Wrong,
    random_case,
    random_delta,
)

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


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "all alike": lambda x: torch.full_like(x, 0.7371),
    "tiny": lambda x: 3e-5 * x,
    "large": lambda x: 30 * x,
    "ones and zeros": lambda x: (x > 1.5).float(),
    "spiky": lambda x: x**5,
}
# b, h_q, h_kv, s_q, s_kv, d
SIZES = ((1, 1, 1, 1, 1, 8), (1, 2, 1, 1, 40, 16), (2, 4, 2, 33, 33, 32), (1, 1, 1, 3, 2, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_right_folds_of_unkind_numbers_are_never_flagged(kind: str, dtype: torch.dtype):
    make = KINDS[kind]
    for (b, h_q, h_kv, s_q, s_kv, d), settings in product(SIZES, SETTINGS[1:]):
        for attn_scale in (0.01, 3.0):
            g = rg.pygraph(io_data_type=dtype, **settings)
            q = g.tensor((b, h_q, s_q, d), name="q")
            k, v = (g.tensor((b, h_kv, s_kv, d), name=n) for n in "kv")
            half = oracle.angles(max(s_q, s_kv), d)
            freqs = torch.cat([half, half], 1)[:, None, None, :]
            f = g.tensor(freqs.shape, data_type=torch.float32, name="f")
            o, stats = g.sdpa(
                g.rope(q, f).set_name("q_rot"), g.rope(k, f).set_name("k_rot"), v, attn_scale
            )
            o.set_output(True).set_name("o"), stats.set_name("stats")
            back = g.backward_graph(outputs=[o], inputs=[q, k, v])
            ahead = buffers(g) | {"f": freqs}
            for name in "qk":
                ahead[name] = make(normal(ahead[name].shape, seed=len(name))).to(dtype)
            behind = buffers(back)
            found = [g.verify(ahead)]
            behind |= {name: ahead[name] for name in back.saved}
            found.append(back.verify(behind, raw={"q_rot": ahead["q"], "k_rot": ahead["k"]}))
            for one in found:
                assert not one.wrong_scales, f"{settings} {attn_scale}\n{one}"
