"""Runs a kind forward or backward: the shortest way from a call to the graph built for it.

``_kept`` finds a plan by the forms of the tensors as they are; behind it graphs are built once, by
forms whose meaningless strides are settled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropegraph.api.plans import LIMIT, Form
from ropegraph.api.tensor import settled_strides
from ropegraph.functional.building import Backward, Forward, Plan, SlotForms, build
from ropegraph.functional.kept import Kept
from ropegraph.functional.kind import Kind

Slots = tuple[Tensor | None, ...]

_kept: Kept[Any, Plan] = Kept(LIMIT)


def forward(
    kind: Kind, slots: Slots, attributes: tuple[Any, ...], training: bool
) -> list[Tensor | None]:
    """Run the forward: its results, None where there is none."""
    key = (kind, attributes, training, *_forms_key(slots))
    plan = _find(key)
    if plan is None:
        plan = build(Forward(kind, _settled(slots), attributes, training))
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
    grad = like_result(grad, results[0])
    key = (kind, attributes, wanted, *_forms_key((grad, *results)), *_forms_key(slots))
    plan = _find(key)
    if plan is None:
        forms = (form_of_or_none(grad), *_settled(results)[1:])
        plan = build(Backward(kind, _settled(slots), forms, attributes, wanted))
        _kept.put(key, plan)
    if plan.turn is not None:
        results = (*results[: -len(kind.turned)], *plan.turn(*slots))
    return plan(grad, *results, *slots)


def like_result(grad: Tensor, result: Tensor | None) -> Tensor:
    """A gradient laid out as the result it belongs to: as it is, if it is."""
    if result is None:
        return grad if 0 not in grad.stride() else grad.contiguous()
    if grad.stride() == result.stride() and grad.dtype is result.dtype:
        return grad
    return torch.empty_like(result).copy_(grad)


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


def form_of_or_none(x: Tensor | None) -> Form | None:
    """The form of a tensor, strides that mean nothing settled."""
    if x is None:
        return None
    dim = tuple(x.shape)
    return Form(dim, settled_strides(dim, x.stride()), x.dtype, x.device)


def _settled(slots: Slots) -> SlotForms:
    return tuple(map(form_of_or_none, slots))
