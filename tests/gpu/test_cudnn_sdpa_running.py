"""Streams, threads, captured graphs, and what goes wrong while cuDNN's attention runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from ropegraph.engines.cudnn_sdpa import launch, plans
from ropegraph.engines.cudnn_sdpa.engine import CudnnSdpa
from ropegraph.engines.cudnn_sdpa.recipe import recipe_of
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Sdpa, SdpaBackward
from tests.gpu.attention import (
    Problem,
    compiled,
    forward,
    here,
    lengths,
    poisoned,
    problem,
    step_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDNN = CudnnSdpa()
CAUSAL = {"right_bound": 0}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ready(given: Problem | None = None) -> tuple[Any, list[torch.Tensor], torch.Tensor, Problem]:
    """An executable, its environment, its output buffer, and the problem."""
    given = problem(**CAUSAL) if given is None else given
    outputs = {"O": poisoned(given.inputs["q"])}
    executable, env = compiled(CUDNN, Sdpa(**given.attrs), given.inputs, outputs, given)
    return executable, env, outputs["O"], given


def padded() -> Problem:
    given = problem(padding=True, **CAUSAL)
    given.inputs |= {"seq_len_q": lengths(131, 200), "seq_len_kv": lengths(264, 0)}
    return given


@pytest.mark.parametrize("make", [lambda: None, padded], ids=["dense", "padded"])
def test_the_callers_stream_is_used_even_behind_a_late_producer(make: Any) -> None:
    executable, env, o, given = ready(make())
    want = forward(CUDNN, given)["O"]
    q = given.inputs["q"]
    late = q.clone()
    q.zero_()
    o.fill_(torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        q.copy_(late)
    executable(env, side.cuda_stream)
    side.synchronize()
    assert torch.equal(o, want)


def test_a_thread_that_never_touched_cuda() -> None:
    executable, env, o, given = ready()
    want = forward(CUDNN, given)["O"]
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        o.fill_(torch.nan)
        torch.cuda.synchronize()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(executable, env, stream).result()
        torch.cuda.synchronize()
        assert torch.equal(o, want)


@pytest.mark.parametrize("make", [lambda: None, padded], ids=["dense", "padded"])
def test_threads_with_streams_of_their_own_share_one_executable(make: Any) -> None:
    executable, env, o, given = ready(make())
    want = forward(CUDNN, given)["O"]
    outputs = [poisoned(o) for _ in range(8)]
    together = Barrier(len(outputs))

    def work(out: torch.Tensor) -> None:
        stream = torch.cuda.Stream()
        mine = [out if x is o else x for x in env]
        together.wait()
        for _ in range(100):
            executable(mine, stream.cuda_stream)
        stream.synchronize()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(outputs)) as pool:
        list(pool.map(work, outputs))
    assert all(torch.equal(out, want) for out in outputs)


@pytest.mark.parametrize("kind", ["dense", "padded", "ALiBi", "bias"])
def test_a_captured_graph_sees_inputs_that_changed_in_place(kind: str) -> None:
    bias = {"bias": torch.randn(1, 4, 200, 264, device="cuda").to(torch.bfloat16)}
    given = padded() if kind == "padded" else problem(alibi=kind == "ALiBi", **CAUSAL)
    if kind == "bias":
        given.inputs |= bias
    saved = forward(CUDNN, given)
    inputs = {**given.inputs, "o": saved["O"], "dO": torch.randn_like(saved["O"]),
              "stats": saved["Stats"]}  # fmt: skip
    outputs = {f"d{n.upper()}": poisoned(given.inputs[n]) for n in "qkv"}
    executable, env = compiled(CUDNN, SdpaBackward(**given.attrs), inputs, outputs, given)
    side = torch.cuda.Stream()
    executable(env, side.cuda_stream)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        executable(env, side.cuda_stream)
    inputs["dO"].mul_(2)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    replayed = {name: x.clone() for name, x in outputs.items()}
    for x in outputs.values():
        x.fill_(torch.nan)
    executable(env, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for name, x in outputs.items():
        torch.testing.assert_close(replayed[name], x, rtol=2e-2, atol=2e-3)


def test_a_buffer_off_its_16_bytes_is_refused_before_anything_runs() -> None:
    executable, env, o, given = ready()
    q = given.inputs["q"]
    store = torch.empty(q.numel() + 8, dtype=q.dtype, device="cuda")
    off = store[1 : 1 + q.numel()].as_strided(q.shape, q.stride(), 1)
    o.fill_(7)
    mine = [off if x is q else x for x in env]
    with pytest.raises(GraphError, match="not aligned to the tensor's 16-byte alignment"):
        executable(mine, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert (o == 7).all()


def test_equal_steps_share_a_plan() -> None:
    plans.forget_plans()
    given = problem(**CAUSAL)
    outputs = {"O": poisoned(given.inputs["q"])}
    step, _ = step_of(Sdpa(**given.attrs), given.inputs, outputs, given)
    one, two = (plans.plan_of(recipe_of(step, here()), name) for name in ("one", "two"))
    assert one is two


def test_the_public_entry_of_the_frontend_gives_the_same() -> None:
    executable, env, o, given = ready()
    want = forward(CUDNN, given)["O"]
    o.fill_(torch.nan)
    plan = executable.plan
    assert executable.call.__qualname__.startswith("entry"), "the shorter entry is in use"
    step, _ = step_of(Sdpa(**given.attrs), given.inputs, {"O": o}, given)
    executable.call = launch.public_entry(plan)
    recipe = recipe_of(step, here())
    executable.places = launch.places_of(recipe, plan.uids, plan.workspace_bytes)
    executable(env, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.equal(o, want)
