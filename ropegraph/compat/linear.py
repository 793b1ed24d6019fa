"""Autograd for graphs that are linear in all that has a gradient, as every rotation is.

The gradient of such a graph is its adjoint, whatever the input was, and the gradient of the adjoint
is the graph again: so gradients of gradients are right as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ropegraph.api.plans import Form, Gradient, Plan, Recipe, Recording, form_of, plan


class Port(NamedTuple):
    """An input or output of the graph: the strides are those it has where we allocate it."""

    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]


def port(name: str, like: Tensor) -> Port:
    """A port with the dims and strides of ``like``, which may be a view of a meta tensor."""
    return Port(name, tuple(like.shape), like.stride())


@dataclass(frozen=True)
class Linear:
    """A recording that is linear in ``inputs``; ``tables`` names its other tensors, in order."""

    recipe: Recipe
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tables: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...] = ()

    def __call__(self, data: Sequence[Tensor], tables: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs for inputs of any strides, each allocated as its port says."""
        return _apply(_Direction(self), data, [tables[t] for t in self.tables])

    def adjoint(self, grads: Sequence[Tensor], tables: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the inputs for gradients of the outputs, which may have any strides."""
        return _apply(_Direction(self, is_adjoint=True), grads, [tables[t] for t in self.tables])

    def write(
        self, data: Sequence[Tensor], tables: Mapping[str, Tensor], out: Sequence[Tensor],
        is_adjoint: bool = False,
    ) -> None:  # fmt: skip
        """Run into buffers of the caller, whose strides may be any; autograd sees nothing of it."""
        self.run(data, [tables[t] for t in self.tables], out, is_adjoint=is_adjoint)

    def run(
        self, data: Sequence[Tensor], tables: Sequence[Tensor],
        out: Sequence[Tensor] | None = None, *, is_adjoint: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run one way or the other, beneath autograd; ``out`` is written where it is given."""
        read, written = (self.outputs, self.inputs) if is_adjoint else (self.inputs, self.outputs)
        strides = [p.stride for p in written] if out is None else [x.stride() for x in out]
        forms = [(name, form_of(x)) for name, x in zip(self.tables, tables, strict=True)]
        given = [(p.name, form_of(x)) for p, x in zip(read, data, strict=True)]
        if is_adjoint:
            made = self._adjoint_plan(given, forms, strides)
        else:
            made = self._plan(given, forms, strides)
        d = "d" if is_adjoint else ""
        pack = {f"{d}{p.name}": x for p, x in zip(read, data, strict=True)}
        pack |= zip(self.tables, tables, strict=True)
        names = [f"{d}{p.name}" for p in written]
        results = made(pack, None if out is None else dict(zip(names, out, strict=True)))
        return tuple(results[name] for name in names)

    def _plan(
        self, given: list[tuple[str, Form]], tables: list[tuple[str, Form]],
        strides: Sequence[tuple[int, ...]],
    ) -> Plan:  # fmt: skip
        named = tuple((p.name, s) for p, s in zip(self.outputs, strides, strict=True))
        return plan(Recording(self.recipe, (*given, *tables), named, self.attributes))

    def _adjoint_plan(
        self, given: list[tuple[str, Form]], tables: list[tuple[str, Form]],
        strides: Sequence[tuple[int, ...]],
    ) -> Plan:  # fmt: skip
        like = given[0][1]
        inputs = [
            (p.name, Form(p.dim, stride, like.dtype, like.device))
            for p, stride in zip(self.inputs, strides, strict=True)
        ]
        named = tuple((p.name, p.stride) for p in self.outputs)
        forward = Recording(self.recipe, (*inputs, *tables), named, self.attributes)
        return plan(Gradient(forward, tuple(p.name for p in self.inputs), tuple(given)))


class _Direction(NamedTuple):
    """One Linear, or its adjoint."""

    linear: Linear
    is_adjoint: bool = False

    @property
    def read(self) -> int:
        """How many tensors go in besides the tables."""
        return len(self.linear.outputs if self.is_adjoint else self.linear.inputs)


class _Apply(torch.autograd.Function):
    """A direction on its inputs and tables; either is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, direction: _Direction, *tensors: Tensor) -> tuple[Tensor, ...]:
        linear, is_adjoint = direction
        data, tables = tensors[: direction.read], tensors[direction.read :]
        ctx.direction = direction
        ctx.save_for_backward(*tables)
        return linear.run(data, tables, is_adjoint=is_adjoint)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        linear, is_adjoint = ctx.direction
        tables: tuple[Tensor, ...] = ctx.saved_tensors
        made = _apply(_Direction(linear, not is_adjoint), grads, tables)
        return (None, *made, *(None for _ in tables))


def _apply(
    direction: _Direction, data: Sequence[Tensor], tables: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", _Apply.apply(direction, *data, *tables))
