"""RotaryAttention in fp64 by plain torch, from the module's own weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropegraph.nn import RotaryAttention
from ropegraph.testing import oracle

F64 = torch.float64


def attended(
    module: RotaryAttention, x: Tensor, positions: Tensor | None = None, **band: Any
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(result, weights by name, x): fp64 leaves, so that all can be differentiated.

    positions: [b, s].  band: len_q and len_kv, for oracle.band.
    """
    weights = {name: oracle.leaf(p) for name, p in module.named_parameters()}
    leaf = oracle.leaf(x)
    b, s, _ = x.shape
    d = module.head_dim
    packed = leaf @ weights["qkv_proj.weight"].T + weights.get("qkv_proj.bias", 0.0)
    q, k, v = packed.view(b, s, -1, d).transpose(1, 2).split(list(module.split), dim=1)
    if module.q_norm is not None:
        q = _norm(q, weights["q_norm.weight"], module.q_norm.eps)
        k = _norm(k, weights["k_norm.weight"], module.q_norm.eps)
    inv_freq = module.angles.inv_freq.double()
    at = torch.arange(s)[None] if positions is None else positions
    half = (at[:, None, :, None].float() * inv_freq.float()).double()
    turn = {"rope_offset": 0, "attention_factor": module.angles.attention_factor}
    q, k = (oracle.rope(y, half, **turn) for y in (q, k))
    right = 0 if module.is_causal else None
    keep = oracle.band(s, s, left=module.window, right=right, **band)
    scale = d**-0.5 if module.scale is None else module.scale
    o = oracle.attention(q, k, v, attn_scale=scale, keep=keep)[0]
    rows = o.transpose(1, 2).reshape(b, s, -1)
    return rows @ weights["o_proj.weight"].T + weights.get("o_proj.bias", 0.0), weights, leaf


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
