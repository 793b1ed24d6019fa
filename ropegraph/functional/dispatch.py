"""From a call to its plan: straight there for plain tensors, by torch's operator for others."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.functional import plans
from ropegraph.functional.gradient import kept, place
from ropegraph.functional.kind import Kind
from ropegraph.functional.library import Operator
from ropegraph.functional.plans import Slots

OPERATORS: dict[str, Operator] = {}

# What torch's own front ends ask before they skip the dispatcher; without them nothing is skipped.
_C: Any = getattr(torch, "_C")  # noqa: B009
_modes: Any = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
_transforms: Any = getattr(_C, "_are_functorch_transforms_active", lambda: True)
_PLAIN = (Tensor, torch.nn.Parameter)


def register(kind: Kind) -> Kind:
    """Make the operators of a kind known to torch."""
    OPERATORS[kind.name] = Operator(kind)
    return kind


def call(kind: Kind, slots: Slots, attributes: tuple[Any, ...]) -> Tensor:
    """The first result of a kind, differentiable where something requires grad."""
    training = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in slots])
    if torch.compiler.is_compiling() or not _is_plain(slots):
        made = OPERATORS[kind.name].forward(*slots, *attributes, training)
        return made if len(kind.results) == 1 else made[0]
    if training:
        return cast(Tensor, _Apply.apply(kind, attributes, *slots))
    return cast(Tensor, plans.forward(kind, slots, attributes, False)[0])


def _is_plain(slots: Slots) -> bool:
    """True for tensors with memory that no mode or transform watches."""
    if _modes() or _transforms():
        return False
    for x in slots:
        if x is not None and (type(x) not in _PLAIN or x.is_meta):
            return False
    return True


class _Apply(torch.autograd.Function):
    """The operators of a kind without torch's dispatcher, which takes as long as the launches."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, attributes: tuple[Any, ...], *slots: Any) -> Any:
        needs = ctx.needs_input_grad[2:]
        kind.refuse_gradients(needs)
        results = plans.forward(kind, slots, attributes, True)
        wanted = tuple([needs[i] for i in kind.gradient_slots])
        ctx.kind, ctx.attributes, ctx.wanted = kind, attributes, wanted
        ctx.save_for_backward(*kept(kind, slots, tuple(results), wanted))
        return results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kind, saved = ctx.kind, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated in turn
            operator = OPERATORS[kind.name]
            made = operator.gradients(grads[0], saved, ctx.attributes, ctx.wanted)
        else:
            count = len(kind.results)
            made = plans.backward(
                kind, grads[0], saved[:count], saved[count:], ctx.attributes, ctx.wanted
            )
        return place(kind, tuple(made), 2, 0)
