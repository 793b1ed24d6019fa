"""Attention in dense fp64, and its gradients by torch.autograd through the same formula.

The backward recomputes everything from q, k and v: it reads neither ``o`` nor ``stats``, so that
no error of the forward under test, and none of the usual backward formula, can reach it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from ropegraph.engines.reference.buffers import (
    gather,
    gather_paged,
    integers,
    scatter,
    sequence_lengths,
)
from ropegraph.engines.reference.dropout import drop_factors
from ropegraph.engines.reference.mask import alibi, kept
from ropegraph.engines.reference.score_mod import evaluate
from ropegraph.ir.ops import Attention, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Step

LN2 = log(2.0)
GRADIENTS = {"dQ": "q", "dK": "k", "dV": "v", "dBias": "bias", "dSink_token": "sink_token"}


@dataclass(frozen=True)
class Inputs:
    """What attention reads: fp64 tensors by port, real rows per sequence, and host numbers.

    drop: the factor of each weight, 0 or 1 / (1 - p); None without dropout.
    """

    tensors: Mapping[str, Tensor]
    len_q: Sequence[int]
    len_kv: Sequence[int]
    attn_scale: float
    drop: Tensor | None


@dataclass(frozen=True)
class RunSdpa:
    """O and, if asked for, Stats."""

    step: Step
    attrs: Sdpa

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        given = read_inputs(self.step, self.attrs, env)
        o, stats = attention(self.attrs, given)
        if self.step.slot("O") >= 0:
            scatter(self.step, "O", env, o, given.len_q)
        if self.step.slot("Stats") >= 0:
            scatter(self.step, "Stats", env, stats, given.len_q, fill=-inf)


@dataclass(frozen=True)
class RunSdpaBackward:
    """Whichever of dQ, dK, dV, dBias and dSink_token are asked for."""

    step: Step
    attrs: SdpaBackward

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        wanted = {port: source for port, source in GRADIENTS.items() if self.step.has(port)}
        with torch.inference_mode(mode=False), torch.enable_grad():
            given = read_inputs(self.step, self.attrs, env)
            leaves = [given.tensors[source].requires_grad_() for source in wanted.values()]
            o, _ = attention(self.attrs, given)
            d_o = gather(self.step, "dO", env, given.len_q).double()
            grads = torch.autograd.grad(o, leaves, d_o, materialize_grads=True)
        lengths = {"dQ": given.len_q, "dK": given.len_kv, "dV": given.len_kv}
        with torch.no_grad():
            for port, grad in zip(wanted, grads, strict=True):
                scatter(self.step, port, env, grad, lengths.get(port))


def natural_scale(attrs: Attention, given: Inputs) -> float:
    """What q.k is multiplied by to be a natural logit."""
    return given.attn_scale * (LN2 if attrs.softmax_input_is_log2 else 1.0)


def attention(attrs: Attention, given: Inputs) -> tuple[Tensor, Tensor]:
    """O [b, h_q, s_q, d_v] and the natural log-sum-exp Stats [b, h_q, s_q, 1]."""
    t = given.tensors
    q, bias = t["q"], t.get("bias")
    b, h_q, s_q, _ = q.shape
    k, v = (t[port].repeat_interleave(_group(h_q, t[port]), dim=1) for port in ("k", "v"))
    s_kv = k.shape[2]
    keep = kept(attrs, given.len_q, given.len_kv, s_q, s_kv).to(q.device)
    if bias is not None:
        keep = keep & (bias != -inf)
    keep = keep.expand(b, h_q, s_q, s_kv)

    logits = natural_scale(attrs, given) * dot(q, k, keep)
    if attrs.score_mod is not None:
        logits = evaluate(attrs.score_mod, logits, t)
    if bias is not None:
        logits = logits + bias
    if attrs.alibi:
        logits = logits + alibi(h_q, s_q, s_kv).to(q.device)
    keep = keep & (logits != -inf)
    logits = torch.where(keep, logits, -inf)

    # The sink is one more key, whose value is 0; without one it is a key that is masked.
    sink = t.get("sink_token", q.new_full((), -inf)).expand(b, h_q, s_q, 1)
    top = torch.cat([logits, sink], dim=3).detach().amax(dim=3, keepdim=True)
    top = torch.where(top == -inf, 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(dim=3, keepdim=True) + torch.exp(sink - top)
    # A row that sees nothing has no log, and must have no gradient of one either.
    is_dead = total == 0
    stats = torch.where(is_dead, -inf, top + torch.log(torch.where(is_dead, 1.0, total)))
    # A row past seq_len_q belongs to no sequence, dense as in a ragged tensor: not even a sink.
    real = torch.arange(s_q) < torch.tensor(given.len_q, dtype=torch.int64).reshape(b, 1, 1)
    stats = torch.where(real.unsqueeze(3).to(q.device), stats, -inf)
    weights = weights / torch.where(is_dead, 1.0, total)
    if given.drop is not None:
        weights = weights * given.drop
    o = mix(weights, v, keep)
    return torch.where(keep.any(dim=3, keepdim=True), o, 0.0), stats


def dot(q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    """q.k for every pair that ``keep`` allows, 0 elsewhere whatever k holds there."""
    if torch.isfinite(q).all() and torch.isfinite(k).all():
        return q @ k.transpose(2, 3)
    return (q.unsqueeze(3) * torch.where(keep.unsqueeze(4), k.unsqueeze(2), 0.0)).sum(dim=4)


def mix(weights: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The weighted sum of those rows of v that ``keep`` allows: 0 * NaN adds nothing."""
    if torch.isfinite(v).all():
        return weights @ v
    allowed = torch.where(keep.unsqueeze(4), v.unsqueeze(2), 0.0)
    return (weights.unsqueeze(4) * allowed).sum(dim=3)


