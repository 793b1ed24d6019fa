"""What sdpa_backward means in torch, by the same two ways as sdpa."""

from __future__ import annotations

import torch

from ropegraph.engines.torch_executor.blockwise_backward import Backward, backward
from ropegraph.engines.torch_executor.flash import Flash, Scale
from ropegraph.engines.torch_executor.operands import Env, Operands, Part
from ropegraph.engines.torch_executor.sdpa_sequences import LengthReader, PortReader, is_sequenced
from ropegraph.lowering.engine import Executable, Step

_INPUTS = ("q", "k", "v", "o", "dO", "stats")
_OUTPUTS = ("dQ", "dK", "dV")
_OVER_KEYS = ("k", "v", "dK", "dV")

Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def compile_sdpa_backward(step: Step) -> Executable:
    """The executable of an sdpa_backward step: fills those of its outputs that the node has.

    It must run where autograd does not record.  Raises PositionError as compile_sdpa's does.
    """
    return _Sequences(step) if is_sequenced(step) else _Dense(step)


class _Dense:
    """The whole batch is one problem."""

    def __init__(self, step: Step) -> None:
        self.operands = Operands(step)
        self.inputs = [step.slot(port) for port in _INPUTS]
        self.d_q, self.d_k, self.d_v = (step.slot(port) for port in _OUTPUTS)
        shape = self.operands.shape
        self.part = Part(0, shape.b, shape.s_q, shape.s_kv)
        self.flash = self.operands.flash(self.part)
        self.totals = _Totals(step, self.operands.compute)

    def __call__(self, env: Env, stream: int) -> None:
        inputs = [env[slot] for slot in self.inputs]
        grads = (
            env[self.d_q] if self.d_q >= 0 else None,
            env[self.d_k] if self.d_k >= 0 else None,
            env[self.d_v] if self.d_v >= 0 else None,
        )
        scale = self.operands.scale(env)
        d_bias, d_sink = self.totals.start(env)
        _solve(self.operands, env, self.part, self.flash, scale, inputs, grads, d_bias, d_sink)
        self.totals.finish(env, d_bias, d_sink)


class _Sequences:
    """Each sequence is a problem of its own; dBias and dSink_token gather over them."""

    def __init__(self, step: Step) -> None:
        self.operands = Operands(step)
        shape = self.operands.shape
        self.lengths = LengthReader(step, shape.b, shape.s_q, shape.s_kv)
        self.inputs = {port: PortReader(step, port) for port in _INPUTS}
        self.outputs = {port: PortReader(step, port) for port in _OUTPUTS if step.has(port)}
        self.totals = _Totals(step, self.operands.compute)

    def __call__(self, env: Env, stream: int) -> None:
        lengths = self.lengths(env)
        over = {p: lengths.kv if p in _OVER_KEYS else lengths.q for p in _INPUTS + _OUTPUTS}
        inputs = [reader.bind(env, over[port]) for port, reader in self.inputs.items()]
        outputs = {port: writer.bind(env, over[port]) for port, writer in self.outputs.items()}
        for port, writer in self.outputs.items():
            writer.fill_outside(env, over[port], 0)
        scale = self.operands.scale(env)
        d_bias, d_sink = self.totals.start(env)
        for i, (s_q, s_kv) in enumerate(zip(lengths.q, lengths.kv, strict=True)):
            part = Part(i, i + 1, s_q, s_kv)
            flash = self.operands.flash(part)
            views = [view(i) for view in inputs]
            grads: Grads = (
                outputs["dQ"](i) if "dQ" in outputs else None,
                outputs["dK"](i) if "dK" in outputs else None,
                outputs["dV"](i) if "dV" in outputs else None,
            )
            cut = None if d_bias is None else part.cut(d_bias)
            _solve(self.operands, env, part, flash, scale, views, grads, cut, d_sink)
        self.totals.finish(env, d_bias, d_sink)


class _Totals:
    """dBias and dSink_token, to which every problem of a step adds in the compute dtype."""

    def __init__(self, step: Step, compute: torch.dtype) -> None:
        self.bias, self.sink = step.slot("dBias"), step.slot("dSink_token")
        self.compute = compute

    def start(self, env: Env) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        bias = sink = None
        if self.bias >= 0:
            bias = torch.zeros_like(env[self.bias], dtype=self.compute)
        if self.sink >= 0:
            sink = torch.zeros_like(env[self.sink], dtype=self.compute).flatten()
        return bias, sink

    def finish(self, env: Env, bias: torch.Tensor | None, sink: torch.Tensor | None) -> None:
        if bias is not None:
            env[self.bias].copy_(bias)
        if sink is not None:
            env[self.sink].copy_(sink.view(env[self.sink].shape))


def _solve(
    operands: Operands,
    env: Env,
    part: Part,
    flash: Flash | None,
    scale: Scale,
    inputs: list[torch.Tensor],
    grads: Grads,
    d_bias: torch.Tensor | None,
    d_sink: torch.Tensor | None,
) -> None:
    q, k, v, o, d_o, stats = inputs
    if flash is not None and flash.backward(q, k, v, o, d_o, stats, scale, *grads):
        return
    shape, compute = part.shape(operands.shape), operands.compute
    logits = operands.logits(env, scale, part)
    sink, dropout = operands.sink(env), operands.dropout(env, part)
    d_q, d_k, d_v = grads
    backward(
        Backward(
            shape, compute, logits, q, k, v, o, d_o, stats, d_q, d_k, d_v, d_bias, d_sink,
            sink, dropout,
        )
    )  # fmt: skip
