"""The rotations that promise bits: every rounding as NeMo's kernel and Hugging Face make it."""

from dataclasses import replace
from fractions import Fraction
from math import inf, isinf, isnan, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.engines.torch_executor.exact import fma
from ropegraph.ir.ops import Rope, RopeBackward
from ropegraph.testing.inputs import normal, poisoned
from tests.engines import steps
from tests.engines.rotations import POSITIONS, case

ENGINE = TorchExecutor()
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = (F16, BF16, F32)
BITS = {2: torch.int16, 4: torch.int32}
# significant bits and the exponent of the smallest subnormal
FORMATS = {F32: (24, -149, 2.0**128), BF16: (8, -133, 2.0**128), F16: (11, -24, 2.0**16)}


def nearest(x: Fraction, dtype: torch.dtype) -> float:
    """x rounded to nearest even by whole numbers; a zero gets the sign from the caller."""
    digits, lowest, top = FORMATS[dtype]
    if x == 0:
        return 0.0
    size, exponent = abs(x), 0
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - digits + 1, lowest)
    steps_, rest = divmod(size, unit)
    if rest * 2 > unit or (rest * 2 == unit and steps_ % 2):
        steps_ += 1
    rounded = float(steps_ * unit) if steps_ * unit < Fraction(top) else inf
    return rounded if x > 0 else -rounded


def exact_fma(a: float, b: float, c: float) -> float:
    if any(isnan(v) or isinf(v) for v in (a, b, c)):
        return a * b + c
    total = Fraction(a) * Fraction(b) + Fraction(c)
    return nearest(total, F32) if total else a * b + c if a * b == 0 and c == 0 else 0.0


def same_bits(got: Tensor, want: Tensor) -> None:
    """Equal bit for bit, a NaN equal to any NaN."""
    assert got.dtype == want.dtype
    view = BITS[got.dtype.itemsize]
    equal = (got.contiguous().view(view) == want.contiguous().view(view)) | (
        got.isnan() & want.isnan()
    )
    assert bool(equal.all()), f"{int((~equal).sum())} of {got.numel()} differ"


def numbers(seed: int, n: int) -> Tensor:
    """fp32 numbers of every size and of few digits, so that ties and cancellation are common."""
    g = torch.Generator().manual_seed(seed)
    digits = torch.randint(1, 24, (n,), generator=g)
    whole = (torch.rand(n, generator=g, dtype=torch.float64) * 2.0**digits).floor() + 1
    sign = torch.randint(0, 2, (n,), generator=g) * 2 - 1
    return (sign * whole * 2.0 ** torch.randint(-30, 10, (n,), generator=g).double()).float()


