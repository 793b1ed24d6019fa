"""Eager calls on plain tensors: from a call to its graph and on to the gradient graph, no further.

torch's dispatcher and a second look-up in the backward would take as long as the launches do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.api.plans import LIMIT
from ropegraph.api.tensor import settled_strides
from ropegraph.errors import GraphError
from ropegraph.functional.allocate import laid_out
from ropegraph.functional.building import Backward, Forward, build
from ropegraph.functional.gradient import read_by_backward
from ropegraph.functional.kept import Kept
from ropegraph.functional.kind import Kind, has_angles
from ropegraph.functional.library import OPERATORS
from ropegraph.functional.plan import Plan
from ropegraph.functional.plans import Slots, run, settled

# Modes and transforms want to see operators; without torch's word for them nothing is skipped.
_C: Any = getattr(torch, "_C")  # noqa: B009
has_modes: Any = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
has_transforms: Any = getattr(_C, "_are_functorch_transforms_active", lambda: True)
functorch: Any = getattr(_C, "_functorch", None)
_PLAIN = (Tensor, torch.nn.Parameter)


def is_only_mapped() -> bool:
    """True within torch.vmap alone, whose slices torch's own autograd follows."""
    levels: Any = functorch.get_interpreter_stack() if functorch is not None else None
    return levels is not None and all(level.key().name == "Vmap" for level in levels)


def unmapped(x: Tensor) -> Tensor:
    """What torch.vmap takes slices of: it knows whether it requires grad, a slice does not."""
    if torch.compiler.is_compiling() or not has_transforms() or functorch is None:
        return x
    while functorch.is_batchedtensor(x):
        x = functorch.get_unwrapped(x)
    return x


