"""Run one op of one engine without a graph around it: ports to tensors, outputs full of NaN."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ropegraph.dtypes import DType, as_dtype
from ropegraph.engines.reference import Reference
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import Op
from ropegraph.ir.shapes import infer
from ropegraph.lowering.engine import Device, Engine, Step
from ropegraph.testing.inputs import poisoned

FLOAT32 = ("Stats", "dfreqs", "dSink_token")


@dataclass(frozen=True)
class Ragged:
    """A bound buffer with the dims and strides it stands for, and its offsets."""

    buffer: Tensor
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: Tensor
    multiplier: int = 1


@dataclass
class Call:
    """One step being put together."""

    values: dict[str, Value] = field(default_factory=dict[str, Value])
    slots: dict[str, int] = field(default_factory=dict[str, int])
    env: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, name: str, bound: Tensor | Ragged) -> str:
        if isinstance(bound, Ragged):
            offsets = self.add(f"{name}_offsets", bound.offsets)
            dtype = as_dtype(bound.buffer.dtype)
            value = Value(name, bound.dim, bound.stride, dtype, None, offsets, bound.multiplier)
            tensor = bound.buffer
        else:
            dtype = as_dtype(bound.dtype)
            value = Value(name, tuple(bound.shape), tuple(bound.stride()), dtype)
            tensor = bound
        self.values[name] = value
        self.slots[name] = len(self.env)
        self.env.append(tensor)
        return name


def run(
    op: Op,
    inputs: Mapping[str, Tensor | Ragged],
    outputs: Sequence[str] | Mapping[str, Tensor | Ragged],
    engine: Engine | None = None,
) -> dict[str, Tensor]:
    """The tensors at the ``outputs`` ports, after the engine (the reference) has run the op once.

    outputs: ports, for which NaN buffers are made in the first input's dtype (f32 or wider for
    Stats and the like), or ports with buffers. Inputs must come out of it as they went in.
    """
    engine = engine or Reference()
    call = Call()
    in_ports = {port: call.add(f"in_{port}", bound) for port, bound in inputs.items()}
    dims = infer("step", op, {port: call.values[v].dim for port, v in in_ports.items()})
    given = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
    io = call.values[next(iter(in_ports.values()))].dtype
    out_ports: dict[str, str] = {}
    for port, buffer in given.items():
        if buffer is None:
            wide = torch.float64 if io is DType.DOUBLE else torch.float32
            dtype = wide if port in FLOAT32 else getattr(torch, io.torch_name)
            buffer = poisoned(dims[port], dtype)
        out_ports[port] = call.add(f"out_{port}", buffer)
    step = Step(Node("step", op, in_ports, out_ports), call.values, engine.name, call.slots)
    assert engine.why_not(step, Device()) == ()
    before = [call.env[call.slots[v]].clone() for v in in_ports.values()]
    engine.compile(step, Device())(call.env, 0)
    for value, old in zip(in_ports.values(), before, strict=True):
        torch.testing.assert_close(
            call.env[call.slots[value]], old, rtol=0, atol=0, equal_nan=True, msg=f"{value} changed"
        )
    return {port: call.env[call.slots[v]] for port, v in out_ports.items()}
