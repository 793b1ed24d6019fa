"""A plain training loop whose attention is one function call.

The task: tokens of a sequence repeat after a gap, and the model is to say what comes next. Only the
rotation tells it how far back to look. The same loop with attention in plain torch has the same
losses.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ropegraph import angles
from ropegraph.functional import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H_Q, H_KV, S, D, VOCAB, GAP, STEPS = 16, 4, 2, 64, 32, 20, 7, 150
WIDTH = H_Q * D
INV_FREQ = angles.default(head_dim=D, rope_theta=1000.0, device=DEVICE).inv_freq


def by_ropegraph(q, k, v):
    """Q and K come as they are projected: the function rotates them."""
    return attention(q, k, v, inv_freq=INV_FREQ, is_causal=True, enable_gqa=True)


def by_torch(q, k, v):
    table = torch.outer(torch.arange(S, device=DEVICE), INV_FREQ)
    cos, sin = table.cos(), table.sin()

    def rotate(x):
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)


class Model(nn.Module):
    """Embedding, one attention layer with a skip connection, and a head."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, (H_Q + 2 * H_KV) * D, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        heads = self.qkv(x).view(*tokens.shape, -1, D).transpose(1, 2)
        o = self.attend(*heads.split((H_Q, H_KV, H_KV), dim=1))
        return self.head(x + self.out(o.transpose(1, 2).flatten(2)))


def sequences(generator):
    """[b, s + 1]: every token is the one GAP places before, once in ten a new one."""
    tokens = torch.randint(VOCAB, (B, S + 1), generator=generator)
    repeats = torch.rand(B, S + 1, generator=generator) < 0.9
    for i in range(GAP, S + 1):
        tokens[:, i] = torch.where(repeats[:, i], tokens[:, i - GAP], tokens[:, i])
    return tokens.to(DEVICE)


def train(attend):
    torch.manual_seed(0)
    model = Model(attend).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        tokens = sequences(generator)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits[:, GAP:].flatten(0, 1), tokens[:, GAP + 1 :].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    ours, plain = train(by_ropegraph), train(by_torch)
    for step in range(0, STEPS, 30):
        print(f"step {step:3d}  loss {ours[step]:.4f}  in plain torch {plain[step]:.4f}")
    print(f"last      loss {ours[-1]:.4f}  in plain torch {plain[-1]:.4f}")
    first = max(abs(a - b) for a, b in zip(ours[:10], plain[:10], strict=True))
    last, plain_last = (sum(x[-20:]) / 20 for x in (ours, plain))
    print(f"the first 10 differ by at most {first:.1e}, means of the last 20 by "
          f"{abs(last - plain_last):.1e}")  # fmt: skip
    assert first < (1e-4 if DEVICE == "cpu" else 0.02)  # bf16 on a GPU
    assert abs(last - plain_last) < 0.05
    assert ours[0] > 2.5
    assert last < 0.8  # what is new, once in ten, costs 0.6 and cannot be foreseen


if __name__ == "__main__":
    main()
