"""From a call to its graph: straight there for plain tensors, by torch's operator for others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ropegraph.errors import GraphError
from ropegraph.functional import eager
from ropegraph.functional.kind import Kind
from ropegraph.functional.library import OPERATORS, Operator
from ropegraph.functional.plans import Slots


def register(kind: Kind) -> Kind:
    """Make the operators of a kind known to torch."""
    OPERATORS[kind.name] = Operator(kind)
    return kind


def call(kind: Kind, slots: Slots, attributes: tuple[Any, ...]) -> Tensor:
    """The first result of a kind, differentiable where something requires grad."""
    if not torch.compiler.is_compiling():
        if getattr(forward_ad, "_current_level", -1) >= 0:
            _refuse_tangents(kind, slots)
        found = eager.find(kind, slots, attributes)
        if found is not None:
            return eager.run_call(found, slots)
    needs = tuple(x is not None and eager.unmapped(x).requires_grad for x in slots)
    training = torch.is_grad_enabled() and any(needs)
    if training and not kind.gradients:
        kind.refuse_gradients(needs)
    if training and eager.has_transforms() and not eager.is_only_mapped():
        raise GraphError(
            f"{kind.name}: torch.func has no gradient of it; use torch.autograd.grad, or backward()"
        )
    if kind.in_place:  # an operator changes none of its arguments; compilers plan memory themselves
        attributes = (*attributes[:-1], False)
    made = OPERATORS[kind.name].forward(*slots, *attributes, training)
    return made if len(kind.results) == 1 else made[0]


def _refuse_tangents(kind: Kind, slots: Slots) -> None:
    for name, x in zip(kind.slots, slots, strict=True):
        if x is not None and forward_ad.unpack_dual(eager.unmapped(x)).tangent is not None:
            raise GraphError(
                f"{kind.name}: {name} has a tangent, but there is no forward-mode derivative; use "
                "torch.autograd.grad, or backward()"
            )
