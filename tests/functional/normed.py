"""QK norm for the tests: weights, ours, and a formula in fp64."""

from typing import Any

import torch
from torch import Tensor

from ropegraph.functional import attention
from ropegraph.testing import oracle
from tests.functional.cases import CAUSAL, F64, SPLIT, B, D, S, table

EPS = 0.03  # large enough to be seen


def weights(dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    made = (torch.randn(D, generator=g, dtype=F64) + 0.5 for _ in "qk")
    q, k = (w.to(dtype).requires_grad_() for w in made)
    return q, k


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * weight / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()


def formula(
    q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor, *, turn: bool = True, **given: Any
) -> Tensor:
    """O in fp64, differentiable in all that is given."""
    rope = given.pop("rope", {})
    heads = [norm(q, w_q), norm(k, w_k)]
    if turn:
        half = oracle.angles(max(q.shape[2], k.shape[2]), rope.pop("r", D))
        heads = [oracle.rope(x, half[: x.shape[2]], **rope) for x in heads]
    return oracle.attention(*heads, v, **{"attn_scale": D**-0.5, "keep": CAUSAL, **given})[0]


def ours(*given: Tensor, freqs: Tensor | None = None, **options: Any) -> Tensor:
    """attention of q, k, v and both weights, causal."""
    q, k, v, w_q, w_k = given
    freqs = table() if freqs is None else freqs
    options = {"is_causal": True, "enable_gqa": True, "norm_eps": EPS, **options}
    return attention(q, k, v, freqs, q_norm=w_q, k_norm=w_k, **options)


def packed(dtype: torch.dtype = F64) -> tuple[Tensor, list[Tensor]]:
    """A packed tensor, and q, k and v as views of it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, sum(SPLIT), D, dtype=F64, generator=g).to(dtype).requires_grad_()
    return x, [part.transpose(1, 2) for part in x.split(SPLIT, dim=2)]
