"""The launcher of norm_rope.cu on a driver that records, and what the engine declines."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.engines.cuda_rope.norm import norm_jobs
from ropegraph.engines.cuda_rope.norm_launch import SUM_THREADS
from ropegraph.engines.cuda_rope.norm_shape import norm_shape, widest_vector
from ropegraph.engines.cuda_rope.shape import MAX_X, MAX_YZ
from ropegraph.errors import InternalError
from ropegraph.lowering.engine import Device
from tests.kernels import norm_host
from tests.kernels.cases import Case, offset_by
from tests.kernels.norm_cases import Plan, made, pair

H200 = Device("cuda", 0, 90)


def launches(given: Case, env: list[Any] | None = None) -> list[Any]:
    driver = norm_host.Recorder()
    launch = norm_host.launcher(given.step, driver)
    scratch = torch.empty(launch.workspace_bytes, dtype=torch.uint8)
    launch([*(env or given.env), scratch], 7)
    return driver.launches


def test_one_launch_forward_and_a_small_second_one_for_the_weight():
    (only,) = launches(made(Plan(1)))
    assert (only.function, only.stream) == (1, 7)
    main, last = launches(made(Plan(1, backward=True)))
    assert (main.function, last.function, last.threads) == (1, 3, SUM_THREADS)
    assert last.grid == (8, 1, 1)
    without = made(Plan(5, backward=True, dim=(2, 3, 5)))
    assert not without.step.has("Dscale")
    assert len(launches(without)) == 1
    both = pair(made(Plan(1, backward=True)), made(Plan(1, backward=True, dim=(2, 1, 5))))
    assert [each.function for each in launches(both)] == [1, 3]


def test_over_all_heads_the_gradient_has_a_launch_before_it_with_a_warp_a_token():
    plan = Plan(1, backward=True, whole=True, dim=(2, 6, 5))
    mean, main, last = launches(made(plan))
    assert [each.function for each in (mean, main, last)] == [4, 1, 3]
    assert mean.threads == main.threads
    assert mean.grid[0] * mean.threads // 32 >= 2 * 5
    assert last.grid == (6 * 64 // 8, 1, 1)
    both = pair(made(plan), made(replace(plan, dim=(2, 2, 5))))
    assert [each.function for each in launches(both)] == [4, 1, 3]
    assert launches(both)[-1].grid == (8 * 64 // 8, 1, 1)
    assert [each.function for each in launches(made(replace(plan, shift=1)))] == [5, 2, 3]
    without = made(replace(plan, number=5))
    assert not without.step.has("Dscale")
    assert [each.function for each in launches(without)] == [4, 1]


def test_a_base_off_16_bytes_takes_the_other_kernel():
    given = made(Plan(1))
    for port in ("input", "output", "scale"):
        env = list(given.env)
        slot = given.step.slot(port)
        env[slot] = offset_by(env[slot], 1)
        assert [each.function for each in launches(given, env)] == [2], port


@pytest.mark.parametrize("dim", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_nothing_to_do(dim: tuple[int, int, int]):
    given = made(replace(Plan(1, source="inv_freq"), dim=dim))
    assert not norm_host.active(given.step)
    last = launches(made(replace(Plan(1, True, source="inv_freq"), dim=dim)))[-1]
    assert last.function == 3, "a gradient of nothing is zero, and has to be written"
    whole = launches(made(replace(Plan(1, True, whole=True, source="inv_freq"), dim=dim)))
    # Without heads it has no elements either.
    assert [each.function for each in whole] == ([3] if dim[1] else [])


def test_the_grid_stays_within_limits_and_few_sums_are_left():
    given = made(Plan(1))
    big = {"input": (70000, 32, 40, 64), "output": (70000, 32, 40, 64)}
    values = {
        name: replace(v, dim=big[name], stride=(32 * 40 * 64, 64, 32 * 64, 1)) if name in big else v
        for name, v in given.step.values.items()
    }
    driver = norm_host.Recorder()
    launch = norm_host.launcher(replace(given.step, values=values), driver)
    for kernel in (launch.fast, launch.slow):
        x, y, z = kernel.blocks
        assert x <= MAX_X
        assert y <= MAX_YZ
        assert z <= MAX_YZ
    given = made(Plan(1, backward=True))
    big = dict.fromkeys(("dY", "input", "dX"), (2, 32, 8192, 64))
    values = {
        name: replace(v, dim=big[name], stride=(32 * 8192 * 64, 64, 32 * 64, 1))
        if name in big
        else v
        for name, v in given.step.values.items()
    }
    launch = norm_host.launcher(replace(given.step, values=values), driver)
    assert launch.workspace_bytes <= 8192 * 64 * 4


def test_the_sums_over_all_heads_are_as_few():
    given = made(Plan(1, True, whole=True, dim=(1, 32, 2)))
    big = dict.fromkeys(
        ("dY", "input", "dX"), ((2, 32, 8192, 64), (32 * 8192 * 64, 64, 32 * 64, 1))
    )
    big["inv_variance"] = (2, 1, 8192, 1), (8192, 8192, 1, 1)
    values = {
        name: replace(v, dim=big[name][0], stride=big[name][1]) if name in big else v
        for name, v in given.step.values.items()
    }
    launch = norm_host.launcher(replace(given.step, values=values), norm_host.Recorder())
    means = 4 * 2 * 8192
    # A row of sums holds the heads of all parts; without vectors a part is one head.
    assert launch.fast.scratch_bytes - means <= 4224 * 8 * 64 * 4
    assert launch.slow.scratch_bytes - means <= 4224 * 64 * 4


def test_a_failed_launch_names_the_step(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(norm_host.Recorder, "launchKernel", fail)
    with pytest.raises(InternalError, match=r"cuda.rope could not launch 'fused'.*no room"):
        launches(made(Plan(1)))


def test_vectors_follow_from_strides_widths_and_the_weight():
    def vec(plan: Plan, **changed: Any) -> int:
        given = made(plan)
        values = {
            n: replace(v, **changed.get(n, {})) for n, v in given.step.values.items()
        }  # fmt: skip
        return widest_vector(norm_jobs(replace(given.step, values=values)))

    assert vec(Plan(2, r=32, d=64)) == 8 or vec(Plan(2, r=32, d=64)) == 4
    wide = vec(Plan(1))
    assert wide > 1
    assert vec(Plan(1), scale={"stride": (128, 128, 128, 2)}) == 1
    assert vec(Plan(1), input={"stride": (961, 320, 64, 1)}) == 1
    assert vec(Plan(6, r=6, d=7)) == 1


def test_lanes_of_a_row_are_a_power_of_two_and_hold_all_of_it():
    for plan in (Plan(1), Plan(7, r=96, d=96), Plan(8, r=64, d=192), Plan(14, r=64, d=512)):
        jobs = norm_jobs(made(plan).step)
        for width in (1, widest_vector(jobs)):
            shape = norm_shape(jobs, width)
            turn = shape.base.cuts[0].turn
            assert turn.lanes & (turn.lanes - 1) == 0
            assert turn.lanes * shape.turns * width >= plan.r // 2
            assert turn.lanes * shape.passes * width >= plan.d - plan.r
            assert (turn.lanes << turn.log_tokens) * turn.heads == 32


def why_not(given: Case, **changed: Any) -> str:
    values = {n: replace(v, **changed.get(n, {})) for n, v in given.step.values.items()}
    return "; ".join(CudaRope().why_not(replace(given.step, values=values), H200))


def test_what_is_served():
    for plan in (
        Plan(1), Plan(2, norm_first=False), Plan(4, whole=True), Plan(3, True), Plan(7, mixed=True),
        Plan(9, positions="packed", dim=(1, 3, 6)), Plan(2, positions="ids", source="cos_sin"),
        Plan(1, True, whole=True), Plan(4, True, norm_first=False, whole=True),
    ):  # fmt: skip
        assert CudaRope().why_not(made(plan).step, H200) == ()
    assert "needs a CUDA device" in str(CudaRope().why_not(made(Plan(1)).step, Device()))


@pytest.mark.parametrize(
    ("plan", "changed", "text"),
    [
        (Plan(1), {"input": {"dtype": DType.DOUBLE}}, "input is fp64, not fp16, bf16 or fp32"),
        (Plan(1), {"scale": {"dtype": DType.DOUBLE}}, "scale is fp64, not fp16, bf16 or fp32"),
        (Plan(1), {"freqs": {"dtype": DType.DOUBLE}}, "freqs is fp64, not fp32"),
        (Plan(1), {"inv_variance": {"dtype": DType.HALF}}, "inv_variance is fp16, not fp32"),
        (Plan(1, True), {"Dscale": {"dtype": DType.DOUBLE}}, "Dscale is fp64, not"),
        (Plan(1), {"scale": {"is_host": True}}, "scale is passed by value"),
        (Plan(1), {"input": {"dim": (2, 3, 5, 520)}}, "rows of more than 512 channels"),
        (Plan(1), {"input": {"dim": (2**20, 1, 2**12, 64)}}, "has 2^31 tokens or more"),
    ],
)
def test_reasons(plan: Plan, changed: dict[str, Any], text: str):
    assert text in why_not(made(plan), **changed)


def test_what_one_launch_cannot_vary():
    first = made(Plan(1))
    assert "what is normalised" in why_not(pair(first, made(Plan(1, whole=True))))
    other = replace(first.step.node.attrs, norm_first=False)
    node = replace(first.step.node, attrs=other)
    assert "what is normalised" in why_not(
        pair(first, Case(replace(first.step, node=node), first.env))
    )
    hf = replace(first.step.node.attrs, rope=replace(first.step.node.attrs.rope, numerics="hf"))
    node = replace(first.step.node, attrs=hf)
    text = why_not(Case(replace(first.step, node=node), first.env))
    assert "rounds between norm and rotation" in text