@pytest.mark.parametrize("seed", range(4))
def test_fma_is_rounded_once(seed):
    n = 2000
    a, b, c = (numbers(3 * seed + i, n) for i in range(3))
    # Sums 2^-70 beside a tie, on either side: (1 + k u) (1 - k u) is a little less than 1.
    k = torch.randint(1, 60, (n // 2,), generator=torch.Generator().manual_seed(seed)) * 2.0**-23
    a[: n // 2], b[: n // 2] = 1 + k, (1 - k) * 2.0**-24 * a[: n // 2].sign()
    a[: n // 2] *= c[: n // 2].sign() * torch.where(k > 30 * 2.0**-23, 1, -1)
    c[: n // 2] = c[: n // 2].sign() * (1 + torch.arange(n // 2) * 2.0**-23)
    if seed == 1:  # results that are subnormal
        a, b, c = a * 2.0**-60, b * 2.0**-60, c * 2.0**-125
    got = fma(a, b, c)
    want = torch.tensor([exact_fma(*v) for v in zip(*(t.tolist() for t in (a, b, c)), strict=True)])
    same_bits(got, want)


def test_fma_where_rounding_through_fp64_is_wrong():
    # 2^-24 - 2^-70 on top of 1 + 2^-23 lies just below a tie, on which fp64 rounds it; the even
    # neighbour is the one above. Mirrored for the other sign, and with the excess above the tie.
    x, z = 1 + 2.0**-23, 1 + 2.0**-23
    below, above = 2.0**-24 * (1 - 2.0**-23), 2.0**-24 * (1 + 2.0**-22)
    a = torch.tensor([x, -x, 1 - 2.0**-23, -(1 - 2.0**-23)])
    b = torch.tensor([below, below, above, above])
    c = torch.tensor([z, -z, 1.0, -1.0])
    got = fma(a, b, c)
    assert got.tolist() == [1 + 2.0**-23, -1 - 2.0**-23, 1 + 2.0**-23, -1 - 2.0**-23]
    naive = (a.double() * b.double() + c.double()).float()
    assert naive.tolist() == [1 + 2.0**-22, -1 - 2.0**-22, 1 + 2.0**-23, -1 - 2.0**-23]


def test_fma_of_zeros_and_what_is_not_finite():
    a = torch.tensor([0.0, -0.0, 1.0, 1.0, inf, inf, nan, 0.0, 3e38])
    b = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, inf, 3e38])
    c = torch.tensor([-0.0, -0.0, -1.0, 1.0, 1.0, -inf, 1.0, 1.0, 1.0])
    want = torch.tensor([0.0, -0.0, 0.0, 0.0, inf, nan, nan, nan, inf])
    same_bits(fma(a, b, c), want)


def polar(b: int, s: int, pairs: int, seed: int = 0) -> list[Tensor]:
    """Tables [s, b, 1, pairs] as NeMo makes them."""
    angles = 30 * normal((b, s, pairs), F32, seed=seed)
    turned = torch.view_as_real(torch.polar(torch.ones_like(angles), angles))
    cos, sin = turned.unbind(-1)
    return [t.transpose(0, 1)[:, :, None].contiguous() for t in (cos, sin)]


def by_kernel(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """apply_rope_triton on [b, h, s, d] with integers: the last pairs, adjacent; prefix copied."""
    out, pairs = x.clone(), cos.shape[3]
    begin = x.shape[3] - 2 * pairs
    b, h, s, _ = x.shape
    for i in range(b):
        for t in range(s):
            for p in range(pairs):
                c, sn = float(cos[t, i, 0, p]), float(sin[t, i, 0, p])
                sn = -sn if inverse else sn
                for head in range(h):
                    x0, x1 = (float(x[i, head, t, begin + 2 * p + j]) for j in range(2))
                    m0 = float(torch.tensor(x1) * torch.tensor(sn))
                    m1 = float(torch.tensor(x1) * torch.tensor(c))
                    for j, r in enumerate((exact_fma(x0, c, -m0), exact_fma(x0, sn, m1))):
                        out[i, head, t, begin + 2 * p + j] = r
    return out


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("d", [6, 9, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nemo_bit_for_bit(dtype, d, inverse):
    # d = 9 and 11: an odd prefix.
    b, h, s, pairs = 2, 2, 5, 3
    x = normal((b, h, s, d), dtype, seed=1)
    x[0, 0, 0, 0] = nan if d > 6 else 1.0
    cos, sin = polar(b, s, pairs)
    attrs = Rope(
        2 * pairs,
        d - 2 * pairs,
        angles="cos_sin",
        half_width=True,
        interleaved=True,
        interleaved_output=True,
        numerics="nemo",
        inverse=inverse,
    )
    ports = {"cos": cos, "sin": sin}
    got = steps.run(attrs, {"input": x, **ports}, ["output"], ENGINE)["output"]
    same_bits(got, by_kernel(x, cos, sin, inverse))
    prefix = slice(0, d - 2 * pairs)
    view = BITS[dtype.itemsize]
    assert torch.equal(got.view(view)[..., prefix], x.view(view)[..., prefix])
    back = RopeBackward(**vars(attrs))
    dx = steps.run(back, {"dY": x, **ports}, ["dX"], ENGINE)["dX"]
    same_bits(dx, by_kernel(x, cos, sin, not inverse))


def test_nemo_has_no_bits_of_the_shape():
    # torch's complex product, the eager path, differs between vector body and tail.
    attrs = Rope(4, 1, angles="cos_sin", half_width=True, interleaved=True, numerics="nemo")
    attrs = replace(attrs, interleaved_output=True)
    x = normal((1, 1, 67, 5), F32, seed=3)
    cos, sin = polar(1, 67, 2)
    whole = steps.run(attrs, {"input": x, "cos": cos, "sin": sin}, ["output"], ENGINE)["output"]
    for i in range(67):
        one = {"input": x[:, :, i : i + 1], "cos": cos[i : i + 1], "sin": sin[i : i + 1]}
        same_bits(steps.run(attrs, one, ["output"], ENGINE)["output"], whole[:, :, i : i + 1])


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's formula, cos and sin [b, s, r] in the dtype of x; partial at the head."""
    cos, sin = cos[:, None], sin[:, None]
    r = cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, rest), dim=-1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.3689])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hf_bit_for_bit(dtype, factor, packed):
    b, h, s, d, r = 2, 3, 7, 10, 6
    inv_freq = 10000.0 ** (-torch.arange(0, r, 2) / r)
    position = torch.randint(0, 4000, (b, s), generator=torch.Generator().manual_seed(5))
    freqs = position[..., None].float() * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos(), emb.sin()
    x = normal((b, h, s, d), dtype, seed=1).requires_grad_()
    want = eager(x, (cos * factor).to(dtype), (sin * factor).to(dtype))
    dy = normal((b, h, s, d), dtype, seed=2)
    (want_dx,) = torch.autograd.grad(want, x, dy)
    tables = [t.transpose(0, 1)[:, :, None].contiguous() for t in (cos, sin)]
    attrs = Rope(r, 0, attention_factor=factor, angles="cos_sin", numerics="hf")
    ports: dict[str, Any] = {"cos": tables[0], "sin": tables[1]}
    if packed:
        attrs, ports = replace(attrs, angles="packed"), {"cos_sin": torch.cat(tables, dim=3)}
    got = steps.run(attrs, {"input": x.detach(), **ports}, ["output"], ENGINE)["output"]
    same_bits(got, want.detach())
    back = RopeBackward(**vars(attrs))
    dx = steps.run(back, {"dY": dy, **ports}, ["dX"], ENGINE)["dX"]
    same_bits(dx + 0.0, want_dx + 0.0)  # autograd adds zeros, which turns -0.0 into 0.0


@pytest.mark.parametrize("numerics", ["nemo", "hf"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_mode_moves_roundings_and_nothing_else(numerics, positions):
    for layout in ("half", "first_half", "pairs", "full"):
        for read, written in ((False, False), (True, True), (False, True)):
            c = case(
                "packed",
                layout,
                POSITIONS[positions],
                dtype=F32,
                numerics=numerics,
                interleaved=read,
                interleaved_output=written,
            )
            b, s = c.dead.shape
            x = normal((b, 3, s, 9), F32, seed=1)
            got = steps.run(c.attrs, {"input": x, **c.tensors}, ["output"], ENGINE)["output"]
            torch.testing.assert_close(got.double(), c.formula(x), rtol=0, atol=2e-6)
            leaf = torch.zeros(x.shape, dtype=torch.float64, requires_grad=True)
            (want,) = torch.autograd.grad(c.formula(leaf), leaf, x.double())
            dx = steps.run(c.backward, {"dY": x, **c.tensors}, ["dX"], ENGINE)["dX"]
            torch.testing.assert_close(dx.double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("numerics", ["nemo", "hf"])
def test_strided_and_noncontiguous_data_give_the_same_bits(numerics):
    attrs = Rope(
        6, 1, angles="cos_sin", half_width=True, interleaved=numerics == "nemo", numerics=numerics
    )
    attrs = replace(attrs, interleaved_output=attrs.interleaved)
    x = normal((2, 3, 33, 7), BF16, seed=1)
    cos, sin = polar(1, 33, 3)
    ports = {"cos": cos, "sin": sin}
    want = steps.run(attrs, {"input": x, **ports}, ["output"], ENGINE)["output"]
    given = normal((2, 3, 33, 7), BF16, "packed_qkv", seed=1)
    out = {"output": poisoned((2, 3, 33, 7), BF16, "bshd")}
    same_bits(steps.run(attrs, {"input": given, **ports}, out, ENGINE)["output"], want)
