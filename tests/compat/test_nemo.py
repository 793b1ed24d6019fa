"""apply_rope_triton: bit for bit as NeMo's kernel, eager where NeMo is eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.compat.nemo import apply_rope_triton
from ropegraph.errors import GraphError
from tests.compat.te import BF16, F16, F32, F64, dirty_memory, normal, strange_grad
from tests.engines.test_rope_numerics import by_kernel, same_bits

PAIRS = 3


def tables(angles: Tensor) -> list[Tensor]:
    """[s, b, 1, P]: what the kernel reads."""
    turned = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    return [t.transpose(0, 1)[:, :, None].contiguous() for t in turned.unbind(-1)]


def heads(x: Tensor) -> Tensor:
    return x[:, None] if x.dim() == 3 else x.transpose(1, 2)


def kernel(x: Tensor, angles: Tensor, inverse: bool) -> Tensor:
    out = by_kernel(heads(x).contiguous(), *tables(angles), inverse)
    return out[:, 0] if x.dim() == 3 else out.transpose(1, 2)


def exact(x: Tensor, angles: Tensor, inverse: bool = False) -> Tensor:
    """e^(i angle) on adjacent pairs of the last channels, in fp64."""
    angles = (-angles if inverse else angles).double()
    angles = angles[:, :, None] if x.dim() == 4 else angles
    width = 2 * angles.shape[-1]
    kept, pairs = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]
    x0, x1 = pairs[..., 0::2], pairs[..., 1::2]
    c, s = angles.cos(), angles.sin()
    turned = torch.stack((x0 * c - x1 * s, x0 * s + x1 * c), dim=-1).flatten(-2)
    return torch.cat((kept, turned), dim=-1)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 5, 9), (2, 5, 2, 11), (1, 4, 3, 6)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], inverse: bool) -> None:
    x = normal(*shape, dtype=dtype)
    x[0, 0, ..., 0] = math.nan if shape[-1] > 6 else -0.0
    angles = 30 * normal(*shape[:2], PAIRS, seed=3, dtype=F32)
    x.requires_grad_()
    with dirty_memory():
        y = apply_rope_triton(x, angles, inverse)
        dy = strange_grad(y)[1]
        (dx,) = torch.autograd.grad(y, x, dy)
    same_bits(y.detach(), kernel(x.detach(), angles, inverse))
    same_bits(dx, kernel(dy, angles, not inverse))
    assert y.is_contiguous()
    assert dx.is_contiguous()
    assert y.dtype is dtype


def test_the_prefix_is_copied_bit_for_bit() -> None:
    x = normal(1, 2, 2, 9, dtype=BF16)
    x[..., 0], x[..., 1], x[..., 2] = math.nan, math.inf, -0.0
    y = apply_rope_triton(x, normal(1, 2, PAIRS, dtype=F32))
    assert torch.equal(y.view(torch.int16)[..., :3], x.view(torch.int16)[..., :3])


@pytest.mark.parametrize("shape", [(2, 5, 9), (2, 5, 2, 9)])
def test_meaning_and_adjoint(shape: tuple[int, ...]) -> None:
    x = normal(*shape, dtype=F32).requires_grad_()
    angles = normal(*shape[:2], PAIRS, seed=3, dtype=F32)
    y = apply_rope_triton(x, angles)
    torch.testing.assert_close(y.double(), exact(x.double(), angles), rtol=0, atol=1e-6)
    for dy in strange_grad(y):
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        wanted = exact(dy.double(), angles, inverse=True)
        torch.testing.assert_close(dx.double(), wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close((dy * y).sum(), (dx * x).sum(), rtol=1e-5, atol=1e-5)
    back = apply_rope_triton(y.detach(), angles, inverse=True)
    torch.testing.assert_close(back, x.detach(), rtol=0, atol=1e-6)


def test_strided_values_and_angles_have_the_same_bits() -> None:
    x, angles = normal(2, 5, 3, 9, dtype=BF16), normal(2, 5, PAIRS, seed=3, dtype=F32)
    want = apply_rope_triton(x, angles)
    for other in (
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        torch.stack((x, x), dim=-1)[..., 0],
    ):
        got = apply_rope_triton(other, angles)
        same_bits(got, want)
        assert got.is_contiguous()
    shared = angles[:1].expand(2, 5, PAIRS)
    same_bits(apply_rope_triton(x, shared), apply_rope_triton(x, shared.contiguous()))


def test_inputs_are_left_alone() -> None:
    x, angles = normal(2, 5, 9, dtype=F32).requires_grad_(), normal(2, 5, PAIRS, dtype=F32)
    before = x.detach().clone(), angles.clone()
    apply_rope_triton(x, angles).sum().backward()
    assert torch.equal(x, before[0])
    assert torch.equal(angles, before[1])


def test_gradients_of_gradients() -> None:
    x, angles = normal(1, 3, 7, dtype=F32).requires_grad_(), normal(1, 3, 2, dtype=F32)
    (dx,) = torch.autograd.grad((apply_rope_triton(x, angles) ** 3).sum(), x, create_graph=True)
    (got,) = torch.autograd.grad(dx.sum(), x)
    leaf = x.detach().double().requires_grad_()
    (dleaf,) = torch.autograd.grad((exact(leaf, angles) ** 3).sum(), leaf, create_graph=True)
    (want,) = torch.autograd.grad(dleaf.sum(), leaf)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# Where NeMo is eager


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 7), (2, 4, 3, 7)])
def test_angles_that_require_grad_get_theirs(shape: tuple[int, ...], inverse: bool) -> None:
    x = normal(*shape).requires_grad_()
    angles = normal(*shape[:2], PAIRS, seed=3).requires_grad_()
    dy = normal(*shape, seed=8)
    y = apply_rope_triton(x, angles, inverse)
    want = exact(x, angles, inverse)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(y, (x, angles), dy),
        torch.autograd.grad(want, (x, angles), dy),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_eager_path_is_nemos_formula(dtype: torch.dtype) -> None:
    x, angles = normal(2, 5, 3, 9, dtype=dtype), normal(2, 5, PAIRS, dtype=F32).requires_grad_()
    pairs = torch.view_as_complex(x[..., 3:].float().unflatten(-1, (-1, 2)).contiguous())
    unit = torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
    turned = torch.view_as_real(pairs * unit).flatten(-2).to(dtype)
    assert torch.equal(apply_rope_triton(x, angles), torch.cat((x[..., :3], turned), dim=-1))


def test_other_types_are_eager_too() -> None:
    x, angles = normal(2, 5, 7), normal(2, 5, PAIRS)
    got = apply_rope_triton(x, angles)
    torch.testing.assert_close(got, exact(x, angles), rtol=0, atol=1e-14)
    got = apply_rope_triton(x.float(), angles)
    assert got.dtype is F32
    torch.testing.assert_close(got.double(), exact(x, angles), rtol=0, atol=1e-6)
    assert apply_rope_triton(x, angles.float()).dtype is F64


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8), (0, 5, 8)])
def test_nothing_to_turn(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """C16, fused and eager."""
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    angles = torch.zeros(*shape[:2], PAIRS, dtype=F32)
    y = apply_rope_triton(x, angles)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


X, ANGLES = normal(2, 5, 3, 8, dtype=F32), normal(2, 5, PAIRS, dtype=F32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"values": None}, "values=None is no torch tensor"),
    "dims": ({"values": X[0, 0]}, "has 2 dims; use [b, s, channels]"),
    "angle dims": ({"angles": ANGLES[0]}, "do not fit values [2, 5, 3, 8]; use [2, 5, pairs]"),
    "batch": ({"angles": ANGLES[:1]}, "angles [1, 5, 3] do not fit"),
    "length": ({"angles": ANGLES[:, :4]}, "angles [2, 4, 3] do not fit"),
    "no pairs": ({"angles": ANGLES[..., :0]}, "0 < 2 * pairs <= 8"),
    "wide": ({"angles": ANGLES.repeat(1, 1, 2)}, "0 < 2 * pairs <= 8"),
    "wide, eager": ({"angles": ANGLES.repeat(1, 1, 2).requires_grad_()}, "0 < 2 * pairs <= 8"),
    "half angles": (
        {"angles": ANGLES.half()},
        "angles is torch.float16; use a floating type",
    ),
    "integers": ({"values": X.int()}, "values is torch.int32; use a floating type of 16 bits"),
    "integer angles": (
        {"angles": ANGLES.long()},
        "angles is torch.int64; use a floating type",
    ),
    "complex angles": ({"angles": ANGLES + 0j}, "angles is torch.complex64"),
    "inverse": ({"inverse": -1}, "inverse=-1; use True or False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    changed, text = REFUSED[case]
    given: dict[str, Any] = {"values": X, "angles": ANGLES, **changed}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the type that NeMo raises
        apply_rope_triton(**given)
    assert isinstance(caught.value, GraphError)
    assert text in str(caught.value), caught.value
