"""What sdpa means in torch: torch's fused kernel where that is the same thing, else row blocks."""

from __future__ import annotations

import torch

from ropegraph.engines.torch_executor.band import NEG_INF
from ropegraph.engines.torch_executor.blockwise import Forward, forward
from ropegraph.engines.torch_executor.flash import flash_forward, takes_scale
from ropegraph.engines.torch_executor.operands import Env, Operands, Part
from ropegraph.engines.torch_executor.sdpa_sequences import LengthReader, PortReader, is_sequenced
from ropegraph.lowering.engine import Executable, Step


def compile_sdpa(step: Step) -> Executable:
    """The executable of an sdpa step: fills O and, if it has one, Stats.

    It must run where autograd does not record.  Raises PositionError, before anything is written,
    for lengths, ragged offsets and page tables that point outside of a tensor.
    """
    return _sequences(step) if is_sequenced(step) else _dense(step)


def _dense(step: Step) -> Executable:
    operands = Operands(step)
    shape, read_scale = operands.shape, operands.scale
    q_slot, k_slot, v_slot, o_slot = (step.slot(port) for port in ("q", "k", "v", "O"))
    stats_slot = step.slot("Stats")
    part = Part(0, shape.b, shape.s_q, shape.s_kv)
    causal = operands.flash_causal(part)

    def run(env: Env, stream: int) -> None:
        q, k, v, o = env[q_slot], env[k_slot], env[v_slot], env[o_slot]
        stats = env[stats_slot] if stats_slot >= 0 else None
        _solve(operands, env, part, causal, read_scale(env), q, k, v, o, stats)

    return run


def _sequences(step: Step) -> Executable:
    operands = Operands(step)
    shape, read_scale = operands.shape, operands.scale
    read_lengths = LengthReader(step, shape.b, shape.s_q, shape.s_kv)
    q_port, o_port = PortReader(step, "q"), PortReader(step, "O")
    k_port = PortReader(step, "k", "paged_attention_k_table")
    v_port = PortReader(step, "v", "paged_attention_v_table")
    stats_port = PortReader(step, "Stats") if step.has("Stats") else None

    def run(env: Env, stream: int) -> None:
        lengths = read_lengths(env)
        q, o = q_port.bind(env, lengths.q), o_port.bind(env, lengths.q)
        k, v = k_port.bind(env, lengths.kv), v_port.bind(env, lengths.kv)
        stats = None if stats_port is None else stats_port.bind(env, lengths.q)
        o_port.fill_outside(env, lengths.q, 0)
        if stats_port is not None:
            stats_port.fill_outside(env, lengths.q, NEG_INF)
        scale = read_scale(env)
        for i, (s_q, s_kv) in enumerate(zip(lengths.q, lengths.kv, strict=True)):
            part = Part(i, i + 1, s_q, s_kv)
            causal = operands.flash_causal(part)
            rows = None if stats is None else stats(i)
            _solve(operands, env, part, causal, scale, q(i), k(i), v(i), o(i), rows)

    return run


def _solve(
    operands: Operands,
    env: Env,
    part: Part,
    causal: bool | None,
    scale: float | torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor | None,
) -> None:
    """One problem.  causal: how torch's kernel would be called, None if it cannot serve."""
    compute = operands.compute
    if causal is not None and q.is_cpu and takes_scale(scale, causal, compute):
        if flash_forward(q, k, v, o, stats, scale, causal, compute):
            return
    forward(
        Forward(
            part.shape(operands.shape),
            compute,
            operands.logits(env, scale, part, q),
            q,
            k,
            v,
            o,
            stats,
            operands.sink(env),
            operands.dropout(env, part),
        )
    )
