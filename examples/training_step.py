"""One training step whose attention, forward and backward, runs through two ropegraph graphs.

The forward graph rotates Q and K and attends, with the softmax scale folded into the rotation of
Q; `backward_graph` derives the gradient graph with the same fold. A torch.autograd.Function joins
them, and a plain torch model of the same weights shows that loss and gradients are the same.
"""

import torch
import torch.nn.functional as F
from torch import nn

import ropegraph as rg

B, H_Q, H_KV, S, D = 2, 4, 2, 48, 32
WIDTH, VOCAB = H_Q * D, 50


def angles():
    """[s, 1, 1, d] radians; the second half of the columns repeats the first."""
    half = torch.outer(torch.arange(S), 10_000.0 ** (-torch.arange(0, D, 2) / D))
    return torch.cat((half, half), dim=-1)[:, None, None, :].float()


def record():
    """The forward graph, and the gradient graph derived from it."""
    forward = rg.pygraph("forward", torch.float32, fold="q")
    q = forward.tensor([B, H_Q, S, D], name="q")
    k = forward.tensor([B, H_KV, S, D], name="k")
    v = forward.tensor([B, H_KV, S, D], name="v")
    freqs = forward.tensor([S, 1, 1, D], data_type=torch.float32, name="freqs")
    q_rot = forward.rope(q, freqs, name="rope_q").set_name("q_rot")
    k_rot = forward.rope(k, freqs, name="rope_k").set_name("k_rot")
    o, stats = forward.sdpa(
        q_rot, k_rot, v, attn_scale=D**-0.5, use_causal_mask=True, name="attention"
    )
    o.set_output(True).set_name("o")
    stats.set_name("stats")
    backward = forward.backward_graph(outputs=[o], inputs=[q, k, v])
    forward.build()
    backward.build()
    return forward, backward


FORWARD, BACKWARD = record()
FREQS = angles()


class Attention(torch.autograd.Function):
    """q, k, v, none of them rotated -> o; in the backward do -> dq, dk, dv."""

    @staticmethod
    def forward(ctx, q, k, v):
        pack = {"q": q, "k": k, "v": v, "freqs": FREQS}
        pack |= FORWARD.allocate()  # o, and what the backward wants saved: q_rot, k_rot and stats
        FORWARD.execute(pack)
        ctx.save_for_backward(*(pack[name] for name in BACKWARD.saved))
        return pack["o"]

    @staticmethod
    def backward(ctx, do):
        saved = dict(zip(BACKWARD.saved, ctx.saved_tensors, strict=True))
        grads = BACKWARD.allocate()
        BACKWARD.execute({**saved, "do": do.contiguous(), **grads})
        return grads["dq"], grads["dk"], grads["dv"]


def by_graphs(q, k, v):
    return Attention.apply(q.contiguous(), k.contiguous(), v.contiguous())


def by_torch(q, k, v):
    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        table = FREQS[:, 0, 0]
        return x * table.cos() + torch.cat((-second, first), dim=-1) * table.sin()

    return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)


class Model(nn.Module):
    """Embedding, one attention layer with a skip connection, and a head."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, (H_Q + 2 * H_KV) * D, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        heads = self.qkv(x).view(B, S, -1, D).transpose(1, 2)
        o = self.attention(*heads.split((H_Q, H_KV, H_KV), dim=1))
        return self.head(x + o.transpose(1, 2).flatten(2))


def step(attention):
    """One step of SGD from the same weights and tokens; the loss and every gradient."""
    torch.manual_seed(0)
    model = Model(attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(VOCAB, (B, S + 1))
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def main():
    print(FORWARD.explain(), end="\n\n")
    print("handed to the backward:", ", ".join(BACKWARD.saved))
    loss, gradients = step(by_graphs)
    plain_loss, plain_gradients = step(by_torch)
    print(f"loss {loss:.6f}, in plain torch {plain_loss:.6f}")
    assert abs(loss - plain_loss) < 1e-6
    for name, gradient in gradients.items():
        gap = ((gradient - plain_gradients[name]).norm() / plain_gradients[name].norm()).item()
        print(f"gradient of {name:<18} relative difference {gap:.1e}")
        assert gap < 1e-5


if __name__ == "__main__":
    main()
