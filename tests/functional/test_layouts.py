"""Strides that callers and autograd bring: the numbers are those of contiguous tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropegraph.functional import attention, qkv_attention, rope
from ropegraph.testing.inputs import placed
from tests.functional.cases import SPLIT, B, D, S, attend, heads, table

GRADS: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda o: torch.ones(()).expand(o.shape),
    "a row": lambda o: torch.randn(D).expand(o.shape),
    "s and h exchanged": lambda o: torch.randn(*(o.shape[i] for i in (0, 2, 1, 3))).transpose(1, 2),
    "d first": lambda o: torch.randn(D, *o.shape[:3]).permute(1, 2, 3, 0),
    "every other": lambda o: torch.randn(*o.shape[:3], 2 * D)[..., ::2],
}


@pytest.mark.parametrize("name", GRADS)
def test_any_incoming_gradient_is_as_its_contiguous_copy(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = heads()
    packed = torch.randn(B, S, sum(SPLIT), D, requires_grad=True)
    for run, inputs in (
        (attend, (q, k, v)),
        (lambda x: rope(x, table()), (q,)),
        (lambda x: qkv_attention(x, table(), split=SPLIT), (packed,)),
    ):
        o = run(*inputs)
        grad = GRADS[name](o)
        before = grad.clone()
        got = torch.autograd.grad(o, inputs, grad, retain_graph=True)
        want = torch.autograd.grad(o, inputs, grad.contiguous())
        assert all(map(torch.equal, got, want))
        assert torch.equal(grad, before)


def test_sum_of_one_pair() -> None:
    x = torch.ones(2, 3, 4, 2, requires_grad=True)
    rope(x, torch.ones(4, 2)).sum().backward()
    want = torch.tensor([1.38177, -0.30117]).expand(2, 3, 4, 2)
    torch.testing.assert_close(x.grad, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["bshd", "packed_qkv", "expanded", "gapped", "odd_size_1"])
def test_inputs_of_any_strides(layout: str) -> None:
    q, k, v = (placed(x.detach(), layout).requires_grad_() for x in heads())  # type: ignore[arg-type]
    plain = [x.detach().clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    plain = [x.requires_grad_() for x in plain]
    got, want = attend(q, k, v), attend(*plain)
    torch.testing.assert_close(got, want)
    do = torch.randn_like(want)
    grads = torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(want, plain, do)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("dim", "stride"), [((3, 1, 4, 8), (32, 8, 8, 1)), ((1, 4, 2, 8), (7, 16, 8, 1))]
)
def test_strides_of_axes_of_length_1_mean_nothing(
    dim: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    store = torch.randn(256)
    x = store.as_strided(dim, stride).transpose(1, 2)
    plain = x.clone(memory_format=torch.contiguous_format)
    freqs = table(x.shape[2], 8)
    assert torch.equal(rope(x, freqs), rope(plain, freqs))
    torch.testing.assert_close(attention(x, x, x, freqs), attention(plain, plain, plain, freqs))


@pytest.mark.parametrize("dim", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_nothing_to_do(dim: tuple[int, ...]) -> None:
    x, w = torch.randn(dim, requires_grad=True), torch.randn(dim, requires_grad=True)
    freqs = table(3, 8)
    for o in (rope(x, freqs), attention(x, w, w, freqs)):
        assert o.shape == dim
        (grad,) = torch.autograd.grad(o.sum(), x)
        assert grad.shape == dim


def test_queries_without_keys_are_zero() -> None:
    q = torch.randn(1, 2, 2, 8, requires_grad=True)
    k = torch.randn(1, 2, 3, 8, requires_grad=True)
    lengths = (torch.tensor([2]), torch.tensor([0]))
    o = attention(q, k, k, seq_lens=lengths)
    grads = torch.autograd.grad(o.sum(), (q, k))
    assert not any(x.any() for x in (o, *grads))


def test_inputs_are_left_as_they_were() -> None:
    packed = torch.randn(1, 3, 2, 4, requires_grad=True)
    before = packed.detach().clone()
    q, k = packed.unbind(2)
    q, k = q[:, :, None].transpose(1, 2), k[:, :, None].transpose(1, 2)
    o = attention(q, k, k, table(3, 4)) + rope(q, table(3, 4))
    o.sum().backward()
    assert torch.equal(packed, before)
    assert packed._version == 0
    # one tensor as all three, and heads that share one memory
    x = torch.randn(1, 1, 3, 4).expand(1, 4, 3, 4)
    torch.testing.assert_close(
        attention(x, x, x, table(3, 4)), attention(*(x.contiguous() for _ in range(3)), table(3, 4))
    )
