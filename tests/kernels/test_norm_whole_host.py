"""The gradient of a norm over all heads of a token, on the CPU under sanitizers, against fp64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropegraph.engines.cuda_rope import norm_shape
from ropegraph.engines.cuda_rope.norm import norm_jobs
from ropegraph.engines.cuda_rope.norm_shape import widest_vector
from tests.kernels import norm_host
from tests.kernels.cases import Case, bits
from tests.kernels.norm_cases import Plan, made, pair
from tests.kernels.test_norm_host import both_bases, of, run_and_check

# Each tuple is one program. Narrow: norm_sum has a block of 32 warps for every eight channels.
PLANS = (
    Plan(4, True, whole=True, dim=(2, 5, 3), r=32, d=32),
    Plan(6, True, whole=True, norm_first=False, r=16, d=24, source="inv_freq"),
    Plan(2, True, whole=True, r=32, d=48, positions="ids", source="cos_sin", dim=(2, 9, 3)),
    Plan(7, True, whole=True, norm_first=False, r=16, d=16, mixed=True, dim=(2, 21, 2)),
)
ODD = (
    Plan(13, True, whole=True, r=6, d=7),
    Plan(10, True, whole=True, norm_first=False, r=10, d=10, dim=(3, 2, 5)),
    Plan(9, True, whole=True, positions="packed", dim=(1, 3, 6), r=16, d=32),
    Plan(8, True, whole=True, norm_first=False, positions="packed", dim=(1, 5, 6), r=16, d=16),
    Plan(18, True, whole=True, positions="starts", source="inv_freq", r=96, d=96, dim=(2, 2, 3)),
)


@pytest.mark.parametrize("plans", [PLANS, ODD])
def test_against_fp64(plans: tuple[Plan, ...], tmp_path: Path):
    taken = run_and_check(both_bases(plans), tmp_path)
    assert {name for names in taken for name in names} == set(norm_host.KERNELS.values())
    assert all(len(names) == 3 for names in taken if "norm_sum" in names)


def test_without_one_of_the_gradients(tmp_path: Path):
    plans = (Plan(3, True, whole=True, r=16, d=16), Plan(5, True, whole=True, r=16, d=16))
    cases = of(*plans)
    assert [given.written for _, given in cases] == [["Dscale"], ["dX"]]
    first, second = run_and_check(cases, tmp_path)
    assert first[-1] == "norm_sum"
    assert len(second) == 2


def test_warps_that_go_on_from_token_to_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Q and K in one launch, few warps, heads that are no multiple of what a warp holds."""
    monkeypatch.setattr(norm_shape, "TOTAL_WARPS", 12)
    cases = []
    for number, norm_first in ((4, True), (11, False)):
        plan = Plan(number, True, norm_first, True, r=32, d=32, dim=(3, 19, 9))
        given = pair(made(plan), made(replace(plan, number=number + 24, dim=(3, 5, 9))))
        jobs = norm_jobs(given.step)
        shape = norm_shape.norm_shape(jobs, widest_vector(jobs))
        heads = shape.base.cuts[0].turn.heads
        assert 19 % heads != 0
        assert [cut.part_heads for cut in shape.base.cuts] == [heads, heads]
        assert all(1 < n < 27 for n in shape.warps)
        cases.append((str(plan), given))
    run_and_check(cases, tmp_path)


@pytest.mark.parametrize("norm_first", [True, False])
def test_padding_poisons_nothing(norm_first: bool, tmp_path: Path):
    """C18, as for each head by itself; where one head has a gradient, all heads count."""
    cases = []
    for number, positions, dead in ((11, "packed", slice(5, 6)), (2, "rows", slice(3, 5))):
        dim = (1, 3, 6) if positions == "packed" else (2, 5, 6)
        plan = Plan(number, True, norm_first, True, r=16, d=24, dim=dim, positions=positions)
        given = made(plan)
        for port in ("input", "inv_variance"):
            given.at(port)[:, :, dead] = torch.nan
        given.at("input")[-1, :, 4] = torch.inf
        given.at("inv_variance")[-1, :, 4] = 0.0
        given.at("input")[-1, :, 3] = 0.0
        given.at("inv_variance")[-1, :, 3] = torch.inf
        given.at("dY")[:, :, 3 : 5 if norm_first else 6] = 0.0
        given.at("dY")[:, 1:, 0] = 0.0  # a token with a gradient of one head alone
        cases.append((str(plan), given))
    run_and_check(cases, tmp_path)
    assert all(bool(given.at(p).isfinite().all()) for _, given in cases for p in given.written)


def test_a_token_with_nan_and_a_gradient_of_one_head_is_nan_in_all(tmp_path: Path):
    given = made(Plan(2, True, whole=True, r=16, d=24, dim=(2, 5, 6)))
    given.at("input")[1, 2, 4] = torch.nan
    given.at("inv_variance")[1, :, 4] = torch.nan
    given.at("dY")[1, 1:, 4] = 0.0
    assert bool((given.at("dY")[1, 0, 4] != 0).any())
    run_and_check([("NaN", given)], tmp_path)
    dx = given.at("dX")
    assert bool(dx[1, :, 4].isnan().all())
    assert bool(dx[0].isfinite().all())


def test_two_runs_give_the_same_bits(tmp_path: Path):
    def once() -> Case:
        return made(Plan(4, True, whole=True, r=16, d=16, dim=(2, 9, 7)))

    first, second = once(), once()
    norm_host.run([first, second], tmp_path)
    for port in first.written:
        assert torch.equal(bits(first.at(port)), bits(second.at(port)))
