"""The functions on a GPU: engines, bits of the graphs by hand, captures of a whole step, memory."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.api.plans import Form
from ropegraph.cli.bench.timing import captured
from ropegraph.functional import allocate, attention, eager, qkv_attention, rope
from ropegraph.testing import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
B, H_Q, H_KV, S, D = 2, 8, 2, 200, 128
SPLIT = (H_Q, H_KV, H_KV)
Inputs = tuple[Tensor, ...]


def heads(dtype: torch.dtype = torch.bfloat16, s: int = S, b: int = B) -> Inputs:
    g = torch.Generator().manual_seed(s)
    made = (torch.randn(b, s, h, D, generator=g) for h in SPLIT)
    return tuple(x.to("cuda", dtype).transpose(1, 2).requires_grad_() for x in made)


def packed(s: int = S) -> Tensor:
    q, k, v = heads(s=s)
    return torch.cat([x.detach().transpose(1, 2) for x in (q, k, v)], dim=2).requires_grad_()


def table(s: int = S) -> Tensor:
    half = oracle.angles(s, D)
    return torch.cat((half, half), dim=-1)[:, None, None].cuda()


def attend(*inputs: Tensor, **options: Any) -> Tensor:
    s = inputs[0].shape[2]
    return attention(*inputs, table(s), is_causal=True, enable_gqa=True, **options)


def gradients(run: Callable[..., Tensor], inputs: Inputs, do: Tensor) -> list[Tensor]:
    o = run(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def check_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """The same bits of o; cuDNN adds up dQ in whatever order blocks come."""
    assert torch.equal(got[0], want[0])
    for g, w in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(g, w, atol=0.02, rtol=0.02)


def exact(inputs: Inputs, do: Tensor) -> list[Tensor]:
    leaves = [oracle.leaf(x) for x in inputs]
    q, k, v = leaves
    half = oracle.angles(S, D).cuda()
    keep = oracle.band(S, S, right=0).cuda()
    turned = (oracle.rope(x, half) for x in (q, k))
    o, _ = oracle.attention(*turned, v, attn_scale=D**-0.5, keep=keep)
    return [o.detach(), *oracle.gradients(o, leaves, do)]


@pytest.mark.parametrize("options", [{}, {"recompute_rope": True}, {"fold": "off"}])
def test_a_step_beside_fp64(options: dict[str, Any]) -> None:
    inputs = heads()
    do = torch.randn(B, S, H_Q, D, device="cuda").bfloat16().transpose(1, 2)
    got = gradients(lambda *x: attend(*x, **options), inputs, do)
    for g, w in zip(got, exact(inputs, do), strict=True):
        torch.testing.assert_close(g.double(), w, atol=0.04, rtol=0.02)


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (0, 4), (), (1, 1)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_memory_for_a_result_is_that_of_torch(shape: tuple[int, ...], mode: Any) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        stride = torch.empty(shape).stride()[::-1] if 0 not in shape else (9, 1)
        with mode():
            want = torch.empty_strided(shape, stride, dtype=dtype, device="cuda:0")
            got = allocate.empty(Form(shape, stride, dtype, want.device))
        for ask in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout"):
            assert getattr(got, ask) == getattr(want, ask)
        assert got.stride() == want.stride()
        assert got.is_inference() == want.is_inference()
        assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes()
        if mode is not torch.inference_mode:
            assert got._version == want._version


def test_engines_of_a_step() -> None:
    inputs = heads()
    attend(*inputs).sum().backward()
    slots = (*inputs, table(), *(None,) * 16)
    calls = [c for c in vars(eager._calls)["_young"].values() if c.kind.name == "attention"]
    call = next(c for c in calls if c.training and c.forms[0].dim == tuple(inputs[0].shape))
    assert len(slots) == len(call.kind.slots)
    for plan in (call.plan, call._backward):
        assert sorted(s.engine for s in plan.graph.plan.steps) == ["cuda.rope", "cudnn.sdpa"]
    # the gradients are turned where they are: no workspace holds them
    assert not call._backward.graph.plan.workspace


def test_recomputed_and_packed_give_the_same_bits() -> None:
    inputs, x = heads(), packed()
    do = torch.randn(B, S, H_Q, D, device="cuda").bfloat16().transpose(1, 2)
    want = gradients(attend, inputs, do)
    again = gradients(lambda *x: attend(*x, recompute_rope=True), inputs, do)
    check_same(again, want)
    o, dx = gradients(lambda x: qkv_attention(x, table(), split=SPLIT, is_causal=True), (x,), do)
    assert torch.equal(o, want[0])
    parts = (part.transpose(1, 2) for part in dx.split(SPLIT, dim=2))
    for got, wanted in zip(parts, want[1:], strict=True):
        torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", ["heads", "packed"])
def test_a_whole_step_in_a_cuda_graph(kind: str) -> None:
    inputs = heads() if kind == "heads" else (packed(),)
    freqs = table()

    def step() -> list[Tensor]:
        if kind == "heads":
            o = attention(*inputs, freqs, is_causal=True, enable_gqa=True)
        else:
            o = qkv_attention(inputs[0], freqs, split=SPLIT, is_causal=True)
        return [o.detach(), *torch.autograd.grad(o, inputs, torch.ones_like(o))]

    graph, made = captured(step)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in inputs:
                x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        got = [x.clone() for x in made]
        check_same(got, step())


def test_side_streams_and_alternating_shapes() -> None:
    sizes = (S, 64)
    want = {}
    for s in sizes:
        o = attend(*heads(s=s))
        want[s] = o.detach().clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            for s in sizes:
                inputs = heads(s=s)
                o = attend(*inputs)
                torch.autograd.grad(o.sum(), inputs)
                assert torch.equal(o, want[s])


def test_views_that_start_anywhere() -> None:
    room = torch.randn(B * S * H_Q * D + 1, device="cuda").bfloat16()
    q = room[1:].view(B, S, H_Q, D).transpose(1, 2)
    assert q.data_ptr() % 16
    freqs = table()
    assert torch.equal(rope(q, freqs), rope(q.clone(), freqs))


def test_packed_sequences() -> None:
    bounds = torch.tensor([0, 70, 70, 190], device="cuda", dtype=torch.int32)
    q, k, v = (x.detach()[:1].requires_grad_() for x in heads())
    o = attend(q, k, v, cu_seqlens=bounds, max_seqlen=128)
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    for start, end in ((0, 70), (70, 190)):
        own = [x.detach()[:, :, start:end].contiguous().requires_grad_() for x in (q, k, v)]
        alone = attend(*own)
        torch.testing.assert_close(o[:, :, start:end], alone, atol=0.02, rtol=0.02)
        for g, w in zip(grads, torch.autograd.grad(alone.sum(), own), strict=True):
            torch.testing.assert_close(g[:, :, start:end], w, atol=0.05, rtol=0.05)
    assert not o[:, :, 190:].any()


def test_memory_that_a_step_keeps() -> None:
    inputs = heads(s=4096, b=1)
    freqs = table(4096)
    sizes = {n: x.numel() * 2 for n, x in zip("qkv", inputs, strict=True)}
    for options, rotated in (({}, sizes["q"] + sizes["k"]), ({"recompute_rope": True}, 0)):
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            o = attention(*inputs, freqs, is_causal=True, enable_gqa=True, **options)
            held = torch.cuda.memory_allocated() - before
            torch.autograd.grad(o.sum(), inputs)
            del o
        stats = H_Q * 4096 * 4
        assert held <= sizes["q"] + rotated + stats + 2**16


def test_compiled() -> None:
    inputs = heads()
    compiled = torch.compile(lambda *x: attend(*x) * 2, fullgraph=True)
    got, want = compiled(*inputs), attend(*inputs) * 2
    grads = [torch.autograd.grad(o.sum(), inputs) for o in (got, want)]
    check_same([got, *grads[0]], [want, *grads[1]])


def test_packed_in_place() -> None:
    x = packed()
    do = torch.randn(B, S, H_Q, D, device="cuda").bfloat16().transpose(1, 2)
    made = []
    for in_place in (False, True):
        # A visible rotation carries no scale of its own accord, so none may here.
        o = qkv_attention(
            x * 1, table(), split=SPLIT, is_causal=True, in_place=in_place, fold="off"
        )
        made.append([o.detach(), *torch.autograd.grad(o, x, do)])
    check_same(*made)


def test_deterministic_steps_have_the_same_bits() -> None:
    inputs = heads(s=640)
    torch.use_deterministic_algorithms(True)
    try:
        steps = [torch.autograd.grad(attend(*inputs).sum(), inputs) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, steps[0], steps[1]))
    assert all(map(torch.equal, steps[0], steps[2]))


def test_freqs_have_a_gradient_by_torch() -> None:
    x, freqs = heads()[0], table().requires_grad_()
    (got,) = torch.autograd.grad(rope(x, freqs).float().sum(), freqs)
    leaf = oracle.leaf(freqs[:, 0, 0, : D // 2])
    (want,) = torch.autograd.grad(oracle.rope(x.detach(), leaf).sum(), leaf)
    torch.testing.assert_close(got[:, 0, 0, : D // 2].double(), want, atol=0.5, rtol=0.02)
