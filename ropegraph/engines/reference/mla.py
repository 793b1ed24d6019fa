"""mla_kv_rope and its adjoint in fp64, and its MXFP8 bytes by arithmetic on exponents.

    y1 = x1 cos1 - x2 sin1          dx1 = cos1 dy1 + sin2 dy2
    y2 = x2 cos2 + x1 sin2          dx2 = cos2 dy2 - sin1 dy1

Without quantize everything is fp64 and rounded once. MXFP8 is about bytes, so there the roundings
in between are made as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropegraph.engines.reference.buffers import gather, round_once, scatter
from ropegraph.ir.ops import MlaKvRope, MlaKvRopeBackward
from ropegraph.lowering.engine import Step


@dataclass(frozen=True)
class RunMla:
    """The forward, plain or quantized."""

    step: Step
    attrs: MlaKvRope

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        step, n = self.step, self.attrs.nope_dim
        kv, k_rope = gather(step, "kv", env), gather(step, "k_rope", env)
        cos, sin = (_table(step, port, env, kv.shape[2]) for port in ("cos", "sin"))
        x1, x2, half = k_rope[..., 0::2].double(), k_rope[..., 1::2].double(), cos.shape[-1] // 2
        tables = cos[..., :half], sin[..., :half], cos[..., half:], sin[..., half:]
        cos1, sin1, cos2, sin2 = (t.double() for t in tables)
        if self.attrs.quantize is None:
            shared = torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2], -1)
        else:
            first = _sum_of_products(x1, cos1, -x2, sin1, cos.dtype)
            second = _sum_of_products(x1, sin2, x2, cos2, cos.dtype)
            shared = torch.cat([first, second], -1)
        heads = shared.expand(-1, kv.shape[1], -1, -1)
        made = {"key": torch.cat([kv[..., :n].double(), heads], -1), "value": kv[..., n:].double()}
        for side, x in made.items():
            if self.attrs.quantize is None:
                if step.has(side):
                    scatter(step, side, env, x)
                    part = kv[..., :n] if side == "key" else kv[..., n:]
                    _keep_bits(part, env[step.slot(side)][..., : part.shape[-1]])
                continue
            for axis, form in ((3, "row"), (2, "column")):
                data, scale = _mxfp8(x, axis)
                for port, given in ((f"{side}_{form}", data), (f"{side}_{form}_scale", scale)):
                    if step.has(port):
                        env[step.slot(port)].view(torch.uint8).copy_(given)


@dataclass(frozen=True)
class RunMlaBackward:
    """The adjoint: a sum over the heads where the forward gave each a copy."""

    step: Step
    attrs: MlaKvRopeBackward

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        step, n, v = self.step, self.attrs.nope_dim, self.attrs.v_dim
        first = next(iter(step.node.inputs))
        b, h, s, _ = step.value(first).dim
        cos, sin = (_table(step, port, env, s).double() for port in ("cos", "sin"))
        r = cos.shape[-1]
        key, value = (
            gather(step, port, env).double() if step.has(port) else cos.new_zeros(b, h, s, width)
            for port, width in (("dKey", n + r), ("dValue", v))
        )
        if step.has("dKV"):
            scatter(step, "dKV", env, torch.cat([key[..., :n], value], -1))
            out = env[step.slot("dKV")]
            for port, part in (("dKey", out[..., :n]), ("dValue", out[..., n:])):
                if step.has(port):
                    _keep_bits(env[step.slot(port)][..., : part.shape[-1]], part)
        if step.has("dK_rope"):
            dy1, dy2 = key[..., n:].sum(1, keepdim=True).chunk(2, -1)
            (cos1, cos2), (sin1, sin2) = cos.chunk(2, -1), sin.chunk(2, -1)
            pairs = torch.stack([cos1 * dy1 + sin2 * dy2, cos2 * dy2 - sin1 * dy1], -1)
            scatter(step, "dK_rope", env, pairs.flatten(3))


def _keep_bits(x: Tensor, out: Tensor) -> None:
    """Copy channels as they are: on its way through fp64 a NaN may change its bits."""
    if x.dtype == out.dtype:
        out.copy_(x)


def _table(step: Step, port: str, env: Sequence[Tensor], s: int) -> Tensor:
    return env[step.slot(port)].detach()[:s].permute(1, 2, 0, 3)


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor, dtype: torch.dtype) -> Tensor:
    """a b + round(c d), rounded to ``dtype`` and then to bf16, of bf16 and fp32 numbers."""
    product, other = a * b, round_once(c * d, dtype).double()
    total = product + other
    # What fp64 lost of the sum decides where the rest of it is a tie, or not quite one.
    larger = torch.where(product.abs() >= other.abs(), product, other)
    smaller = torch.where(product.abs() >= other.abs(), other, product)
    lost = smaller - (total - larger)
    beyond = torch.nextafter(total, total + torch.sign(lost) * torch.inf)
    mantissa = total.abs().view(torch.int64) & 1
    is_tie_breaker = torch.isfinite(total) & (lost != 0) & (mantissa == 0)
    return round_once(
        round_once(torch.where(is_tie_breaker, beyond, total), dtype).double(), torch.bfloat16
    ).double()


def _mxfp8(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The bytes of the data and of the scales of blocks of 32 along ``axis``."""
    before, n, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    blocks = x.reshape(*before, n // 32, 32, *after)
    known = torch.where(blocks.isnan(), 0.0, blocks.abs())
    amax = known.amax(axis + 1) if known.numel() else known.sum(axis + 1)
    limit = (amax.float() * torch.tensor(1 / 448, dtype=torch.float32)).double()
    # limit = m 2^e with 0.5 <= m < 1: a power of two has m = 0.5, all else is rounded up.
    m, e = torch.frexp(torch.where(limit.isinf() | (limit == 0), 1.0, limit))
    power = torch.where(m == 0.5, e - 1, e).clamp(min=-127)
    power = torch.where(limit == 0, -127, torch.where(limit.isinf(), 127, power))
    inverse = (1023 - power.long() << 52).view(torch.float64)  # 2^-power
    scaled = blocks * inverse.unsqueeze(axis + 1)
    return _e4m3(scaled).flatten(axis, axis + 1), (power + 127).to(torch.uint8)


def _e4m3(x: Tensor) -> Tensor:
    """The bytes of fp64 numbers, rounded to nearest even, at most 448; every NaN is 0x7f."""
    size = x.abs().clamp(max=448.0).nan_to_num(0.0)
    _, e = torch.frexp(size)
    step = torch.where(size == 0, -6, e - 1).clamp(min=-6) - 3  # of the last of three binary places
    steps = torch.round(torch.ldexp(size, -step)).long()  # 8 to 16, below 8 if subnormal
    # Counting on from the exponent carries 16 over into the next binade.
    byte = ((step + 3 + 6) * 8 + steps).clamp(max=0x7E)
    byte = byte | (torch.signbit(x).long() << 7)
    return torch.where(x.isnan(), 0x7F, byte).to(torch.uint8)
