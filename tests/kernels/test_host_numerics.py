"""Bits on the CPU: the numerics of NeMo and of Hugging Face, and exact angles to a unit in fp32."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ropegraph.ir.ops import Rope, RopeBackward
from ropegraph.testing.inputs import normal
from tests.kernels.cases import Case, Run, bits, case, like
from tests.kernels.test_host import adjoint

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x y + z rounded once to fp32: in fp64 to odd, which leaves the second rounding right."""
    product, z = x.double() * y.double(), z.double().expand_as(x)
    total = product + z
    head = total - product
    rest = (product - (total - head)) + (z - head)
    is_even = total.contiguous().view(torch.int64) % 2 == 0
    toward = torch.where(rest > 0, torch.inf, -torch.inf).double()
    odd = torch.nextafter(total, toward)
    return torch.where((rest != 0) & is_even, odd, total).float()


def nemo(x: Tensor, cos: Tensor, sin: Tensor, op: Rope | RopeBackward) -> Tensor:
    """r0 = fma(x0, c, -(x1 s)), r1 = fma(x0, s, x1 c), rounded once; the rest as it is."""
    sine = sin if isinstance(op, RopeBackward) == op.inverse else -sin
    begin, r = op.rope_offset, op.rope_dim
    own = x[..., begin : begin + r].float()
    first, second = (own[..., i::2] for i in (0, 1)) if op.interleaved else own.chunk(2, -1)
    r0 = fused(first, cos.expand_as(first), -(second * sine))
    r1 = fused(first, sine.expand_as(first), second * cos)
    y = x.clone()
    turned = torch.stack([r0, r1], -1).flatten(-2) if op.interleaved else torch.cat([r0, r1], -1)
    y[..., begin : begin + r] = turned.to(x.dtype)
    return y


