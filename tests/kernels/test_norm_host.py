"""norm_rope.cu run on the CPU under sanitizers, against fp64."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ropegraph.engines.cuda_rope import norm_shape
from ropegraph.ir.ops import NormRope
from tests.kernels import norm_host
from tests.kernels.cases import Case
from tests.kernels.norm_cases import Plan, check, expected, made, pair

# Each tuple is one program: few variants, since it is compiling them that takes the time.
FORWARD = (
    Plan(1),
    Plan(2, r=32, d=64, positions="ids", source="cos_sin"),
    Plan(3, norm_first=False, r=128, d=128, dim=(1, 9, 3)),
    Plan(4, whole=True, dim=(2, 5, 3)),
    Plan(5, whole=True, norm_first=False, r=32, d=48),
    Plan(6, norm_first=False, r=6, d=7),
    Plan(7, r=96, d=96, mixed=True),
    Plan(8, r=64, d=192, dim=(1, 2, 3)),
)
SEQUENCES = (
    Plan(9, positions="packed", dim=(1, 3, 6)),
    Plan(10, positions="packed", dim=(1, 3, 6), norm_first=False, source="inv_freq"),
    Plan(11, positions="packed", dim=(1, 3, 6), whole=True, r=32, d=64, source="cos_sin"),
    Plan(12, positions="starts", source="inv_freq", r=40, d=40),
)
WIDE = (
    Plan(13, r=512, d=512, dim=(1, 2, 2)),
    Plan(12, r=256, d=256, dim=(1, 2, 2)),
    Plan(14, r=64, d=512, dim=(1, 3, 2), norm_first=False),
    Plan(15, r=256, d=510, dim=(1, 2, 2)),
)


def run_and_check(cases: list[tuple[str, Case]], where: Path) -> list[tuple[str, ...]]:
    wants = [expected(given) for _, given in cases]
    taken = norm_host.run([given for _, given in cases], where)
    for (what, given), want in zip(cases, wants, strict=True):
        check(given, want, what)
    return taken


def of(*plans: Plan) -> list[tuple[str, Case]]:
    return [(str(plan), made(plan)) for plan in plans]


def both_bases(plans: tuple[Plan, ...]) -> list[tuple[str, Case]]:
    """The plans, and again on bases that are off 16 bytes."""
    return of(*plans, *(replace(plan, shift=1) for plan in plans))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("plans", [FORWARD[:4], FORWARD[4:], SEQUENCES, WIDE])
def test_against_fp64(plans: tuple[Plan, ...], backward: bool, tmp_path: Path):
    if backward and plans is WIDE:
        # Narrower ones: norm_sum has a block of 32 warps for every eight channels.
        plans = (Plan(14, r=64, d=264, norm_first=False),)
    # The gradient over all heads has a file of its own.
    plans = tuple(replace(p, backward=backward) for p in plans if not (backward and p.whole))
    taken = run_and_check(both_bases(plans), tmp_path)
    kernels = {name for names in taken for name in names}
    assert {"norm_vector", "norm_any"} <= kernels
    assert ("norm_sum" in kernels) is backward


@pytest.mark.parametrize("backward", [False, True])
def test_q_and_k_in_one_launch(backward: bool, tmp_path: Path):
    cases = []
    for number, whole, norm_first in ((1, False, True), (4, True, True), (16, False, False)):
        plan = Plan(number, backward, norm_first, whole, dim=(2, 6, 5))
        first = made(plan)
        second = made(replace(plan, dim=(2, 2, 5)))
        op = first.step.node.attrs
        if isinstance(op, NormRope):
            rope = replace(op.rope, output_scale=0.7)
            cases.append((str(plan), pair(first, with_op(second, replace(op, rope=rope)))))
        else:
            cases.append((str(plan), pair(first, second)))
    run_and_check(cases, tmp_path)


def with_op(given: Case, op: NormRope) -> Case:
    node = replace(given.step.node, attrs=op)
    return Case(replace(given.step, node=node), given.env)


def test_the_grid_and_the_share_of_a_warp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Long tensors, and backward warps that go on from token to token."""
    monkeypatch.setattr(norm_shape, "TOTAL_WARPS", 6)
    monkeypatch.setattr(norm_shape, "MANY_WARPS", 8)
    monkeypatch.setattr(norm_shape, "LOG_GROUP", 2)
    plans = (Plan(1, dim=(3, 9, 17)), Plan(1, True, dim=(3, 9, 17)), Plan(1, True, dim=(3, 1, 33)))
    run_and_check(of(*plans), tmp_path)


