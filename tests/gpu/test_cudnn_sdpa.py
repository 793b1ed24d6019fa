"""cuDNN's attention against the fp64 reference, forward and backward, and against torch's."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import pytest
import torch

from ropegraph.engines.cudnn_sdpa.engine import CudnnSdpa
from ropegraph.engines.reference import Reference
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Sdpa, SdpaBackward
from tests.gpu.attention import (
    F64,
    Problem,
    backward,
    both_ways,
    check,
    compiled,
    error,
    forward,
    poisoned,
    problem,
    rand,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDNN = CudnnSdpa()
CAUSAL = {"right_bound": 0}
ENDING = {"right_bound": 0, "bottom_right": True}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


CASES: dict[str, Callable[[], Problem]] = {
    "plain": problem,
    "causal": lambda: problem(**CAUSAL),
    "causal fp16": lambda: problem(dtype=torch.float16, **CAUSAL),
    "one group": lambda: problem(h_k=4, h_v=4, **CAUSAL),
    "one head of k": lambda: problem(h_q=8, h_k=1, h_v=1, **CAUSAL),
    "h_k != h_v": lambda: problem(h_q=12, h_k=2, h_v=4, **CAUSAL),
    "odd lengths": lambda: problem(s_q=127, s_kv=131, **CAUSAL),
    "s_q above s_kv": lambda: problem(s_q=300, s_kv=100, **CAUSAL),
    "s_q = 3, s_kv = 2": lambda: problem(s_q=3, s_kv=2, **CAUSAL),
    "bottom right": lambda: problem(s_q=100, **ENDING),
    "one row, bottom right": lambda: problem(s_q=1, s_kv=40, **ENDING),
    "right bound 5": lambda: problem(right_bound=5),
    "right bound 5, bottom right": lambda: problem(right_bound=5, bottom_right=True),
    "window": lambda: problem(left_bound=33),
    "window, bottom right": lambda: problem(left_bound=33, bottom_right=True),
    "window, causal": lambda: problem(left_bound=33, **CAUSAL),
    "window, causal, bottom right": lambda: problem(left_bound=33, **ENDING),
    "window both sides, bottom right": lambda: problem(
        left_bound=33, right_bound=7, bottom_right=True
    ),
    "log2": lambda: problem(attn_scale=0.125 / log(2), softmax_input_is_log2=True, **CAUSAL),
    "ALiBi, 6 heads": lambda: problem(h_q=6, alibi=True, **CAUSAL),
    "ALiBi, window": lambda: problem(h_q=6, alibi=True, left_bound=33, **CAUSAL),
    "d 8": lambda: problem(d_qk=8, d_v=8, **CAUSAL),
    "d 72": lambda: problem(d_qk=72, d_v=72, **CAUSAL),
    "d 128": lambda: problem(d_qk=128, d_v=128, **CAUSAL),
    "d 64/128": lambda: problem(d_v=128, **CAUSAL),
    "large grid": lambda: problem(b=300, h_q=300, h_k=300, h_v=300, s_q=4, s_kv=4, d_qk=8, d_v=8),
}
SM90_CASES: dict[str, Callable[[], Problem]] = {
    "d 192/128": lambda: problem(d_qk=192, d_v=128, attn_scale=0.07, **CAUSAL),
    "d 256": lambda: problem(d_qk=256, d_v=256, attn_scale=0.0625, **CAUSAL),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name: str) -> None:
    both_ways(CUDNN, CASES[name]())


@pytest.mark.parametrize("name", SM90_CASES)
def test_wide_heads_on_hopper(name: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("heads above 128 have a backward on sm_90")
    both_ways(CUDNN, SM90_CASES[name]())


def test_deterministic_runs_give_the_same_bits() -> None:
    given = problem(**CAUSAL)
    both_ways(CUDNN, given, deterministic=True)
    saved = forward(CUDNN, given)
    d_o = torch.randn_like(saved["O"])
    one, two = (backward(CUDNN, given, saved, d_o, deterministic=True) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dim", [(2, 4), (1, 4), (1, 1), (2, 1)])
def test_bias_and_its_gradient(dim: tuple[int, int]) -> None:
    bias = torch.randn(*dim, 200, 264, device="cuda").to(torch.bfloat16)
    both_ways(CUDNN, problem(extra={"bias": bias}, **CAUSAL), ["dBias"])


def test_bias_of_odd_lengths_and_in_fp32() -> None:
    odd = torch.randn(1, 4, 127, 131, device="cuda").to(torch.bfloat16)
    both_ways(CUDNN, problem(s_q=127, s_kv=131, extra={"bias": odd}, **CAUSAL), ["dBias"])
    both_ways(CUDNN, problem(extra={"bias": torch.randn(1, 4, 200, 264, device="cuda")}))


@pytest.mark.parametrize("dim", [(1, 1, 1, 264), (2, 1, 1, 264), (1, 1, 200, 1), (1, 4, 1, 1)])
def test_a_bias_that_repeats_is_served_forward(dim: tuple[int, ...]) -> None:
    given = problem(extra={"bias": torch.randn(*dim, device="cuda").to(torch.bfloat16)})
    check(forward(CUDNN, given), forward(Reference(), given, F64), torch.bfloat16)


def test_a_bias_may_hide_columns_and_whole_rows() -> None:
    bias = torch.randn(1, 4, 200, 264, device="cuda").to(torch.bfloat16)
    bias[..., 100:200] = -torch.inf
    bias[:, :, 7] = -torch.inf
    bias[:, 2] = -torch.inf
    given = problem(extra={"bias": bias})
    both_ways(CUDNN, given)
    got = forward(CUDNN, given)
    assert (got["O"][:, 2] == 0).all()
    assert (got["Stats"][:, 2] == -torch.inf).all()


@pytest.mark.parametrize("attrs", [CAUSAL, {}, {**CAUSAL, "left_bound": 33}])
def test_sink_and_its_gradient(attrs: dict[str, int]) -> None:
    sink = torch.randn(1, 4, 1, 1, device="cuda")
    both_ways(CUDNN, problem(extra={"sink_token": sink}, **attrs), ["dSink_token"])


@pytest.mark.parametrize("log2", [False, True])
def test_a_scale_on_the_host_is_read_at_execute(log2: bool) -> None:
    scale = torch.full((1, 1, 1, 1), 0.125, dtype=F64)
    given = problem(extra={"attn_scale": scale}, softmax_input_is_log2=log2, **CAUSAL)
    given.attrs["attn_scale"] = None
    both_ways(CUDNN, given)
    outputs = {"O": poisoned(given.inputs["q"])}
    executable, env = compiled(CUDNN, Sdpa(**given.attrs), given.inputs, outputs, given)
    scale.fill_(0.25)
    executable(env, torch.cuda.current_stream().cuda_stream)
    assert error(outputs["O"], forward(Reference(), given, F64)["O"]) < 3.4e-3
    for wrong in (0.0, -0.5):
        scale.fill_(wrong)
        with pytest.raises(GraphError, match=f"attn_scale={wrong} is read at execute"):
            executable(env, torch.cuda.current_stream().cuda_stream)


def test_packed_strides_are_read_and_written() -> None:
    given = problem(s_kv=200, **CAUSAL)
    x, grads = (torch.randn(2, 200, 8, 64, device="cuda").to(torch.bfloat16) for _ in range(2))
    grads.fill_(torch.nan)
    heads = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}
    for name, where in heads.items():
        given.inputs[name] = x.transpose(1, 2)[:, where]
    saved = forward(CUDNN, given)
    check(saved, forward(Reference(), given, F64), torch.bfloat16)
    d_o = torch.randn_like(saved["O"])
    want = backward(Reference(), given, saved, d_o, (), F64)
    inputs = {**given.inputs, "o": saved["O"], "dO": d_o, "stats": saved["Stats"]}
    outputs = {f"d{n.upper()}": grads.transpose(1, 2)[:, where] for n, where in heads.items()}
    check(run(CUDNN, SdpaBackward(**given.attrs), inputs, outputs, given), want, torch.bfloat16)
    assert torch.isfinite(grads).all()


def test_expanded_keys_are_read() -> None:
    given = problem(**CAUSAL)
    given.inputs["k"] = rand(1, 2, 264, 64).expand(2, -1, -1, -1)
    given.inputs["v"] = rand(2, 1, 264, 64).expand(-1, 2, -1, -1)
    check(forward(CUDNN, given), forward(Reference(), given, F64), torch.bfloat16)


def test_what_lies_beside_a_dense_tensor_stays_out() -> None:
    given = problem(s_q=127, s_kv=131)
    for name, s in (("q", 127), ("k", 131), ("v", 131)):
        whole = rand(2, 4 if name == "q" else 2, 300, 64)
        whole[:, :, s:] = torch.nan
        given.inputs[name] = whole[:, :, :s]
    both_ways(CUDNN, given)


def test_outputs_nobody_reads_are_computed_into_the_workspace() -> None:
    given = problem(**CAUSAL)
    want = forward(Reference(), given, F64)
    saved = forward(CUDNN, given)
    stats = {"Stats": torch.full_like(saved["Stats"], torch.nan)}
    check(run(CUDNN, Sdpa(**given.attrs), given.inputs, stats, given), want, torch.bfloat16)
    only_o = {"O": poisoned(saved["O"])}
    check(run(CUDNN, Sdpa(**given.attrs), given.inputs, only_o, given), want, torch.bfloat16)
    d_o = torch.randn_like(saved["O"])
    inputs = {**given.inputs, "o": saved["O"], "dO": d_o, "stats": saved["Stats"]}
    d_k = {"dK": poisoned(given.inputs["k"])}
    expected = backward(Reference(), given, saved, d_o, (), F64)
    check(run(CUDNN, SdpaBackward(**given.attrs), inputs, d_k, given), expected, torch.bfloat16)


@pytest.mark.parametrize("name", ["causal", "window", "log2", "sink", "bias"])
def test_stats_of_one_engine_feed_the_backward_of_the_other(name: str) -> None:
    extra = {
        "sink": {"sink_token": torch.randn(1, 4, 1, 1, device="cuda")},
        "bias": {"bias": torch.randn(1, 4, 200, 264, device="cuda").to(torch.bfloat16)},
    }
    given = problem(extra=extra[name], **CAUSAL) if name in extra else CASES[name]()
    torch_engine = TorchExecutor()
    saved = {"cudnn": forward(CUDNN, given), "torch": forward(torch_engine, given)}
    d_o = torch.randn_like(saved["cudnn"]["O"])
    for made in saved.values():
        want = backward(Reference(), given, made, d_o, (), F64)
        for engine in (CUDNN, torch_engine):
            check(backward(engine, given, made, d_o), want, torch.bfloat16)


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_dropout_draws_one_mask_forward_and_backward(where: str, dtype: torch.dtype) -> None:
    p, s = 0.3, 64
    given = problem(h_k=4, h_v=4, s_q=s, s_kv=s, dropout_p=p, **CAUSAL)
    for name, number in (("seed", 1234), ("offset", 8)):
        given.inputs[name] = torch.full((1, 1, 1, 1), number, dtype=dtype, device=where)
    v = given.inputs["v"]
    given.inputs["v"] = torch.eye(s, device="cuda").to(v.dtype).expand(2, 4, s, s).contiguous()
    weights = forward(CUDNN, given)["O"]  # with v = 1 the output is the dropped weights

    def plain(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(s, s, dtype=torch.bool, device="cuda").triu(1)
        return (q @ k.transpose(2, 3) * 0.125).masked_fill(hidden, -torch.inf).softmax(-1)

    q, k, value = (x.double().requires_grad_() for x in (given.inputs["q"], given.inputs["k"], v))
    full = plain(q, k)
    kept = (weights != 0) | (full < 1e-4)
    counted = full > 1e-3
    assert abs(float((kept & counted).sum() / counted.sum()) - (1 - p)) < 0.02
    assert error(weights, (full * kept / (1 - p)).detach()) < 3.4e-3
    given.inputs["v"] = v
    saved = forward(CUDNN, given)
    want = (full * kept / (1 - p)) @ value
    assert error(saved["O"], want.detach()) < 3.4e-3
    assert torch.isfinite(saved["Stats"]).all()
    d_o = torch.randn_like(saved["O"])
    expected = torch.autograd.grad(want, (q, k, value), d_o.double())
    for got, grad in zip(backward(CUDNN, given, saved, d_o).values(), expected, strict=True):
        assert error(got, grad) < 5e-3
    given.inputs["seed"] = given.inputs["seed"] + 1
    assert not torch.equal(forward(CUDNN, given)["O"], saved["O"])


def test_shapes_of_decoding_and_of_latent_attention_are_served_forward() -> None:
    for sizes in (
        {"s_q": 1, "d_qk": 512, "d_v": 512},
        {"s_q": 1, "d_qk": 576, "d_v": 512},
        {"s_q": 1, "s_kv": 1},
        {"d_qk": 320, "d_v": 320},
        {"b": 65535, "h_q": 1, "h_k": 1, "h_v": 1, "s_q": 4, "s_kv": 4, "d_qk": 8, "d_v": 8},
        {"b": 1, "h_q": 1, "h_k": 1, "h_v": 1, "s_q": 70000, "s_kv": 8, "d_qk": 8, "d_v": 8},
    ):
        given = problem(**sizes)
        check(forward(CUDNN, given), forward(Reference(), given, F64), torch.bfloat16)


def test_strides_of_2_to_the_30_are_reached() -> None:
    store = torch.empty(2**30 + 4 * 64, dtype=torch.bfloat16, device="cuda")
    given = problem(h_q=2, h_k=1, h_v=1, s_q=4, s_kv=4)
    wide = store.as_strided((2, 1, 4, 64), (2**30, 2**20, 64, 1))
    wide.copy_(given.inputs["k"])
    given.inputs["k"] = wide
    check(forward(CUDNN, given), forward(Reference(), given, F64), torch.bfloat16)
