"""Autograd for graphs that are linear in all that has a gradient, as every rotation is.

The gradient of such a graph is its adjoint, whatever the input was, and the gradient of the adjoint
is the graph again: so gradients of gradients are right as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropegraph.api.plans import Form, Gradient, Recipe, Recording, form_of, run, untraced

Stride = tuple[int, ...]
Forms = list[tuple[str, Form]]


class Port(NamedTuple):
    """An input or output of the graph: the strides are those it has where we allocate it."""

    name: str
    dim: tuple[int, ...]
    stride: Stride


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

    def run(
        self,
        data: Sequence[Tensor],
        tables: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
        *,
        is_adjoint: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run one way or the other, beneath autograd.

        out: buffers of the caller to write, of any strides; new ones, as the ports say, if None.
        """
        read, written = (self.outputs, self.inputs) if is_adjoint else (self.inputs, self.outputs)
        d = "d" if is_adjoint else ""
        names = [f"{d}{p.name}" for p in written]
        strides = [p.stride for p in written] if out is None else [x.stride() for x in out]
        forms = [(p.name, form_of(x)) for p, x in zip(read, data, strict=True)]
        own = [(name, form_of(x)) for name, x in zip(self.tables, tables, strict=True)]
        make = self._gradient if is_adjoint else self._recording
        pack = {f"{d}{p.name}": x for p, x in zip(read, data, strict=True)}
        pack |= zip(self.tables, tables, strict=True)
        given = None if out is None else dict(zip(names, out, strict=True))
        results = run(make(forms, own, strides), pack, given)
        return tuple(results[name] for name in names)

    def _recording(self, data: Forms, tables: Forms, strides: Sequence[Stride]) -> Recording:
        named = tuple((p.name, s) for p, s in zip(self.outputs, strides, strict=True))
        return Recording(self.recipe, (*data, *tables), named, self.attributes)

    def _gradient(self, grads: Forms, tables: Forms, strides: Sequence[Stride]) -> Gradient:
        _, like = grads[0]
        # A gradient is laid out as the input of the forward that it is derived from.
        inputs = [
            (p.name, Form(p.dim, stride, like.dtype, like.device))
            for p, stride in zip(self.inputs, strides, strict=True)
        ]
        forward = self._recording(inputs, tables, [p.stride for p in self.outputs])
        return Gradient(forward, tuple(p.name for p in self.inputs), tuple(grads))


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
    return untraced(_Apply.apply)(direction, *data, *tables)
