"""mla_kv_rope and its backward in torch: any device, any strides, nothing read on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.exact import fma, product, wide
from ropegraph.engines.torch_executor.mxfp8 import quantize
from ropegraph.ir.ops import MlaKvRope, MlaKvRopeBackward
from ropegraph.lowering.engine import Executable, Step


class MlaStep:
    """key and value; the turned channels are made once and copied to every head."""

    def __init__(self, step: Step, attrs: MlaKvRope) -> None:
        self.nope = attrs.nope_dim
        self.kv, self.k_rope, self.cos, self.sin = map(step.slot, ("kv", "k_rope", "cos", "sin"))
        self.key, self.value = map(step.slot, ("key", "value"))

    def turned(self, env: Sequence[Tensor]) -> Tensor:
        """The channels that all heads share, [b, 1, s, r], unrounded."""
        return rotate(env[self.k_rope], env[self.cos], env[self.sin])

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kv, nope = env[self.kv], self.nope
        if self.key >= 0:
            key = env[self.key]
            key[..., :nope].copy_(kv[..., :nope])
            key[..., nope:].copy_(self.turned(env))
        if self.value >= 0:
            env[self.value].copy_(kv[..., nope:])


class Mxfp8Step(MlaStep):
    """key and value as MXFP8: each of the eight outputs that is there."""

    def __init__(self, step: Step, attrs: MlaKvRope) -> None:
        super().__init__(step, attrs)
        self.outputs = {
            side: tuple(
                step.slot(f"{side}_{form}")
                for form in ("row", "row_scale", "column", "column_scale")
            )
            for side in ("key", "value")
        }

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        kv, nope = env[self.kv], self.nope
        heads = (-1, kv.shape[1], -1, -1)
        turned = self.turned(env).to(kv.dtype)
        key = torch.cat([kv[..., :nope], turned.expand(heads)], dim=3)
        for side, x in (("key", key), ("value", kv[..., nope:])):
            slots = self.outputs[side]
            for axis, (data, scale) in ((3, slots[:2]), (2, slots[2:])):
                if data < 0 and scale < 0:
                    continue
                for slot, made in zip((data, scale), quantize(x, axis), strict=True):
                    if slot >= 0:
                        env[slot].view(torch.uint8).copy_(made)


class MlaBackwardStep:
    """dKV is a copy; dK_rope is summed over the heads, turned back, and rounded once."""

    def __init__(self, step: Step, attrs: MlaKvRopeBackward) -> None:
        self.nope = attrs.nope_dim
        self.key, self.value, self.cos, self.sin = map(step.slot, ("dKey", "dValue", "cos", "sin"))
        self.kv, self.k_rope = map(step.slot, ("dKV", "dK_rope"))

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        nope = self.nope
        key = env[self.key] if self.key >= 0 else None
        value = env[self.value] if self.value >= 0 else None
        if self.kv >= 0:
            first, last = env[self.kv][..., :nope], env[self.kv][..., nope:]
            first.zero_() if key is None else first.copy_(key[..., :nope])
            last.zero_() if value is None else last.copy_(value)
        if self.k_rope >= 0:
            self._shared(env, key, env[self.k_rope])

    def _shared(self, env: Sequence[Tensor], key: Tensor | None, out: Tensor) -> None:
        if key is None:
            out.zero_()
            return
        dtype = wide(key.dtype)
        total = key[..., self.nope :].sum(1, keepdim=True, dtype=dtype)
        cos, sin = (_rows(env[t], out.shape[2]).to(dtype) for t in (self.cos, self.sin))
        (g1, g2), (cos1, cos2), (sin1, sin2) = (t.chunk(2, -1) for t in (total, cos, sin))
        out[..., 0::2].copy_(g1 * cos1 + g2 * sin2)
        out[..., 1::2].copy_(g2 * cos2 - g1 * sin1)


def rotate(k_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Adjacent pairs of [b, 1, s, r] turned into halves, in the wider type of data and table.

    In both halves the product with the second channel of a pair is the one that is rounded.
    """
    dtype = torch.promote_types(k_rope.dtype, cos.dtype)
    x1, x2 = k_rope[..., 0::2], k_rope[..., 1::2]
    (cos1, cos2), (sin1, sin2) = (_rows(t, k_rope.shape[2]).chunk(2, -1) for t in (cos, sin))
    first = fma(x1, cos1, -product(x2, sin1, dtype), dtype)
    second = fma(x1, sin2, product(x2, cos2, dtype), dtype)
    return torch.cat([first, second], dim=-1)


def _rows(table: Tensor, s: int) -> Tensor:
    """The rows of the first s tokens, [1, 1, s, r]."""
    return table[:s].permute(1, 2, 0, 3)


def compile_mla(step: Step) -> Executable:
    """The executable of an MlaKvRope or MlaKvRopeBackward step."""
    match step.node.attrs:
        case MlaKvRope(quantize=None) as attrs:
            return MlaStep(step, attrs)
        case MlaKvRope() as attrs:
            return Mxfp8Step(step, attrs)
        case MlaKvRopeBackward() as attrs:
            return MlaBackwardStep(step, attrs)
        case other:
            raise TypeError(f"{other} is no mla_kv_rope")
