"""Runs a kind forward or backward: the shortest way from a call to the graph built for it.

``_kept`` finds a plan by the forms of the tensors as they are; behind it graphs are built once, by
forms whose meaningless strides are settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ropegraph.api.plans import LIMIT, Form, form_of
from ropegraph.api.tensor import settled_strides
from ropegraph.functional.allocate import laid_out
from ropegraph.functional.building import Backward, Forward, build
from ropegraph.functional.kept import Kept
from ropegraph.functional.kind import Kind
from ropegraph.functional.plan import Plan, SlotForms

Slots = tuple[Tensor | None, ...]

_kept: Kept[Any, Plan] = Kept(LIMIT)


def forward(
    kind: Kind, slots: Slots, attributes: tuple[Any, ...], training: bool
) -> list[Tensor | None]:
    """Run the forward: its results, None where there is none."""
    key = (kind, attributes, training, *_forms_key(slots))
    plan = _find(key)
    if plan is None:
        plan = build(Forward(kind, settled(slots), attributes, training))
        _kept.put(key, plan)
    return plan(*slots)


def backward(
    kind: Kind,
    grad: Tensor,
    results: Slots,
    slots: Slots,
    attributes: tuple[Any, ...],
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Run the gradient graph: a gradient for every wanted one of kind.gradients, None for others.

    grad: of the first result.  results: of the forward.  slots: those that the backward reads.
    """
    if results[0] is None:
        grad = grad.contiguous() if 0 in grad.stride() else grad
    elif grad.stride() != results[0].stride():
        grad = laid_out(grad, form_of(results[0]))
    key = (kind, attributes, wanted, *_forms_key((grad, *results)), *_forms_key(slots))
    plan = _find(key)
    if plan is None:
        forms = (settled_form(grad), *settled(results)[1:])
        plan = build(Backward(kind, settled(slots), forms, attributes, wanted))
        _kept.put(key, plan)
    return run(plan, grad, results, slots)


def run(plan: Plan, grad: Tensor, results: Sequence[Any], slots: Sequence[Any]) -> list[Any]:
    """Run a gradient graph on all results and slots; rotations that were not kept are made."""
    if plan.turn is not None:
        made = plan.turn(*slots)
        results = (*results[: -len(made)], *made)  # they come last
    return plan(grad, *results, *slots)


def _find(key: Any) -> Plan | None:
    try:
        return _kept.get(key)
    except TypeError:
        return None  # something that cannot be hashed: the recording says what it is


def _forms_key(slots: Slots) -> list[Any]:
    key: list[Any] = []
    for x in slots:
        if x is None:
            key.append(None)
        else:
            key += (x.shape, x.stride(), x.dtype, x.device)
    return key


def settled_form(x: Tensor | None) -> Form | None:
    """The form of a tensor, strides that mean nothing settled."""
    if x is None:
        return None
    dim = tuple(x.shape)
    return Form(dim, settled_strides(dim, x.stride()), x.dtype, x.device)


def settled(slots: Slots) -> SlotForms:
    """The forms of all slots."""
    return tuple(map(settled_form, slots))
