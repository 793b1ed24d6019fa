"""How far roundings alone may move what attention gives.

Where terms cancel, as in the gradient of keys that are all alike, the exact result is small or 0
and what an engine writes is nothing but the roundings of the terms. An ulp of such a result says
nothing; the size of the terms does:

    o = P v            dV = P^T dO            dQ = a dS k, dK = a dS^T q
    dS = P (dP - delta), dP = dO v^T, delta = sum(dO o)

Each P, dP and delta is off by a rounding of the type of the data, and P by those of its logit too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from ropegraph.engines.reference.buffers import gather
from ropegraph.engines.reference.sdpa import attention, natural_scale, read_inputs
from ropegraph.ir.ops import Attention, Sdpa
from ropegraph.lowering.engine import Step

# The rms of a rounding, in eps: it is anywhere within half of one, and most numbers are no power
# of two.
ROUNDING = 0.25


def noise(step: Step, env: Sequence[Tensor]) -> dict[str, float]:
    """Output of an attention -> its rms if it were nothing but roundings that add up at random.

    Gradients of bias and sink, and other operations, are left out.
    """
    attrs = step.node.attrs
    if not isinstance(attrs, Attention):
        return {}
    given = read_inputs(step, attrs, env)
    q, k, v = (given.tensors[port] for port in "qkv")
    group = tuple(max(q.shape[1] // max(x.shape[1], 1), 1) for x in (k, v))
    keys, values = (x.repeat_interleave(n, dim=1) for x, n in zip((k, v), group, strict=True))
    # The weights are what attention gives with a unit matrix for V.
    unit = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:3], k.shape[2])
    weights, _ = attention(attrs, replace(given, tensors={**given.tensors, "v": unit}))
    factor = natural_scale(attrs, given)
    data = env[step.slot("q")].dtype
    of_logits = torch.finfo(torch.float64 if data is torch.float64 else torch.float32).eps
    sizes = abs(factor) * (q.square() @ keys.square().transpose(2, 3)).sqrt()
    off = weights * (ROUNDING * torch.finfo(data).eps + of_logits * sizes)
    made = {"O": _rms(off, values)}
    if not isinstance(attrs, Sdpa):
        d_o = gather(step, "dO", env, given.len_q).double()
        o, _ = attention(attrs, given)
        terms = d_o.square() @ values.square().transpose(2, 3)
        terms += (d_o * o).square().sum(dim=3, keepdim=True)
        d_s = abs(factor) * off * terms.sqrt()
        made = {
            "dQ": _rms(d_s, keys),
            "dK": _rms(d_s.transpose(2, 3), q, group[0]),
            "dV": _rms(off.transpose(2, 3), d_o, group[1]),
        }
    outputs = step.node.outputs
    return {outputs[port]: size for port, size in made.items() if port in outputs}


def _rms(off: Tensor, terms: Tensor, group: int = 1) -> float:
    """The rms of sums over terms that are each ``off``; over heads of a group as well."""
    squares = off.square() @ terms.square()
    b, h, *rest = squares.shape
    squares = squares.reshape(b, h // group, group, *rest).sum(dim=2)
    squares = squares[squares.isfinite()]
    return sqrt(float(squares.mean())) if squares.numel() else 0.0