def same(got: Tensor, want: Tensor) -> bool:
    """Every bit, but that zeros of either sign are one number and NaN has any payload."""
    return bool(((bits(got) == bits(want)) | (got == want) | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_nemo_bit_for_bit(dtype: torch.dtype, run: Run) -> None:
    """Even and odd prefixes, which are copied bit for bit; with ids, in both directions."""
    generator = torch.Generator().manual_seed(3)
    angles = torch.randn(7, 1, 1, 32, generator=generator) * 100
    polar = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    cos, sin = (polar[..., i].contiguous() for i in (0, 1))
    ids = torch.tensor([[6, 0, 3, 3, 1]])
    made: list[tuple[Case, Tensor]] = []
    for prefix, inverse, turn in itertools.product((16, 3), (False, True), (False, True)):
        x = normal((2, 3, 5, prefix + 64), dtype, "bshd", seed=prefix)
        x[0, 0, :, prefix : prefix + 8] *= 2**13  # sums that cancel, and in fp16 overflow
        x[1, 0, 0, :2] = torch.tensor([torch.inf, torch.nan])
        op = Rope(
            64, prefix, interleaved=True, interleaved_output=True, inverse=inverse,
            angles="cos_sin", half_width=True, numerics="nemo",
        )  # fmt: skip
        tensors = {"cos": cos, "sin": sin} | ({"position_ids": ids} if prefix == 3 else {})
        rows = ids[0] if prefix == 3 else torch.arange(5)
        table = [t[rows, 0, 0] for t in (cos, sin)]
        if turn:
            back = adjoint(op)
            given = case(back, dY=x, **tensors, dX=like(x))
            made.append((given, nemo(x, *table, back)))
        else:
            made.append((case(op, input=x, **tensors, output=like(x)), nemo(x, *table, op)))
    run([given for given, _ in made])
    for given, want in made:
        got = given.at(given.written[0])
        prefix = given.step.node.attrs.rope_offset  # type: ignore[union-attr]
        assert same(got, want), given.step.node.attrs
        assert torch.equal(bits(got[..., :prefix]), bits(want[..., :prefix]))


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb of Hugging Face transformers, one tensor."""
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_hugging_face_bit_for_bit(dtype: torch.dtype, run: Run) -> None:
    """Forward, and autograd's backward; the attention factor is part of the rounded tables."""
    generator = torch.Generator().manual_seed(4)
    half = torch.rand(6, 1, 1, 32, generator=generator) * 1000
    angles = torch.cat([half, half], -1)
    made: list[tuple[Case, Tensor]] = []
    for factor, kind in itertools.product((1.0, 1.2079), (F32, dtype)):
        # Attention factors go into fp32 tables; rounded ones are read as they are.
        cos, sin = angles.cos().to(kind), angles.sin().to(kind)
        op = Rope(
            64, 0, attention_factor=factor, angles="cos_sin", table_layout="full", numerics="hf"
        )
        if kind is dtype:
            op = replace(op, table_layout="first_half")
        tables = [(t.float() * factor).to(dtype)[:, 0, 0] for t in (cos, sin)]
        x = normal((2, 3, 6, 64), dtype, "bshd", seed=7)
        x[0, 0] *= 100
        dy = normal((2, 3, 6, 64), dtype, seed=8)
        held = x.clone().requires_grad_()
        want = eager(held, *tables)
        want.backward(dy)
        assert held.grad is not None
        tensors = {"cos": cos, "sin": sin}
        made.append((case(op, input=x, **tensors, output=like(x)), want.detach()))
        made.append((case(adjoint(op), dY=dy, **tensors, dX=like(dy)), held.grad))
    run([given for given, _ in made])
    for given, want in made:
        assert same(given.at(given.written[0]), want), given.step.node.attrs


def hard_positions(inv_freq: float, limit: int) -> set[int]:
    """Positions whose product with ``inv_freq`` comes close to a multiple of pi / 2."""
    x = np.longdouble(inv_freq) / (np.longdouble("3.14159265358979323846264338327950288") / 2)
    found: set[int] = set()
    before, denominator, rest = 0, 1, x
    for _ in range(24):
        rest = rest - np.floor(rest)
        if rest < np.longdouble(1e-15):
            break
        rest = 1 / rest
        before, denominator = denominator, int(np.floor(rest)) * denominator + before
        if denominator >= limit:
            break
        found |= {n for k in (1, 2, 3, 5) for n in (k * denominator, -k * denominator)}
    return {n for n in found if abs(n) < limit}


def test_exact_angles_are_within_a_unit_of_fp32(run: Run) -> None:
    """Below 2^24, for 1.0 and small numbers, and far beyond where no value is close to zero."""
    rng = random.Random(2)
    inv_freq = torch.tensor([1e6 ** (-2 * i / 64) for i in range(32)])
    limit = 2**24
    hard = sorted({n for f in inv_freq.tolist() for n in hard_positions(f, limit)})
    plain = [rng.randrange(-limit + 1, limit) for _ in range(1500)]
    ids = torch.tensor([[*hard, *plain, 0, 1, -1, limit - 1, 1 - limit, 355, 710]])
    far = torch.tensor([[2**29 - 1, 2**31, -(2**39) - 3, 2**40 + 1]])
    x = torch.tensor([1.0, 0.0]).repeat_interleave(32).expand(1, 1, ids.shape[1], 64)
    op = Rope(64, 0, angles="inv_freq", angle_precision="exact")
    given = [
        case(op, input=x[:, :, : p.shape[1]], inv_freq=inv_freq, position_ids=p,
             output=torch.full((1, 1, p.shape[1], 64), torch.nan))
        for p in (ids, far)
    ]  # fmt: skip
    run(given)
    for one, positions in zip(given, (ids, far), strict=True):
        # 64 bits hold these products; numpy's functions of them are right to 1e-19.
        angle = positions[0].numpy().astype(np.longdouble)[:, None] * inv_freq.numpy()
        got = one.at("output")[0, 0].numpy()
        for values, want in ((got[:, :32], np.cos(angle)), (got[:, 32:], np.sin(angle))):
            unit = np.spacing(np.abs(want).astype(np.float32)).astype(np.longdouble)
            assert float((np.abs(values - want) / unit).max()) <= 1.0
