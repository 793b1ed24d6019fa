"""QK norm: every head of Q and K is normalised before it turns, as in Qwen3.

Logits are then bounded by the weights of the norms, however large the projections are: from a start
where they are much too large, a model with the norm learns faster than one without. Norms and
rotations of Q and K are one launch, forward and backward. The module is checked against the formula
in fp64.
"""

import torch
from nanogpt import DEVICE, GPT, train

from ropegraph.cli.demo.text import king_james
from ropegraph.nn import RotaryAttention

LOUD = 16.0  # how much too large the projections start


def by_formula(layer, x):
    """RotaryAttention with QK norm, in plain torch."""
    b, s, _ = x.shape
    heads = (x @ layer.qkv_proj.weight.T).view(b, s, -1, layer.head_dim).transpose(1, 2)
    q, k, v = heads.split(layer.split, dim=1)
    table = torch.outer(torch.arange(s, device=x.device), layer.angles.inv_freq)
    turn = torch.polar(torch.ones_like(table), table).to(torch.complex128)

    def turned(y, norm):
        y = y * (y.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
        z = torch.complex(*y.chunk(2, dim=-1)) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    o = torch.nn.functional.scaled_dot_product_attention(
        turned(q, layer.q_norm), turned(k, layer.k_norm), v, is_causal=True, enable_gqa=True
    )
    return o.transpose(1, 2).flatten(2) @ layer.o_proj.weight.T


def check():
    layer = RotaryAttention(48, 6, 2, qk_norm=True, device=DEVICE, dtype=torch.float64)
    x = torch.randn(2, 30, 48, device=DEVICE, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    ours, wanted = layer(x), by_formula(layer, x)
    pairs = zip(
        (ours, *torch.autograd.grad(ours.sin().sum(), leaves)),
        (wanted, *torch.autograd.grad(wanted.sin().sum(), leaves)),
        strict=True,
    )
    gap = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    print(f"result and gradients differ from the formula by {gap:.1e}")
    assert gap < 1e-5  # angles are f32


@torch.no_grad()
def largest_logit(model, tokens):
    """Of the first layer: max |q.k| / sqrt(d), which no rotation changes by more than its angle."""
    block = model.blocks[0]
    layer, x = block.attention, block.norm_1(model.embedding(tokens))
    heads = layer.qkv_proj(x).unflatten(2, (-1, layer.head_dim)).transpose(1, 2)
    q, k, _ = heads.split(layer.split, dim=1)
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    return (q.norm(dim=-1).amax() * k.norm(dim=-1).amax() * layer.head_dim**-0.5).item()


def main():
    torch.manual_seed(0)
    check()
    corpus, finals = king_james(), {}
    for qk_norm in (False, True):
        torch.manual_seed(1)
        model = GPT(corpus.vocab_size, qk_norm=qk_norm).to(DEVICE)
        with torch.no_grad():
            for block in model.blocks:
                q_and_k = sum(block.attention.split[:2]) * block.attention.head_dim
                block.attention.qkv_proj.weight[:q_and_k] *= LOUD
        before = largest_logit(model, corpus.tokens[None, :64].to(DEVICE))
        losses = train(model, corpus, steps=100)
        finals[qk_norm] = sum(losses[-10:]) / 10
        after = largest_logit(model, corpus.tokens[None, :64].to(DEVICE))
        word = "with" if qk_norm else "without"
        print(f"{word:<8} the norm: |q||k|/sqrt(d) up to {before:.0f}, after training {after:.0f}, "
              f"loss {finals[qk_norm]:.3f}")  # fmt: skip
        if qk_norm:
            assert before <= model.blocks[0].attention.head_dim ** 0.5 * 1.001
    assert finals[True] < finals[False] - 0.1


if __name__ == "__main__":
    main()
