"""A small decoder in plain torch, with its attention left open.

Token embedding, then blocks of RMSNorm, rotary grouped-query attention and SwiGLU, then a linear
head: the shape of Llama. ``attention`` gets q, k and v unrotated, so rotating them is its job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [b, h_q, s, d], k and v [b, h_kv, s, d], none of them rotated -> o [b, h_q, s, d]."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder; ``rotated`` is the width of a head that takes part in the rotation."""

    vocab: int
    layers: int = 3
    width: int = 96
    q_heads: int = 6
    kv_heads: int = 2
    head: int = 32
    rotated: int = 32
    hidden: int = 256
    length: int = 128
    rope_base: float = 10_000.0

    def angles(self) -> Tensor:
        """Angles in radians, [length, 1, 1, rotated] f32; the second half repeats the first."""
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated
        positions = torch.arange(self.length, dtype=torch.float64)
        half = torch.outer(positions, self.rope_base**-exponents)
        return torch.cat((half, half), dim=-1).float()[:, None, None, :]


class SelfAttention(nn.Module):
    """Projections around the attention function."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
        self.head = shape.head
        self.qkv = nn.Linear(shape.width, sum(self.heads) * shape.head, bias=False)
        self.out = nn.Linear(shape.q_heads * shape.head, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        packed = self.qkv(x).view(b, s, sum(self.heads), self.head).transpose(1, 2)
        q, k, v = packed.split(self.heads, dim=1)
        o = self.attention(q, k, v)
        return self.out(o.transpose(1, 2).reshape(b, s, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """Attention, then the feed-forward layer, each behind a norm and beside a skip connection."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = SelfAttention(shape, attention)
        self.feed_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed = SwiGLU(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Decoder(nn.Module):
    """Tokens [b, s] -> logits [b, s, vocab]."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seeded_decoder(shape: Shape, attention: Attention, seed: int) -> Decoder:
    """Make a decoder whose weights depend on ``shape`` and ``seed`` alone."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Decoder(shape, attention)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model
