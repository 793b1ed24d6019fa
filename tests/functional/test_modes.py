"""The functions within the modes of torch: autograd, autocast, inference, fake tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ropegraph.functional import attention, qkv_attention, rope
from ropegraph.testing import oracle
from tests.functional.cases import H_Q, SPLIT, B, D, S, attend, heads, table


def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(*inputs).sum(), inputs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_activation_checkpointing(use_reentrant: bool, dropout_p: float) -> None:
    inputs = heads()
    torch.manual_seed(5)
    want = torch.autograd.grad(attend(*inputs, dropout_p=dropout_p).sum(), inputs)
    torch.manual_seed(5)
    o = checkpoint(lambda *x: attend(*x, dropout_p=dropout_p), *inputs, use_reentrant=use_reentrant)
    o.sum().backward()
    assert all(torch.equal(x.grad, w) for x, w in zip(inputs, want, strict=True))


def test_gradients_accumulate() -> None:
    inputs = heads()
    want = gradients(*inputs)
    for _ in range(3):
        attend(*inputs).sum().backward()
    for x, w in zip(inputs, want, strict=True):
        torch.testing.assert_close(x.grad, 3 * w)


def test_a_backward_may_run_again_if_the_graph_is_retained() -> None:
    inputs = heads()
    o = attend(*inputs)
    first = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(o.sum(), inputs), first))


def test_a_saved_tensor_that_changed_is_noticed() -> None:
    q, k, v = heads()
    w = v * 1
    o = attend(q, k, w)
    with torch.no_grad():
        w.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
    o = attend(q, k, v)
    loss = (o * o).sum()
    with torch.no_grad():
        o.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_and_then_training(mode: type) -> None:
    inputs = heads(seed=3)
    with mode():
        still = attend(*inputs)
    assert not still.requires_grad
    got = attend(*inputs)
    torch.testing.assert_close(got, still.clone())
    torch.autograd.grad(got.sum(), inputs)


def test_what_is_kept_for_the_backward() -> None:
    q, k, v = heads()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o = attend(q, k, v)
        shapes = sorted(tuple(x.shape) for x in kept)
        held = {x.data_ptr() for x in kept}
        assert shapes == sorted(
            [(S, 1, 1, D), o.shape, (B, H_Q, S, 1), q.shape, k.shape, v.shape]
        )  # freqs, o, stats, the rotated q and k, v
        assert not held & {q.data_ptr(), k.data_ptr()}
        assert v.data_ptr() in held
        kept.clear()
        attend(q, k, v, recompute_rope=True)
        held = {x.data_ptr() for x in kept}
        assert {x.data_ptr() for x in (q, k, v)} < held
        kept.clear()
        rope(q, table())
        assert [tuple(x.shape) for x in kept] == [(S, 1, 1, D)]
        kept.clear()
        packed = torch.randn(B, S, sum(SPLIT), D, requires_grad=True) + 0
        o = qkv_attention(packed, table(), split=SPLIT, fold="off", in_place=True)
        # The rotated q and k lie in packed itself, beside v: no copy of them.
        held = {x.untyped_storage().data_ptr() for x in kept}
        own = {x.untyped_storage().data_ptr() for x in (packed, o)}
        assert own < held
        assert sorted(x.numel() for x in kept if x.untyped_storage().data_ptr() not in own) == (
            sorted([table().numel(), B * H_Q * S])
        )


def _laid_anew(x: Tensor) -> Tensor:
    """The same numbers in other strides, as hooks that move tensors away and back leave them."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("laid", [torch.clone, Tensor.contiguous, _laid_anew])
@pytest.mark.parametrize("recompute_rope", [False, True])
def test_hooks_may_hand_back_other_strides(
    laid: Callable[[Tensor], Tensor], recompute_rope: bool
) -> None:
    inputs, weight = heads(), torch.randn(B, H_Q, S, D)
    wide = torch.randn(B, S, 2 * sum(SPLIT), D).requires_grad_()
    freqs = torch.stack((table(), table()), dim=-1)[..., 0]

    def run() -> tuple[Tensor, ...]:
        o = attend(*inputs, recompute_rope=recompute_rope)
        packed = qkv_attention(wide[:, :, ::2], freqs, split=SPLIT)
        return torch.autograd.grad((rope(o, freqs) + packed).mul(weight).sum(), (*inputs, wide))

    want = run()
    with torch.autograd.graph.saved_tensors_hooks(laid, lambda x: x):
        assert all(map(torch.equal, run(), want))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x[:1], lambda x: x):
        o = attend(*inputs)
    with pytest.raises(ValueError, match="is declared"):
        o.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    inputs = heads()
    with torch.autocast("cpu", dtype=dtype):
        o = attend(*inputs)
        turned = rope(inputs[0], table())
    assert o.dtype is dtype
    want = attend(*(x.to(dtype) for x in inputs))
    assert torch.equal(o, want)
    grads = torch.autograd.grad(o.sum(), inputs)
    assert all(g.dtype is torch.float32 for g in grads)
    assert all(map(torch.equal, grads, torch.autograd.grad(want.sum(), inputs)))
    assert torch.equal(turned, rope(inputs[0], table()))
    with torch.autocast("cpu", dtype=dtype):
        assert attend(*heads(torch.float64)).dtype is torch.float64


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_memory(device: str) -> None:
    real = heads()
    o = attend(*real)
    packed = torch.randn(B, S, sum(SPLIT), D)
    want = qkv_attention(packed, table(), split=SPLIT)
    fake = FakeTensorMode()

    def bare(x: Tensor) -> Tensor:
        return x.to("meta") if device == "meta" else fake.from_tensor(x)

    q, k, v = (bare(x.detach()).requires_grad_() for x in real)
    got = attention(q, k, v, bare(table()), is_causal=True, enable_gqa=True)
    assert got.shape == o.shape
    assert got.stride() == o.stride()
    assert got.device == q.device
    grads = torch.autograd.grad(got.sum(), (q, k, v))
    assert [g.stride() for g in grads] == [x.stride() for x in real]
    got = qkv_attention(bare(packed), bare(table()), split=SPLIT)
    assert got.stride() == want.stride()
    with pytest.raises(ValueError, match="differ in width"):
        attention(q, k[..., :8], v, enable_gqa=True)


def test_dropout_masks_come_from_torchs_generator() -> None:
    q = torch.zeros(1, 1, 64, 8)
    v = torch.ones(1, 1, 1, 8, requires_grad=True)
    torch.manual_seed(0)
    first = attention(q, v.detach(), v, dropout_p=0.5)
    second = attention(q, v.detach(), v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(attention(q, v.detach(), v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    (dv,) = torch.autograd.grad(first.sum(), v)
    assert torch.equal(dv.flatten(), first.sum((0, 1, 2)))


def test_deterministic_algorithms_asked_for_around_the_forward() -> None:
    inputs = heads()
    torch.use_deterministic_algorithms(True)
    try:
        o = attend(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    first = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(o.sum(), inputs)))


def test_parameters_are_plain_tensors() -> None:
    sink = torch.nn.Parameter(torch.ones(H_Q))
    attend(*heads(), sink=sink).sum().backward()
    assert sink.grad is not None


def test_angles_are_not_touched_by_default_dtypes() -> None:
    x, want = heads()[0], rope(heads()[0], table())
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(rope(x, table().float()), want)
    finally:
        torch.set_default_dtype(torch.float32)
    half = oracle.angles(S, D)
    torch.testing.assert_close(want.double(), oracle.rope(x, half), atol=1e-6, rtol=0)
