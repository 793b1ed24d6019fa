"""A block written for TransformerEngine, ported by its import: rotation of packed QKV in training.

Only the import differs from a script for TransformerEngine. The same step in plain torch, in fp64,
shows that loss and gradients are right, and four ranks of a context parallel group that together
they give what one rank gives.
"""

import torch
import torch.nn.functional as F

# from transformer_engine.pytorch.attention.rope import (
from ropegraph.compat.transformer_engine import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)

S, B, GROUPS, RATIO, D = 32, 2, 2, 3, 16  # sbhd; each group has 3 heads of Q, one of K and V
SPLIT = [RATIO * D, D, D]
FREQS = RotaryPositionEmbedding(D, rotary_percent=0.5)(S).cpu()


def attend(q, k, v):
    """[s, b, h, d] -> [s, b, h, d], causal."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.permute(2, 0, 1, 3)


def by_compat(x, weight):
    qkv = F.linear(x, weight).view(S, B, GROUPS, sum(SPLIT))
    return attend(*apply_fused_qkv_rotary_pos_emb(qkv, FREQS, FREQS, SPLIT))


def by_torch(x, weight):
    def rotate(t):
        r = FREQS.shape[-1]
        head, rest = t[..., :r], t[..., r:]
        first, second = head.chunk(2, dim=-1)
        angles = FREQS.to(t.dtype)
        turned = head * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
        return torch.cat((turned, rest), dim=-1)

    qkv = F.linear(x, weight).view(S, B, GROUPS, sum(SPLIT))
    q, k, v = qkv.split(SPLIT, dim=-1)
    return attend(rotate(q.reshape(S, B, -1, D)), rotate(k), v)


def step(block, dtype):
    """Loss and gradients of one step, from the same weights."""
    torch.manual_seed(0)
    weight = torch.randn(GROUPS * sum(SPLIT), 24) / 5
    x = torch.randn(S, B, 24)
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
    loss = block(*leaves).square().mean()
    loss.backward()
    return loss.item(), [t.grad.double() for t in leaves]


def ranks(cp_size):
    """The rotation of one tensor, whole, and put together from the ranks of a group."""
    t = torch.randn(S, B, 4, D)
    whole = apply_rotary_pos_emb(t, FREQS, fused=True)
    together = torch.empty_like(whole)
    for rank in range(cp_size):
        chunks = torch.arange(S).chunk(2 * cp_size)
        own = torch.cat((chunks[rank], chunks[2 * cp_size - 1 - rank]))
        together[own] = apply_rotary_pos_emb(
            t[own], FREQS, fused=True, cp_size=cp_size, cp_rank=rank
        )
    return whole, together


def main():
    loss, gradients = step(by_compat, torch.float32)
    exact, exact_gradients = step(by_torch, torch.float64)
    print(f"loss {loss:.6f}, in fp64 {exact:.6f}")
    assert abs(loss - exact) < 1e-6
    for name, gradient, wanted in zip(("x", "weight"), gradients, exact_gradients, strict=True):
        gap = ((gradient - wanted).norm() / wanted.norm()).item()
        print(f"gradient of {name:<7} relative difference {gap:.1e}")
        assert gap < 1e-5
    whole, together = ranks(4)
    print("four ranks together have the bits of one:", torch.equal(whole, together))
    assert torch.equal(whole, together)


if __name__ == "__main__":
    main()
