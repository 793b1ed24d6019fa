"""What sdpa means in torch: torch's fused kernel where that is the same thing, else row blocks."""

from __future__ import annotations

import torch

from ropegraph.engines.torch_executor.band import NEG_INF
from ropegraph.engines.torch_executor.blockwise import Forward, forward
from ropegraph.engines.torch_executor.flash import Flash, Scale
from ropegraph.engines.torch_executor.operands import Env, Operands, Part
from ropegraph.engines.torch_executor.sdpa_sequences import LengthReader, PortReader, is_sequenced
from ropegraph.lowering.engine import Executable, Step


def compile_sdpa(step: Step) -> Executable:
    """The executable of an sdpa step: fills O and, if it has one, Stats.

    It must run where autograd does not record.  Raises PositionError, before anything is written,
    for lengths, ragged offsets and page tables that point outside of a tensor.
    """
    return _Sequences(step) if is_sequenced(step) else _Dense(step)


class _Dense:
    """The whole batch is one problem."""

    def __init__(self, step: Step) -> None:
        self.operands = Operands(step)
        self.q, self.k, self.v, self.o, self.stats = (
            step.slot(port) for port in ("q", "k", "v", "O", "Stats")
        )
        shape = self.operands.shape
        self.part = Part(0, shape.b, shape.s_q, shape.s_kv)
        self.flash = self.operands.flash(self.part)

    def __call__(self, env: Env, stream: int) -> None:
        q, k, v, o = env[self.q], env[self.k], env[self.v], env[self.o]
        stats = env[self.stats] if self.stats >= 0 else None
        scale = self.operands.scale(env)
        _solve(self.operands, env, self.part, self.flash, scale, q, k, v, o, stats)


class _Sequences:
    """Each sequence is a problem of its own: it has its length and its corner of the band."""

    def __init__(self, step: Step) -> None:
        self.operands = Operands(step)
        shape = self.operands.shape
        self.lengths = LengthReader(step, shape.b, shape.s_q, shape.s_kv)
        self.q, self.o = PortReader(step, "q"), PortReader(step, "O")
        self.k = PortReader(step, "k", "paged_attention_k_table")
        self.v = PortReader(step, "v", "paged_attention_v_table")
        self.stats = PortReader(step, "Stats") if step.has("Stats") else None

    def __call__(self, env: Env, stream: int) -> None:
        lengths = self.lengths(env)
        q, o = self.q.bind(env, lengths.q), self.o.bind(env, lengths.q)
        k, v = self.k.bind(env, lengths.kv), self.v.bind(env, lengths.kv)
        stats = None if self.stats is None else self.stats.bind(env, lengths.q)
        self.o.fill_outside(env, lengths.q, 0)
        if self.stats is not None:
            self.stats.fill_outside(env, lengths.q, NEG_INF)
        scale = self.operands.scale(env)
        for i, (s_q, s_kv) in enumerate(zip(lengths.q, lengths.kv, strict=True)):
            part = Part(i, i + 1, s_q, s_kv)
            flash = self.operands.flash(part)
            rows = None if stats is None else stats(i)
            _solve(self.operands, env, part, flash, scale, q(i), k(i), v(i), o(i), rows)


def _solve(
    operands: Operands,
    env: Env,
    part: Part,
    flash: Flash | None,
    scale: Scale,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor | None,
) -> None:
    if flash is not None and flash.forward(q, k, v, o, stats, scale):
        return
    logits = operands.logits(env, scale, part)
    sink, dropout = operands.sink(env), operands.dropout(env, part)
    shape = part.shape(operands.shape)
    forward(Forward(shape, operands.compute, logits, q, k, v, o, stats, sink, dropout))