def test_every_warp_that_adds_up_counts(tmp_path: Path):
    """More rows of sums than the 32 warps of norm_sum take at once."""
    run_and_check(of(Plan(1, True, r=8, d=8, dim=(290, 1, 1), source="inv_freq")), tmp_path)


@pytest.mark.parametrize("norm_first", [False, True])
def test_rows_whose_squares_overflow_and_rows_of_zeros(norm_first: bool, tmp_path: Path):
    rng = random.Random(1)
    cases = []
    for number, large in ((0, 1e30), (1, 65504.0), (2, 3e38)):
        for whole in (False, True):
            given = made(Plan(number, norm_first=norm_first, whole=whole))
            x = given.at("input")
            if x.dtype is torch.float16:
                large = 65504.0
            large = min(large, 1e38 if norm_first else 1e37)
            x[0, rng.randrange(3)] *= large / 8
            x[-1, :, 2:4] = 0.0
            x[-1, :, 4] *= 1e-20 if x.dtype is not torch.float16 else 1.0
            cases.append((f"{number} {large} {whole}", given))
    run_and_check(cases, tmp_path)
    assert all(bool(c.at("output").isfinite().all()) for _, c in cases)


def test_tiny_rows_count_where_epsilon_is_nothing(tmp_path: Path):
    cases = []
    for whole in (False, True):
        given = made(Plan(3, whole=whole, r=64, d=64, dim=(2, 3, 5)))
        given.at("input").mul_(1e-25)
        op = given.step.node.attrs
        tiny = replace(op, norm=replace(op.norm, epsilon=0.0))
        cases.append((f"whole={whole}", with_op(given, tiny)))
    assert cases[0][1].at("input").dtype is not torch.float16
    run_and_check(cases, tmp_path)


@pytest.mark.parametrize("norm_first", [True, False])
def test_padding_poisons_nothing(norm_first: bool, tmp_path: Path):
    """C18: NaN where nothing comes back, and in rows of no sequence, stays out."""
    cases = []
    for number, positions, dead in ((10, "packed", slice(5, 6)), (2, "rows", slice(3, 5))):
        dim = (1, 3, 6) if positions == "packed" else (2, 5, 6)
        plan = Plan(number, True, norm_first, r=32, d=48, dim=dim, positions=positions)
        given = made(plan)
        for port in ("input", "inv_variance"):
            given.at(port)[:, :, dead] = torch.nan
        given.at("input")[-1, :, 4] = torch.inf
        given.at("inv_variance")[-1, :, 4] = 0.0
        # A row of zeros, without an epsilon.
        given.at("input")[0, 0, 4], given.at("inv_variance")[0, 0, 4] = 0.0, torch.inf
        # A norm behind a rotation knows of no sequences: a gradient of theirs would count.
        given.at("dY")[:, :, 3 : 5 if norm_first else 6] = 0.0
        cases.append((str(plan), given))
    run_and_check(cases, tmp_path)
    assert all(bool(given.at(p).isfinite().all()) for _, given in cases for p in given.written)


def test_a_position_outside_of_the_table_gives_nan_and_a_flag(tmp_path: Path):
    cases = []
    for number, norm_first in ((2, True), (2, False)):
        given = made(Plan(number, False, norm_first, False, 32, 64, "cos_sin", "ids"))
        given.at("position_ids")[1, 2] = 1000
        cases.append(given)
    norm_host.run(cases, tmp_path)
    for given in cases:
        assert int(given.flag) == 4
        assert bool(given.at("output")[1, :, 2].isnan().all())
        assert not bool(given.at("output")[0].isnan().any())