class Call:
    """All that calls of one form share.  wanted: which of kind.gradients; None: no gradient.

    present: the slots that hold a tensor. They alone pass through autograd, to which every argument
    costs time, even a None.
    """

    def __init__(
        self, kind: Kind, slots: Slots, attributes: tuple[Any, ...], wanted: tuple[bool, ...] | None
    ) -> None:
        self.kind, self.attributes = kind, attributes
        self.forms = settled(slots)
        self.training, self.wanted = wanted is not None, wanted or ()
        self.plan = build(Forward(kind, self.forms, attributes, self.training))
        self.present = [i for i, x in enumerate(slots) if x is not None]
        at = self._at = {i: place for place, i in enumerate(self.present)}
        self._needed = [(at[i], name) for i, name in self.plan.needed]
        if wanted is not None:
            written = self.plan.written
            keep = read_by_backward(kind, self.forms, written, wanted)
            count = len(written)
            self._keeps_results = [i for i in range(count) if keep[i] is not None]
            keeps_slots = [i for i in range(len(slots)) if keep[count + i] is not None]
            self._keeps_given = [at[i] for i in keeps_slots]
            places = (*self._keeps_results, *(count + i for i in keeps_slots))
            self._saved = {place: i for i, place in enumerate(places)}
            self._full = count + len(slots)
        named = {n for n, x in zip(kind.slots, slots, strict=True) if x is not None}
        self.in_place = kind.in_place and bool(attributes[-1]) and has_angles(named)
        self._backward: Plan | None = None

    def run(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        """The results.  given: the tensors in the slots that hold one."""
        return self.plan.run({name: given[i] for i, name in self._needed})

    def keep(self, results: list[Any], given: Sequence[Tensor]) -> list[Any]:
        """What the backward reads, in the order in which it is saved."""
        return [results[i] for i in self._keeps_results] + [given[i] for i in self._keeps_given]

    def place(self, made: Slots) -> tuple[Any, ...]:
        """Gradients in the places of what autograd was given: this call, then ``present``."""
        found: list[Tensor | None] = [None] * (1 + len(self.present))
        for index, grad in zip(self.kind.gradient_slots, made, strict=True):
            if grad is not None:
                found[1 + self._at[index]] = grad
        return tuple(found)

    def gradients(self, grad: Tensor, saved: Slots) -> Slots:
        """The gradients from what keep() gave."""
        plan = self._backward or self._build_backward()
        form = self.plan.written[0]
        if form is not None and grad.stride() != form.stride:
            grad = laid_out(grad, form)
        try:
            return self._run(plan, grad, saved)
        except GraphError:
            laid = self._laid(saved)
            if laid is None:
                raise
            return self._run(plan, grad, laid)

    def _run(self, plan: Plan, grad: Tensor, saved: Slots) -> Slots:
        if plan.turn is not None:
            full = self.full(saved)
            count = len(self.kind.results)
            return tuple(run(plan, grad, full[:count], full[count:]))
        pack = {name: saved[i] for i, name in self._reads}
        pack[plan.reads[0]] = grad
        return tuple(plan.run(pack))

    def _laid(self, saved: Slots) -> Slots | None:
        """What was saved in its old strides: saved_tensors_hooks may hand back others."""
        forms = (*self.plan.written, *self.forms)
        found, moved = list(saved), False
        for place, at in self._saved.items():
            x, form = saved[at], forms[place]
            if x is None or form is None or x.shape != form.dim:
                continue
            if settled_strides(form.dim, x.stride()) != form.stride:
                found[at], moved = laid_out(x, form), True
        return tuple(found) if moved else None

    def full(self, saved: Slots) -> list[Any]:
        """Results and slots in their places, None for what was not kept."""
        return [
            None if (at := self._saved.get(i)) is None else saved[at] for i in range(self._full)
        ]

    def _build_backward(self) -> Plan:
        count = len(self.kind.results)
        forms = (*self.plan.written, *self.forms)
        keep = [forms[i] if i in self._saved else None for i in range(self._full)]
        # The first result is there in any case: by it the incoming gradient is laid out.
        results = (forms[0], *keep[1:count])
        plan = build(
            Backward(self.kind, tuple(keep[count:]), results, self.attributes, self.wanted)
        )
        if plan.turn is None:
            self._reads = [(self._saved[i - 1], name) for i, name in plan.needed if i]
        self._backward = plan
        return plan


_calls: Kept[Any, Call] = Kept(LIMIT)


def find(kind: Kind, slots: Slots, attributes: tuple[Any, ...]) -> Call | None:
    """The plan of a call in eager mode; None where torch's own operator must take it."""
    if has_modes() or has_transforms():
        return None
    key: list[Any] = [kind, attributes, torch.is_grad_enabled()]
    for x in slots:
        if x is None:
            key.append(None)
        else:
            key += (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
    try:
        found = _calls.get(tuple(key))
    except TypeError:
        return _make(kind, slots, attributes)  # recording says which attribute cannot be
    if found is None:
        found = _make(kind, slots, attributes)
        if found is not None:
            _calls.put(tuple(key), found)
    return found


def _make(kind: Kind, slots: Slots, attributes: tuple[Any, ...]) -> Call | None:
    if any(x is not None and (type(x) not in _PLAIN or x.is_meta) for x in slots):
        return None
    needs = tuple(x is not None and x.requires_grad for x in slots)
    if not torch.is_grad_enabled() or not any(needs):
        return Call(kind, slots, attributes, None)
    kind.refuse_gradients(needs)
    return Call(kind, slots, attributes, tuple(needs[i] for i in kind.gradient_slots))


class Apply(torch.autograd.Function):
    """A call with its gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, *given: Any) -> Any:
        results = call.run(given)
        ctx.call = call
        ctx.save_for_backward(*call.keep(results, given))
        return results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        saved: Slots = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated in turn
            operator = OPERATORS[call.kind.name]
            full = tuple(call.full(saved))
            made = operator.gradients(grads[0], full, call.attributes, call.wanted)
        else:
            made = call.gradients(grads[0], saved)
        return call.place(made)


class ApplyInPlace(Apply):
    """A call that writes over its first slot, which then is another result of it."""

    @staticmethod
    def forward(ctx: Any, call: Call, *given: Any) -> Any:
        first = Apply.forward(ctx, call, *given)
        ctx.mark_dirty(given[0])
        ctx.set_materialize_grads(False)
        return first, given[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: Call = ctx.call
        if grads[1] is not None:
            raise GraphError(
                f"{call.kind.name}: {call.kind.slots[0]} was rotated in place, and what read it "
                "afterwards hands it a gradient; leave in_place out"
            )
        if grads[0] is None:
            return call.place((None,) * len(call.kind.gradients))
        return Apply.backward(ctx, grads[0])


def run_call(call: Call, slots: Slots) -> Tensor:
    """The first result, differentiable if the call asks for it."""
    given = cast("list[Tensor]", [slots[i] for i in call.present])
    if not call.training:
        return cast(Tensor, call.run(given)[0])
    if call.in_place:
        return cast(Tensor, ApplyInPlace.apply(call, *given)[0])
    return cast(Tensor, Apply.apply(call, *given))
