"""The operators torch sees: ``torch.ops.ropegraph.rope``, ``attention`` and their backwards.

torch.compile, fake tensors and torch.func meet these; in eager mode plain tensors take the shorter
way of eager.py, to the same plans. An operator has all results that a kind may have: where there is
none, an empty tensor of one axis stands for it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.api.plans import Form, form_of
from ropegraph.errors import GraphError
from ropegraph.functional import plans
from ropegraph.functional.gradient import read_by_backward
from ropegraph.functional.kind import Kind, fresh
from ropegraph.functional.plans import Slots

LIBRARY = torch.library.Library("ropegraph", "DEF")


class Operator:
    """The two operators of a kind, registered with torch when made.

    A kind that changes tensors has one: torch differentiates no operator that does.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._count, self._attributes = len(kind.slots), len(kind.attributes)
        marks = dict(zip(kind.changes, ("(a!)", "(b!)"), strict=False))
        data = [f"Tensor{marks.get(name, '')} {name}" for name in kind.data]
        optional = [f"Tensor? {name}" for name in kind.optional]
        attributes = [f"{schema} {name}" for name, schema in kind.attributes]
        results = [f"Tensor {name}" for name in kind.results]
        read = [f"Tensor? {name}" for name in (*kind.results, *kind.slots)]
        grads = [f"Tensor d{name}" for name in kind.gradients]
        self.forward = self._define(
            kind.name, [*data, *optional, *attributes, "bool training"], results
        )
        name = f"ropegraph::{kind.name}"
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(kind.name, self._forward, device)
        torch.library.register_fake(name, self._forward_fake, lib=LIBRARY)
        if kind.changes:
            return
        self.backward = self._define(
            f"{kind.name}_backward", ["Tensor grad", *read, *attributes, "bool[] wanted"], grads
        )
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(f"{kind.name}_backward", self._backward, device)
        torch.library.register_fake(f"{name}_backward", self._backward_fake, lib=LIBRARY)
        torch.library.register_autograd(
            name, self._differentiate, setup_context=self._keep, lib=LIBRARY
        )
        torch.library.register_autograd(
            f"{name}_backward", self._differentiate_twice, setup_context=self._keep_twice,
            lib=LIBRARY,
        )  # fmt: skip

    def _define(self, name: str, arguments: list[str], results: list[str]) -> Any:
        made = results[0].split()[0] if len(results) == 1 else f"({', '.join(results)})"
        LIBRARY.define(f"{name}({', '.join(arguments)}) -> {made}")
        return getattr(torch.ops.ropegraph, name).default

    def _parts(self, arguments: tuple[Any, ...]) -> tuple[Slots, tuple[Any, ...], Any]:
        """Slots, attributes, and what comes last."""
        count = self._count
        return arguments[:count], tuple(map(_hashable, arguments[count:-1])), arguments[-1]

    def _forward(self, *arguments: Any) -> Any:
        slots, attributes, training = self._parts(arguments)
        made = plans.forward(self.kind, slots, attributes, training)
        return _filled(made, cast(Tensor, slots[0]))

    def _forward_fake(self, *arguments: Any) -> Any:
        slots, attributes, training = self._parts(arguments)
        forms = self._forms(slots)
        results = self.kind.forms(forms, self.kind.named(attributes), training=training)
        made = [_empty(results.get(name), slots[0]) for name in self.kind.results]
        return _filled(made, cast(Tensor, slots[0]))

    def _backward(self, grad: Tensor, *arguments: Any) -> Any:
        results, rest = self._results(arguments)
        slots, attributes, wanted = self._parts(rest)
        made = plans.backward(self.kind, grad, results, slots, attributes, tuple(wanted))
        return _filled(made, grad)

    def _backward_fake(self, grad: Tensor, *arguments: Any) -> Any:
        results, rest = self._results(arguments)
        slots, _, wanted = self._parts(rest)
        forms = self._forms(slots)
        for slot, result in self.kind.turned.items():
            x = results[self.kind.results.index(result)]
            x = grad if x is None and not self.kind.reads_result else x
            if slot not in forms and x is not None:
                forms[slot] = form_of(x)
        made = [
            _empty(fresh(forms[name]), grad) if is_wanted else None
            for name, is_wanted in zip(self.kind.gradients, wanted, strict=True)
        ]
        return _filled(made, grad)

    def _results(self, arguments: tuple[Any, ...]) -> tuple[Slots, tuple[Any, ...]]:
        count = len(self.kind.results)
        return arguments[:count], arguments[count:]

    def _forms(self, slots: Slots) -> dict[str, Form]:
        return {
            name: form_of(x)
            for name, x in zip(self.kind.slots, slots, strict=True)
            if x is not None
        }

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kind = self.kind
        slots, attributes, training = self._parts(inputs)
        kind.refuse_gradients(ctx.needs_input_grad)
        if not training:
            raise GraphError(
                f"{kind.name}: training=False keeps nothing that a gradient needs; there is no "
                "forward-mode derivative either"
            )
        outputs = (output,) if isinstance(output, Tensor) else output
        # A tensor of one axis only stands in for a result.
        results = tuple(None if x.dim() == 1 else x for x in outputs)
        wanted = tuple(ctx.needs_input_grad[i] for i in kind.gradient_slots)
        ctx.attributes, ctx.wanted = attributes, wanted
        ctx.save_for_backward(*read_by_backward(kind, slots, results, wanted))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)

    def _differentiate(self, ctx: Any, *grads: Any) -> Any:
        found: list[Tensor | None] = [None] * (self._count + self._attributes + 1)
        if grads[0] is not None:
            made = self.gradients(grads[0], ctx.saved_tensors, ctx.attributes, ctx.wanted)
            for index, grad in zip(self.kind.gradient_slots, made, strict=True):
                found[index] = grad
        return tuple(found)

    def gradients(
        self, grad: Tensor, saved: Slots, attributes: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> Slots:
        """What the backward operator gives, None for what is not wanted."""
        made = self.backward(grad, *saved, *attributes, wanted)
        made = (made,) if isinstance(made, Tensor) else made
        return tuple(x if w else None for x, w in zip(made, wanted, strict=True))

    def _keep_twice(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, rest = self._results(inputs[1:])
        slots, attributes, _ = self._parts(rest)
        ctx.attributes = attributes
        ctx.save_for_backward(*slots)

    def _differentiate_twice(self, ctx: Any, *grads: Any) -> Any:
        """The gradient of a gradient: of a rotation it is the rotation, of attention there is none.

        A rotation is linear in x alone, so that of the angles is refused as well.
        """
        kind = self.kind
        others = 1 + len(kind.results)
        angles = others + kind.slots.index("freqs")
        if not kind.linear or ctx.needs_input_grad[angles]:
            what = kind.name if not kind.linear else "a rotation whose freqs require grad"
            raise GraphError(
                f"{kind.name}: a second derivative was asked for, but {what} has only a first one; "
                "use create_graph=False, detach freqs, or take torch's own attention for this term"
            )
        slots = list(ctx.saved_tensors)
        slots[0] = grads[0]
        made = self.forward(*slots, *ctx.attributes, torch.is_grad_enabled())
        return (made, *(None,) * (len(kind.results) + self._count + self._attributes + 1))


OPERATORS: dict[str, Operator] = {}


def _hashable(attribute: Any) -> Any:
    """An attribute as a key can hold it: torch hands on a list where a tuple was given."""
    return tuple(cast("list[Any]", attribute)) if isinstance(attribute, list) else attribute


def _empty(form: Form | None, like: Tensor | None) -> Tensor | None:
    if form is None or like is None:
        return None
    return like.new_empty_strided(form.dim, form.stride, dtype=form.dtype)


def _filled(made: Any, like: Tensor) -> Any:
    found = tuple(like.new_empty(0) if x is None else x for x in made)
    return found[0] if len(found) == 1 else found
