"""Inputs for the functions, and what they should give: fp64 formulas, differentiated by torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ropegraph.functional import attention
from ropegraph.testing import oracle

F64 = torch.float64
B, H_Q, H_KV, S, D = 2, 6, 2, 17, 16
SPLIT = (H_Q, H_KV, H_KV)


def table(s: int = S, r: int = D) -> Tensor:
    """Angles [s, r], f32, both halves alike."""
    half = oracle.angles(s, r)
    return torch.cat((half, half), dim=-1)


def heads(
    dtype: torch.dtype = torch.float32, s: int = S, s_kv: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v that require grad, with memory in the order b, s, h, d."""
    g = torch.Generator().manual_seed(seed)
    sizes = ((H_Q, s), (H_KV, s_kv or s), (H_KV, s_kv or s))
    made = [torch.randn(B, n, h, D, generator=g, dtype=F64).to(dtype) for h, n in sizes]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in made)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Causal attention, whole heads rotated."""
    return attention(q, k, v, table(), is_causal=True, enable_gqa=True, **options)


@dataclass(frozen=True)
class Case:
    """An attention: keywords of ours, and of the oracle."""

    name: str
    ours: Mapping[str, Any] = field(default_factory=dict)
    oracle: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    s_kv: int = S
    r: int = D


def expected(case: Case, q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> Tensor:
    """O in fp64, differentiable in all that is given."""
    half = oracle.angles(max(S, case.s_kv), case.r)
    turned = (oracle.rope(x, half[: x.shape[2]], **case.rope) for x in (q, k))
    given = {"attn_scale": D**-0.5, **case.oracle, **tensors}
    return oracle.attention(*turned, v, **given)[0]


def result(case: Case, q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> Tensor:
    freqs = table(max(S, case.s_kv), case.r)
    return attention(q, k, v, freqs, enable_gqa=True, **case.ours, **tensors)


CAUSAL = oracle.band(S, S, right=0)
LENGTHS = torch.tensor([S, 5])
CASES = (
    Case("plain"),
    Case("causal", {"is_causal": True}, {"keep": CAUSAL}),
    Case("scale", {"scale": -0.7}, {"attn_scale": -0.7}),
    Case("scale 0", {"scale": 0.0, "is_causal": True}, {"attn_scale": 0.0, "keep": CAUSAL}),
    Case("symmetric", {"fold": "symmetric", "fold_log2": True}),
    Case("fold off", {"fold": "off"}),
    Case("recompute", {"recompute_rope": True, "is_causal": True}, {"keep": CAUSAL}),
    Case("recompute log2", {"recompute_rope": True, "fold": "symmetric", "fold_log2": True}),
    Case(
        "window",
        {"is_causal": True, "window": 4},
        {"keep": oracle.band(S, S, left=4, right=0)},
    ),
    Case("sides", {"window": (3, 2)}, {"keep": oracle.band(S, S, left=4, right=2)}),
    Case(
        "bottom right",
        {"causal_bottom_right": True},
        {"keep": oracle.band(S, 23, right=0, bottom_right=True)},
        s_kv=23,
    ),
    Case(
        "lengths",
        {"seq_lens": LENGTHS, "is_causal": True},
        {"keep": oracle.band(S, S, right=0, len_q=[S, 5], len_kv=[S, 5])},
    ),
    Case("alibi", {"alibi": True}, {"bias": oracle.alibi(H_Q, S, S)}),
    Case("softcap", {"softcap": 0.8}, {"score_mod": lambda x: 0.8 * torch.tanh(x / 0.8)}),
    Case("partial", {"rope_dim": 6, "rope_offset": 0}, rope={"rope_offset": 0}, r=6),
    Case(
        "pairs",
        {"interleaved": True, "table_layout": "first_half", "attention_factor": 1.2},
        rope={"interleaved": True, "attention_factor": 1.2},
    ),
)
