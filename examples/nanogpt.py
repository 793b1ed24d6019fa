"""A nanoGPT with rotary attention, trained on the King James Bible, character by character.

The other examples that need a language model import GPT from here.
"""

import math
import time

import torch
import torch.nn.functional as F
from torch import nn

from ropegraph.cli.demo.text import batches, king_james
from ropegraph.nn import RotaryAngles, RotaryAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, STEPS = 16, 64, 200


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a skip connection."""

    def __init__(self, width, heads, kv_heads, angles, **options):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = RotaryAttention(width, heads, kv_heads, angles=angles, **options)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, **options):
        x = x + self.attention(self.norm_1(x), **options)
        return x + self.feed(self.norm_2(x))


class GPT(nn.Module):
    """Tokens [b, s] to logits [b, s, vocab]; positions come from rotations alone."""

    def __init__(self, vocab, layers=2, width=64, heads=4, kv_heads=2, rope=None, **options):
        super().__init__()
        angles = RotaryAngles(rope, head_dim=width // heads)  # one for all layers
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, kv_heads, angles, **options) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, tokens, caches=None, **options):
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, cache=None if caches is None else caches[i], **options)
        return self.head(self.norm(x))

    def new_caches(self, batch, max_length):
        return [block.attention.new_cache(batch, max_length) for block in self.blocks]


def loss_of(model, tokens, targets, **options):
    return F.cross_entropy(model(tokens, **options).flatten(0, 1), targets.flatten())


def train(model, corpus, steps, length=LENGTH, batch=BATCH, lr=3e-3, seed=0):
    """AdamW with a cosine schedule; in bf16 on a GPU. Returns the loss at every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    losses = []
    for tokens, targets in batches(corpus, batch, length, steps, seed):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = loss_of(model, tokens.to(DEVICE), targets.to(DEVICE))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main():
    torch.manual_seed(0)
    corpus = king_james()
    model = GPT(corpus.vocab_size).to(DEVICE)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters on {DEVICE}, {corpus.vocab_size} characters")
    start = time.perf_counter()
    losses = train(model, corpus, STEPS)
    for step in range(0, STEPS, 50):
        print(f"step {step:4d}  loss {losses[step]:.3f}")
    last = sum(losses[-20:]) / 20
    print(f"the last 20: {last:.3f}, in {time.perf_counter() - start:.1f} s")
    assert abs(losses[0] - math.log(corpus.vocab_size)) < 1.0  # it knows nothing yet
    assert last < 2.1  # the character before alone gives 2.2


if __name__ == "__main__":
    main()
