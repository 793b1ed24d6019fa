"""Execute every row of the fold table, forward and backward, and measure it against fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ropegraph.cli.demo.graphs import SETTINGS, RotaryAttention, Setting, Sizes
from ropegraph.cli.demo.screen import table
from ropegraph.cli.demo.training import max_or_nan
from ropegraph.testing import oracle

NAMES = ("o", "stats", "dq", "dk", "dv")
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
EXACT = 1e-12

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the incoming gradient, already rounded to the dtype under test."""

    sizes: Sizes
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    half_angles: Tensor

    @property
    def freqs(self) -> Tensor:
        return torch.cat((self.half_angles, self.half_angles), dim=-1)[:, None, None, :]


def random_inputs(sizes: Sizes, dtype: torch.dtype) -> Inputs:
    """Normal numbers, the same for every dtype but for their rounding."""
    generator = torch.Generator().manual_seed(3)
    dims = (sizes.q_dim, sizes.kv_dim, sizes.kv_dim, sizes.q_dim)
    q, k, v, do = (torch.randn(dim, generator=generator).to(dtype) for dim in dims)
    return Inputs(sizes, q, k, v, do, oracle.angles(sizes.s, sizes.rotated))


def by_graphs(inputs: Inputs, setting: Setting) -> Results:
    """Through a forward graph and the gradient graph derived from it."""
    graphs = RotaryAttention(inputs.sizes, setting, inputs.freqs, inputs.q.dtype)
    handed = graphs.run_forward(inputs.q, inputs.k, inputs.v)
    gradients = graphs.run_backward(inputs.do, handed)
    return dict(zip(NAMES, (handed["o"], handed["stats"], *gradients), strict=True))


def by_formula(inputs: Inputs) -> Results:
    """The definition in fp64, differentiated by autograd: no graph, no engine, no fold."""
    q, k, v = (x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    q_rot, k_rot = (oracle.rope(x, inputs.half_angles) for x in (q, k))
    keep = oracle.band(inputs.sizes.s, inputs.sizes.s, right=0)
    o, stats = oracle.attention(q_rot, k_rot, v, attn_scale=inputs.sizes.attn_scale, keep=keep)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do.double())
    return dict(zip(NAMES, (o.detach(), stats.detach(), *gradients), strict=True))


def by_torch(inputs: Inputs) -> Results:
    """The usual formula in plain torch, in the dtype under test: the size of an honest error."""
    sizes, wide = inputs.sizes, torch.promote_types(inputs.q.dtype, torch.float32)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    q_rot, k_rot = (_rotate_tail(x, inputs.half_angles.to(wide)) for x in (q, k))
    o = F.scaled_dot_product_attention(
        q_rot, k_rot, v, is_causal=True, scale=sizes.attn_scale, enable_gqa=True
    )
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do)
    keys = k_rot.detach().to(wide).repeat_interleave(sizes.h_q // sizes.h_kv, dim=1)
    scores = q_rot.detach().to(wide) @ keys.mT * sizes.attn_scale
    future = torch.ones(sizes.s, sizes.s, dtype=torch.bool).triu(1)
    stats = scores.masked_fill(future, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return dict(zip(NAMES, (o.detach(), stats, *gradients), strict=True))


def _rotate_tail(x: Tensor, half_angles: Tensor) -> Tensor:
    half, wide = half_angles.shape[-1], x.to(half_angles.dtype)
    rest, first, second = wide[..., : -2 * half], wide[..., -2 * half : -half], wide[..., -half:]
    cos, sin = half_angles.cos(), half_angles.sin()
    turned = (rest, first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def errors(got: Results, want: Results) -> dict[str, float]:
    """The largest error of each tensor, relative to the largest element of the right one."""
    return {
        name: float((got[name].double() - want[name]).abs().max() / want[name].abs().max())
        for name in NAMES
    }


def limits(peer: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """Twice (what plain torch is wrong by + one rounding of the result); in f64 1e-12."""
    if dtype is torch.float64:
        return dict.fromkeys(NAMES, EXACT)
    half_ulp = torch.finfo(dtype).eps / 2
    return {name: 2 * (error + half_ulp) for name, error in peer.items()}


@dataclass(frozen=True)
class Accuracy:
    """The printed table, and for each dtype the worst error as a share of what is allowed."""

    text: str
    shares: dict[str, float]


def measure(sizes: Sizes, after_each: Callable[[], None]) -> Accuracy:
    """Measure all settings in all dtypes; ``after_each`` is called after each."""
    columns: dict[str, dict[str, dict[str, float]]] = {}
    shares: dict[str, float] = {}
    for label, dtype in DTYPES.items():
        inputs = random_inputs(sizes, dtype)
        want = by_formula(inputs)
        peer = errors(by_torch(inputs), want)
        allowed = limits(peer, dtype)
        column = columns[label] = {"plain torch": peer}
        parts: list[float] = []
        for setting in SETTINGS:
            found = column[setting.name] = errors(by_graphs(inputs, setting), want)
            parts += [found[name] / allowed[name] for name in NAMES]
            after_each()
        shares[label] = max_or_nan(parts)
        column["allowed"] = allowed
    return Accuracy(_table(columns), shares)


def _table(columns: dict[str, dict[str, dict[str, float]]]) -> str:
    def worst(label: str, row: str) -> str:
        return f"{max(columns[label][row].values()):.1e}"

    header = ("fold", "f64 worst", *(f"f32 {name}" for name in NAMES), "bf16 worst")
    rows = [
        (
            row,
            worst("f64", row),
            *(f"{columns['f32'][row][name]:.1e}" for name in NAMES),
            worst("bf16", row),
        )
        for row in columns["f32"]
    ]
    return table(header, rows)
