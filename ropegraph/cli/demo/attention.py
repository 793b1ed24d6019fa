"""Two attentions for the demo's decoder: the usual formula in torch, and ropegraph's graphs."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ropegraph.cli.demo.graphs import RotaryAttention, Setting, Sizes
from ropegraph.cli.demo.model import Attention, Shape


def plain_attention(shape: Shape) -> Attention:
    """Rotate-half and torch's own causal attention: what a model without ropegraph does."""
    angles = shape.angles()[:, 0, 0]
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, scale=shape.head**-0.5, enable_gqa=True
        )

    return attention


def slightly_wrong_attention(shape: Shape) -> Attention:
    """The same forward, and a gradient of q that is 1 % too large: what a check must catch."""
    right = plain_attention(shape)

    def one_percent_more(gradient: Tensor) -> Tensor:
        return 1.01 * gradient

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.view_as(q)
        q.register_hook(one_percent_more)
        return right(q, k, v)

    return attention


def graph_attention(shape: Shape, setting: Setting) -> Attention:
    """Rotation and attention by a forward graph, their gradients by the graph derived from it."""
    built: dict[tuple[int, ...], RotaryAttention] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h_q, s, d = q.shape
        strides = (q.stride(), k.stride(), v.stride())
        key = (b, *strides[0], *strides[1], *strides[2])
        if key not in built:
            sizes = Sizes(b, h_q, k.shape[1], s, d, shape.rotated)
            built[key] = RotaryAttention(sizes, setting, shape.angles(), q.dtype, strides)
        return cast(Tensor, _Attend.apply(q, k, v, built[key]))

    return attention


class _Attend(torch.autograd.Function):
    """Two graphs as one differentiable function of torch."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, graphs: RotaryAttention) -> Tensor:
        handed = graphs.run_forward(q, k, v)
        ctx.graphs, ctx.names = graphs, tuple(handed)
        ctx.save_for_backward(*handed.values())
        return handed["o"]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        handed = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        return (*ctx.graphs.run_backward(gradients[0], handed), None)