def _group(h_q: int, kv: Tensor) -> int:
    """Query heads per head of k or v."""
    return h_q // kv.shape[1] if h_q else 1


def read_inputs(step: Step, attrs: Attention, env: Sequence[Tensor]) -> Inputs:
    """What Sdpa and SdpaBackward have in common of their inputs."""
    len_q, len_kv = lengths_of(step, attrs, env)
    tensors = {"q": gather(step, "q", env, len_q).double()}
    if isinstance(attrs, Sdpa) and attrs.max_seq_len_kv is not None:
        s_kv = attrs.max_seq_len_kv
        for port in ("k", "v"):
            tensors[port] = gather_paged(step, port, env, s_kv, len_kv).double()
    else:
        for port in ("k", "v"):
            tensors[port] = gather(step, port, env, len_kv).double()
    modifiers = attrs.score_mod.ports if attrs.score_mod is not None else ()
    for port in ("bias", "sink_token", *modifiers):
        if step.has(port):
            tensors[port] = gather(step, port, env).double()
    attn_scale = attrs.attn_scale
    if attn_scale is None:
        attn_scale = float(env[step.slot("attn_scale")])
    return Inputs(tensors, len_q, len_kv, attn_scale, _drop(step, attrs, env, tensors))


def _drop(
    step: Step, attrs: Attention, env: Sequence[Tensor], tensors: Mapping[str, Tensor]
) -> Tensor | None:
    if attrs.dropout_p is None:
        return None
    (b, h_q, s_q, _), s_kv = tensors["q"].shape, tensors["k"].shape[2]
    seed, offset = (integers(step, port, env)[0] for port in ("seed", "offset"))
    return drop_factors(attrs.dropout_p, seed, offset, (b, h_q, s_q, s_kv)).to(tensors["q"].device)


def lengths_of(
    step: Step, attrs: Attention, env: Sequence[Tensor]
) -> tuple[Sequence[int], Sequence[int]]:
    """Real rows of q and of k, v in each batch entry: stated, or by ragged offsets, or all."""
    found: list[Sequence[int]] = []
    for side, port in (("seq_len_q", "q"), ("seq_len_kv", "k")):
        value = step.value(port)
        s = value.dim[2]
        if port == "k" and isinstance(attrs, Sdpa) and attrs.max_seq_len_kv is not None:
            s = attrs.max_seq_len_kv
        if step.has(side):
            found.append([min(length, s) for length in integers(step, side, env)])
        elif value.ragged_offset is not None:
            found.append(sequence_lengths(step, value, env))
        else:
            found.append([s] * step.value("q").dim[0])
    return found[0], found[1]
