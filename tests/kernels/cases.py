"""Steps for the kernel tests, with their tensors, and what the fp64 reference makes of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ropegraph.dtypes import DType, as_dtype
from ropegraph.engines.cuda_rope.job import parts_of
from ropegraph.engines.cuda_rope.kind import ports_of
from ropegraph.engines.reference import Reference
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import CacheWrite, Rope, RopeBackward, RopePair, Rotation
from ropegraph.lowering.engine import Device, Step
from ropegraph.testing.budget import rounding
from ropegraph.testing.inputs import span

Rotary = Rope | RopeBackward | CacheWrite | RopePair
Run = Callable[[Sequence["Case"]], None]  # what the fixture ``run`` is


@dataclass(frozen=True)
class Ragged:
    """A buffer, the dims and strides it stands for, and the offsets of its sequences."""

    buffer: Tensor
    dim: tuple[int, int, int, int]
    stride: tuple[int, int, int, int]
    offsets: Tensor
    multiplier: int = 1


@dataclass
class Case:
    """A step and its tensors by slot.  flag: where a ragged launch reports wrong offsets."""

    step: Step
    env: list[Tensor]
    flag: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))

    def at(self, port: str) -> Tensor:
        return self.env[self.step.slot(port)]

    @property
    def written(self) -> list[str]:
        return list(self.step.node.outputs)


def case(op: Rotary, **tensors: Tensor | Ragged) -> Case:
    """A step whose ports are bound to ``tensors``; ports of one offsets tensor share its value."""
    values: dict[str, Value] = {}
    env: list[Tensor] = []
    offsets: dict[int, str] = {}

    def add(name: str, tensor: Tensor, value: Value) -> str:
        values[name] = value
        env.append(tensor)
        return name

    for port, bound in tensors.items():
        if not isinstance(bound, Ragged):
            add(port, bound, value_of(port, bound))
            continue
        key = id(bound.offsets)
        if key not in offsets:
            name = f"offsets{len(offsets)}"
            offsets[key] = add(name, bound.offsets, value_of(name, bound.offsets))
        dtype = as_dtype(bound.buffer.dtype)
        value = Value(
            port, bound.dim, bound.stride, dtype, None, offsets[key], bound.multiplier
        )  # fmt: skip
        add(port, bound.buffer, value)
    slots = {name: i for i, name in enumerate(values)}
    outputs = [p for p in tensors if p.rstrip("012") in ("output", "dX")]
    node = Node("turn", op, {p: p for p in tensors if p not in outputs}, {p: p for p in outputs})
    return Case(Step(node, values, "cuda.rope", slots), env)


def value_of(name: str, tensor: Tensor) -> Value:
    return Value(name, tuple(tensor.shape), tuple(tensor.stride()), as_dtype(tensor.dtype))


def expected(given: Case) -> dict[str, Tensor]:
    """What the reference writes to each output, in fp64, from the same rounded inputs."""
    data = {p for attrs, suffix in parts_of(given.step) for p in ports_of(attrs, suffix)}
    values = {
        name: replace(value, dtype=DType.DOUBLE) if name in data else value
        for name, value in given.step.values.items()
    }
    env = [
        widened(given.env[slot]) if name in data else given.env[slot]
        for name, slot in given.step.slots.items()
    ]
    step = replace(given.step, values=values)
    Reference().compile(step, Device())(env, 0)
    return {port: env[step.slot(port)] for port in given.written}


def widened(tensor: Tensor) -> Tensor:
    """A copy in fp64 with the same strides."""
    size = span(tensor.shape, tensor.stride())
    flat = tensor.as_strided((size,), (1,)).double()
    return flat.as_strided(tensor.shape, tensor.stride())


def allowed(given: Case, port: str, want: Tensor) -> Tensor:
    """Half a unit of the written dtype, and a few units of fp32 at the size of the data."""
    kind = port.rstrip("012")
    suffix = port[len(kind) :]
    source = given.at({"output": "input", "dX": "dY"}[kind] + suffix)
    finite = source.double()[torch.isfinite(source.double())].abs()
    attrs = {suffix: part for part, suffix in parts_of(given.step)}[suffix]
    factor = 1.0
    if isinstance(attrs, Rotation):
        factor = abs(attrs.output_scale) * max(abs(attrs.attention_factor), 1.0)
    size = float(finite.max()) * factor if finite.numel() else 0.0
    return rounding(want, given.at(port).dtype) * (1 + 1e-6) + 6 * 2.0**-23 * size


def check(given: Case, want: Mapping[str, Tensor], what: str) -> None:
    """Every element of every output within the allowed error; NaN where the reference has it."""
    compare(given, want, what, allowed)


def compare(
    given: Case,
    want: Mapping[str, Tensor],
    what: str,
    limits: Callable[[Case, str, Tensor], Tensor],
) -> None:
    """limits: of a case, a port and its exact values, the error that each element may have."""
    for port, exact in want.items():
        got = given.at(port).double()
        limit = limits(given, port, exact)
        same = (got == exact) | (got.isnan() & exact.isnan())
        off = ~same & ~((got - exact).abs() <= limit)
        if off.any():
            place = tuple(int(i) for i in off.nonzero()[0])
            raise AssertionError(
                f"{what}: {int(off.sum())} of {off.numel()} elements of {port} are off; at "
                f"{list(place)} {float(got[place])!r} instead of {float(exact[place])!r}"
            )


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers, to compare NaN and signed zeros too."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(kind)


def offset_by(tensor: Tensor, elements: int) -> Tensor:
    """The same values and strides on a base that lies ``elements`` further in its storage."""
    size = span(tensor.shape, tensor.stride())
    store = torch.full((size + elements,), torch.nan, dtype=tensor.dtype)
    store[elements:] = tensor.as_strided((size,), (1,))
    return store.as_strided(tensor.shape, tensor.stride(), elements)


def like(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """A NaN buffer of the same dims."""
    strides = tensor.stride() if strides is None else strides
    store = torch.full((span(tensor.shape, strides),), torch.nan, dtype=tensor.dtype)
    return store.as_strided(tensor.shape, strides)
