"""What sdpa_backward means in torch, by the same two ways as sdpa."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ropegraph.engines.torch_executor.blockwise_backward import Backward, backward
from ropegraph.engines.torch_executor.flash import flash_backward, takes_scale
from ropegraph.engines.torch_executor.operands import Env, Operands, Part
from ropegraph.engines.torch_executor.sdpa_sequences import LengthReader, PortReader, is_sequenced
from ropegraph.lowering.engine import Executable, Step

_INPUTS = ("q", "k", "v", "o", "dO", "stats")
_OUTPUTS = ("dQ", "dK", "dV")
_OVER_KEYS = ("k", "v", "dK", "dV")


def compile_sdpa_backward(step: Step) -> Executable:
    """The executable of an sdpa_backward step: fills those of its outputs that the node has.

    It must run where autograd does not record.  Raises PositionError as compile_sdpa's does.
    """
    return _sequences(step) if is_sequenced(step) else _dense(step)


def _dense(step: Step) -> Executable:
    operands = Operands(step)
    shape, read_scale = operands.shape, operands.scale
    in_slots = tuple(step.slot(port) for port in _INPUTS)
    out_slots = tuple(step.slot(port) for port in _OUTPUTS)
    part = Part(0, shape.b, shape.s_q, shape.s_kv)
    totals = Totals(step, operands)
    causal = operands.flash_causal(part)

    def run(env: Env, stream: int) -> None:
        inputs = [env[slot] for slot in in_slots]
        grads = [env[slot] if slot >= 0 else None for slot in out_slots]
        d_bias, d_sink = totals.start(env)
        _solve(operands, env, part, causal, read_scale(env), inputs, grads, d_bias, d_sink)
        totals.finish(env, d_bias, d_sink)

    return run


def _sequences(step: Step) -> Executable:
    operands = Operands(step)
    shape, read_scale = operands.shape, operands.scale
    read_lengths = LengthReader(step, shape.b, shape.s_q, shape.s_kv)
    readers = [PortReader(step, port) for port in _INPUTS]
    writers = [PortReader(step, port) if step.has(port) else None for port in _OUTPUTS]
    totals = Totals(step, operands)

    def run(env: Env, stream: int) -> None:
        lengths = read_lengths(env)
        over = {
            port: lengths.kv if port in _OVER_KEYS else lengths.q for port in _INPUTS + _OUTPUTS
        }
        inputs = [r.bind(env, over[port]) for r, port in zip(readers, _INPUTS, strict=True)]
        outputs = [
            None if w is None else w.bind(env, over[port])
            for w, port in zip(writers, _OUTPUTS, strict=True)
        ]
        for writer, port in zip(writers, _OUTPUTS, strict=True):
            if writer is not None:
                writer.fill_outside(env, over[port], 0)
        scale = read_scale(env)
        d_bias, d_sink = totals.start(env)
        for i, (s_q, s_kv) in enumerate(zip(lengths.q, lengths.kv, strict=True)):
            part = Part(i, i + 1, s_q, s_kv)
            causal = operands.flash_causal(part)
            views = [view(i) for view in inputs]
            grads = [None if view is None else view(i) for view in outputs]
            cut = None if d_bias is None else part.cut(d_bias)
            _solve(operands, env, part, causal, scale, views, grads, cut, d_sink)
        totals.finish(env, d_bias, d_sink)

    return run


@dataclass(frozen=True)
class Totals:
    """dBias and dSink_token, to which every problem of a step adds in the compute dtype."""

    step: Step
    operands: Operands

    def start(self, env: Env) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        bias, sink = self.step.slot("dBias"), self.step.slot("dSink_token")
        dtype = self.operands.compute
        return (
            None if bias < 0 else torch.zeros_like(env[bias], dtype=dtype),
            None if sink < 0 else torch.zeros_like(env[sink], dtype=dtype).flatten(),
        )

    def finish(self, env: Env, d_bias: torch.Tensor | None, d_sink: torch.Tensor | None) -> None:
        if d_bias is not None:
            env[self.step.slot("dBias")].copy_(d_bias)
        if d_sink is not None:
            out = env[self.step.slot("dSink_token")]
            out.copy_(d_sink.view(out.shape))


def _solve(
    operands: Operands,
    env: Env,
    part: Part,
    causal: bool | None,
    scale: float | torch.Tensor,
    inputs: list[torch.Tensor],
    grads: list[torch.Tensor | None],
    d_bias: torch.Tensor | None,
    d_sink: torch.Tensor | None,
) -> None:
    """One problem.  causal: how torch's kernel would be called, None if it cannot serve."""
    q, k, v, o, d_o, stats = inputs
    d_q, d_k, d_v = grads
    compute = operands.compute
    if causal is not None and q.is_cpu and takes_scale(scale, causal, compute):
        if flash_backward(q, k, v, o, d_o, stats, (d_q, d_k, d_v), scale, causal, compute):
            return
    backward(
        Backward(
            part.shape(operands.shape),
            compute,
            operands.logits(env, scale, part, q),
            q,
            k,
            v,
            o,
            d_o,
            stats,
            d_q,
            d_k,
            d_v,
            d_bias,
            d_sink,
            operands.sink(env),
            operands.dropout(env, part),
        )
    )
