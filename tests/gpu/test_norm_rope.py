"""norm_rope.cu on a GPU: the cases of the CPU tests, large sizes, determinism, whole graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph
from ropegraph import norm_forward_phase
from tests.gpu.test_cuda_rope import build, on_gpu
from tests.kernels import test_norm_host as plans
from tests.kernels import test_norm_whole_host as whole_plans
from tests.kernels.cases import Case
from tests.kernels.norm_cases import Plan, check, expected, made, pair

TRAINING = norm_forward_phase.TRAINING
BF16, F32 = torch.bfloat16, torch.float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def needs_cupy() -> None:
    pytest.importorskip("cupy")


def run(given: Case) -> tuple[Case, Any]:
    """The case on the GPU, and its executable."""
    exe = build(given)
    there = on_gpu(given)
    scratch = torch.full((exe.workspace_bytes,), 255, dtype=torch.uint8, device="cuda")
    exe([*there.env, scratch], torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return there, exe


def run_and_check(what: str, given: Case) -> None:
    want = expected(given)
    there, _ = run(given)
    check(Case(given.step, [t.cpu() for t in there.env]), want, what)


ALL = (*plans.FORWARD, *plans.SEQUENCES, *plans.WIDE)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("backward", [False, True])
def test_the_cases_of_the_cpu(backward: bool, shift: int):
    for plan in ALL:
        plan = replace(plan, backward=backward, shift=shift)
        run_and_check(str(plan), made(plan))


@pytest.mark.parametrize("shift", [0, 1])
def test_the_gradient_over_all_heads(shift: int):
    wide = (replace(plan, backward=True, whole=True) for plan in plans.WIDE)
    for plan in (*whole_plans.PLANS, *whole_plans.ODD, *wide):
        plan = replace(plan, shift=shift)
        run_and_check(str(plan), made(plan))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_q_and_k(backward: bool, whole: bool):
    for number in (1, 2, 3):
        plan = Plan(number, backward, whole=whole, r=128, d=128, dim=(2, 6, 37))
        given = pair(made(plan), made(replace(plan, dim=(2, 2, 37))))
        run_and_check(str(plan), given)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_large(whole: bool, norm_first: bool, backward: bool):
    """Many warps, many tokens a warp, and a sum over all of them."""
    plan = Plan(4, backward, norm_first, whole, r=128, d=128, dim=(2, 9, 1031))
    run_and_check(str(plan), made(plan))


@pytest.mark.parametrize("whole", [False, True])
def test_two_runs_give_the_same_bits(whole: bool):
    given = made(Plan(4, True, whole=whole, r=128, d=128, dim=(2, 9, 2048)))
    first, _ = run(given)
    second, _ = run(given)
    for port in given.written:
        assert torch.equal(first.at(port), second.at(port))


def test_more_batch_entries_than_a_grid_is_wide():
    """C14."""
    for backward in (False, True):
        for whole in (False, True):
            dim = (65537, 2 if whole else 1, 1)
            plan = Plan(4, backward, whole=whole, r=8, d=8, dim=dim, source="inv_freq")
            run_and_check(str(plan), made(plan))


def test_a_wrong_position_is_a_fault():
    given = made(Plan(2, r=32, d=64, source="cos_sin", positions="ids"))
    given.at("position_ids")[1, 2] = 1000
    there, exe = run(given)
    assert exe.faults()
    assert bool(there.at("output")[1, :, 2].isnan().all())


def graph(norm_first: bool, whole: bool, **settings: Any) -> ropegraph.pygraph:
    b, h, h_kv, s, d = 2, 8, 2, 129, 128
    g = ropegraph.pygraph(io_data_type=BF16, **settings)
    q, k, v = (g.tensor((b, n, s, d), (s * n * d, d, n * d, 1), name=name)
               for name, n in (("q", h), ("k", h_kv), ("v", h_kv)))  # fmt: skip
    f = g.tensor((s, 1, 1, d), data_type=F32, name="f")
    made_: list[Any] = []
    for x, name, n in ((q, "q", h), (k, "k", h_kv)):
        w = g.tensor((1, n if whole else 1, 1, d), name=f"w{name}")
        if norm_first:
            y = g.rope(g.rmsnorm(TRAINING, x, w, name=f"norm_{name}")[0], f, name=f"rope_{name}")
        else:
            y = g.rmsnorm(TRAINING, g.rope(x, f, name=f"rope_{name}"), w, name=f"norm_{name}")[0]
        made_.append(y)
    o, _ = g.sdpa(*made_, v, attn_scale=d**-0.5, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o")
    return g


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_graph_with_attention(norm_first: bool, whole: bool):
    """Two steps each way, and the numbers of torch alone."""
    found: dict[str, dict[str, Tensor]] = {}
    for engines in (None, "torch"):
        g = graph(norm_first, whole, engines=engines)
        b = g.backward_graph(["o"], ["q", "k", "v", "wq", "wk"])
        if engines is None:
            assert g.plan.steps[0].engine == "cuda.rope", g.explain()
            assert len(g.plan.steps) == 2
            assert b.plan.steps[-1].engine == "cuda.rope", b.explain()
            assert len(b.plan.steps) == 2
        pack: dict[str, Tensor] = {}
        for x in (g, b):
            ir = x.plan.graph
            for name in (*ir.inputs, *ir.outputs):
                value = ir.values[name]
                if name in pack:
                    continue
                dtype = getattr(torch, value.dtype.torch_name)
                store = torch.empty_strided(value.dim, value.stride, dtype=dtype, device="cuda")
                if name in ir.inputs:
                    seed = torch.Generator().manual_seed(sum(map(ord, name)))
                    store.copy_(torch.randn(value.dim, generator=seed))
                pack[name] = store
            x.execute({n: t for n, t in pack.items() if n in ir.values})
        torch.cuda.synchronize()
        found[engines or "all"] = pack
    for name in ("o", "dq", "dk", "dv", "dwq", "dwk"):
        mine, theirs = found["all"][name].double(), found["torch"][name].double()
        assert not bool(mine.isnan().any())
        assert float((mine - theirs).norm() / theirs.norm()) < 0.02, name


@pytest.mark.parametrize("whole", [False, True])
def test_captured_and_replayed(whole: bool):
    given = made(Plan(4, True, whole=whole, r=128, d=128, dim=(2, 4, 64)))
    want = expected(given)
    exe = build(given)
    there = on_gpu(given)
    env = [*there.env, torch.empty(exe.workspace_bytes, dtype=torch.uint8, device="cuda")]
    exe(env, torch.cuda.current_stream().cuda_stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        exe(env, torch.cuda.current_stream().cuda_stream)
    for port in given.written:
        there.at(port).fill_(torch.nan)
    captured.replay()
    torch.cuda.synchronize()
    check(Case(given.step, [t.cpu() for t in there.env]), want, "replayed")
