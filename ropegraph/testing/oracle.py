"""Rotation and attention in fp64, straight from their formulas, with no graph in between.

Every function is differentiable, so the oracle of a gradient is autograd through the oracle.
Inputs of any dtype are taken to fp64 exactly; nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log

import torch
from torch import Tensor


def angles(s: int, rope_dim: int, base: float = 10000.0, start: int = 0) -> Tensor:
    """Angles [s, rope_dim/2] of positions start, start + 1, ..., in fp32 as callers hold them."""
    inv_freq = base ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
    position = torch.arange(start, start + s, dtype=torch.float64)
    return torch.outer(position, inv_freq).float()


def rope(
    x: Tensor,
    angles: Tensor,
    *,
    rope_offset: int | None = None,
    interleaved: bool = False,
    interleaved_output: bool | None = None,
    output_scale: float = 1.0,
    attention_factor: float = 1.0,
    inverse: bool = False,
) -> Tensor:
    """Rotate x [b, h, s, d] as complex numbers; angles [s, r/2] or [b, 1, s, r/2].

    rope_offset: first rotated channel, by default the last r.  interleaved_output: as the input.
    """
    x, half = x.double(), angles.shape[-1]
    offset = x.shape[3] - 2 * half if rope_offset is None else rope_offset
    before, after = x[..., :offset], x[..., offset + 2 * half :]
    segment = x[..., offset : offset + 2 * half]
    real = segment[..., ::2] if interleaved else segment[..., :half]
    imag = segment[..., 1::2] if interleaved else segment[..., half:]
    turn = torch.polar(torch.ones_like(angles.double()), angles.double())
    z = torch.complex(real, imag) * (turn.conj() if inverse else turn) * attention_factor
    written = interleaved if interleaved_output is None else interleaved_output
    turned = torch.stack([z.real, z.imag], dim=4 if written else 3).flatten(3)
    return output_scale * torch.cat([before, turned, after], dim=3)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_scale: float = 1.0,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
    sink: Tensor | None = None,
    drop: Tensor | None = None,
    softmax_input_is_log2: bool = False,
) -> tuple[Tensor, Tensor]:
    """O [b, h_q, s_q, d_v] and natural Stats [b, h_q, s_q, 1].

    keep: True where a query sees a key, broadcast to the logits.  sink: [h_q] or [1, h_q, 1, 1].
    drop: what each weight is multiplied by.
    """
    q, k, v = q.double(), k.double(), v.double()
    b, h_q, s_q, _ = q.shape
    k, v = (torch.repeat_interleave(x, h_q // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * attn_scale
    if softmax_input_is_log2:
        logits = logits * log(2.0)
    if score_mod is not None:
        logits = score_mod(logits)
    if bias is not None:
        logits = logits + bias.double()
    if keep is not None:
        logits = logits.masked_fill(~keep, -inf)
    columns = logits
    if sink is not None:
        sink_column = sink.double().reshape(1, h_q, 1, 1).expand(b, h_q, s_q, 1)
        columns = torch.cat([logits, sink_column], dim=3)
    stats = torch.logsumexp(columns, dim=3, keepdim=True)
    is_dead = stats == -inf
    weights = torch.exp(logits - stats.masked_fill(is_dead, 0.0))
    if drop is not None:
        weights = weights * drop.double()
    return torch.einsum("bhij,bhjd->bhid", weights, v), stats


def band(
    s_q: int,
    s_kv: int,
    *,
    left: int | None = None,
    right: int | None = None,
    bottom_right: bool = False,
    len_q: Sequence[int] | None = None,
    len_kv: Sequence[int] | None = None,
) -> Tensor:
    """True where a query sees a key, [b or 1, 1, s_q, s_kv]: one question asked for each pair."""
    rows_of = list(len_q) if len_q is not None else [s_q] * (len(len_kv) if len_kv else 1)
    keys_of = list(len_kv) if len_kv is not None else [s_kv] * len(rows_of)

    def sees(i: int, j: int, rows: int, keys: int) -> bool:
        corner = i + keys - rows if bottom_right else i
        return (
            i < rows
            and j < keys
            and (right is None or j <= corner + right)
            and (left is None or j > corner - left)
        )

    table = [
        [[[sees(i, j, rows, keys) for j in range(s_kv)] for i in range(s_q)]]
        for rows, keys in zip(rows_of, keys_of, strict=True)
    ]
    return torch.tensor(table, dtype=torch.bool).reshape(len(rows_of), 1, s_q, s_kv)


def alibi(h_q: int, s_q: int, s_kv: int) -> Tensor:
    """The additive term slope_h * (j - i), [1, h_q, s_q, s_kv], with the slopes of Press et al."""
    closest = 2 ** (len(bin(h_q)) - 3)
    start = 2.0 ** (-8.0 / closest)
    slopes = [start ** (n + 1) for n in range(closest)]
    finer = 2.0 ** (-8.0 / (2 * closest))
    slopes += [finer ** (2 * n + 1) for n in range(h_q - closest)]
    terms = [[[slope * (j - i) for j in range(s_kv)] for i in range(s_q)] for slope in slopes]
    return torch.tensor([terms], dtype=torch.float64)


def gradients(output: Tensor, inputs: Sequence[Tensor], d_output: Tensor) -> tuple[Tensor, ...]:
    """The gradients of sum(output * d_output), zeros for an input that does not matter."""
    return torch.autograd.grad(output, inputs, d_output.double(), materialize_grads=True)


def leaf(x: Tensor) -> Tensor:
    """A copy of ``x`` in fp64 to differentiate by."""
    return x.detach().double().clone().requires_grad_()
