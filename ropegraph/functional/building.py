"""Graphs of a kind, recorded and built once for all that lowering reads of a call."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ropegraph.api.handle import Handle
from ropegraph.api.plans import LIMIT, Form
from ropegraph.api.pygraph import pygraph
from ropegraph.api.wrapper import graph_cache
from ropegraph.functional.kind import Kind, fresh, has_angles, has_norms, is_prepared
from ropegraph.functional.plan import Plan, SlotForms
from ropegraph.functional.unturned import can_turn_in_place, make_deterministic, unturned


class Forward(NamedTuple):
    """A forward graph.  forms: of the slots.  training: a gradient will be asked for."""

    kind: Kind
    forms: SlotForms
    attributes: tuple[Any, ...]
    training: bool = True


class Backward(NamedTuple):
    """The gradient graph of a forward.

    forms: of the slots; None as well where the backward reads the rotated tensor in its place.
    results: forms of the forward's results.  wanted: which of kind.gradients.
    """

    kind: Kind
    forms: SlotForms
    results: SlotForms
    attributes: tuple[Any, ...]
    wanted: tuple[bool, ...]


class Turn(NamedTuple):
    """The rotations of a forward alone, scaled as its fold scaled them."""

    kind: Kind
    forms: SlotForms
    attributes: tuple[Any, ...]


Job = Forward | Backward | Turn


def build(job: Job) -> Plan:
    """The plan of a job; made at most once while it is kept."""
    try:
        hash(job)
    except TypeError:
        return _build(job)  # recording names the argument that cannot be
    return _built(job)


def _key(job: Job) -> Job:
    return job


@graph_cache(_key, maxsize=LIMIT)
def _built(job: Job) -> Plan:
    return _build(job)


def _build(job: Job) -> Plan:
    device = next(form.device for form in job.forms if form is not None)
    is_cuda = device.type == "cuda"
    with torch.cuda.device(device) if is_cuda else nullcontext():
        match job:
            case Forward():
                return _forward(job)
            case Backward():
                return _backward(job)
            case Turn():
                return _turn(job)


def _graph(job: Forward | Turn) -> tuple[pygraph, dict[str, Form], dict[str, Any]]:
    """An empty graph, the forms of the slots there are, and the attributes."""
    kind = job.kind
    forms = {n: form for n, form in zip(kind.slots, job.forms, strict=True) if form is not None}
    attributes = kind.named(job.attributes)
    device = next(iter(forms.values())).device
    # A handle would fix the stream; without one a graph is built for the current CUDA device.
    handle = None if device.type == "cuda" else Handle(device)
    return pygraph(kind.name, handle=handle, **kind.settings(attributes)), forms, attributes


def _forward(job: Forward) -> Plan:
    kind = job.kind
    graph, forms, attributes = _graph(job)
    results = kind.forms(forms, attributes, training=job.training)
    made = kind.record(graph, forms, attributes, results)
    first = kind.results[0]
    beside: list[tuple[str, Form]] = []
    for name, tensor in made.items():
        if name == first:
            tensor.set_output(True).set_name(name)
        elif name in results:
            tensor.set_saved(True).set_name(name)
        elif tensor.get_ragged_offset() is not None and tensor.spec.producer is not None:
            tensor.set_saved(True).set_name(name)
            slot = next(slot for slot, result in kind.turned.items() if result == name)
            beside.append((name, fresh(forms[slot])))
    written = tuple(map(results.get, kind.results))
    zeros = (first,) if "cu_seqlens" in forms else ()
    return Plan(graph, kind.slots, kind.results, written, zeros=zeros, beside=beside)


def _turn(job: Turn) -> Plan:
    kind = job.kind
    assert kind.turn is not None
    graph, forms, attributes = _graph(job)
    whole = build(Forward(kind, job.forms, _kept_rotations(kind, job.attributes))).graph
    made = kind.turn(graph, forms, attributes, whole.fold_contract.entries["attention"].factors)
    names = tuple(made)
    for name in names:
        made[name].set_output(True).set_name(name)
    results = kind.forms(forms, _without_recompute(attributes), training=True)
    written = tuple(results[name] for name in names)
    return Plan(graph, kind.slots, names, written)


def _backward(job: Backward) -> Plan:
    kind = job.kind
    forms = dict(zip(kind.slots, job.forms, strict=True))
    results = dict(zip(kind.results, job.results, strict=True))
    for slot, result in kind.turned.items():
        forms[slot] = forms[slot] or results[result]
    given = {name: form for name, form in forms.items() if form is not None}
    attributes = kind.named(job.attributes)
    kept = _kept_rotations(kind, job.attributes)
    forward = build(Forward(kind, tuple(forms.values()), kept)).graph
    names = [n for n, is_wanted in zip(kind.gradients, job.wanted, strict=True) if is_wanted]
    first = kind.results[0]
    graph = forward.backward_graph([first], names)
    made = {name: fresh(given[name]) for name in names}
    for name, form in made.items():
        grad = graph.find_tensor(f"d{name}")
        if grad.get_ragged_offset() is None:
            # a weight [d] is [1, 1, 1, d] in the graph
            ahead = len(grad.get_dim()) - len(form.dim)
            grad.set_stride((*(math.prod(form.dim),) * ahead, *form.stride))
    incoming, result = graph.find_tensor(f"d{first}"), results[first]
    if incoming.get_ragged_offset() is None and result is not None:
        incoming.set_stride(result.stride)
    if attributes.get("deterministic"):
        make_deterministic(graph)
    to_turn = _to_turn(job, given, names)
    still = unturned(graph, names, to_turn)
    grads = tuple(f"d{name}" for name in kind.gradients)
    shares = can_turn_in_place(given, attributes)
    turns_again = attributes.get("recompute_rope") and is_prepared(given)
    return Plan(
        graph,
        (f"d{first}", *kind.results, *kind.slots),
        grads,
        tuple(map(made.get, kind.gradients)),
        zeros=grads if "cu_seqlens" in given else (),
        beside=[] if shares else [(name, to_turn[slot]) for name, slot in still.items()],
        in_place=[(name, f"d{slot}") for name, slot in still.items()] if shares else [],
        turn=build(Turn(kind, job.forms, job.attributes)) if turns_again else None,
    )


def _to_turn(job: Backward, forms: dict[str, Form], names: list[str]) -> dict[str, Form]:
    """Forms of the gradients of the rotated q and k, if those of q and k are made from them.

    Where there are norms, their weights and packed QKV are served by the same gradients.
    """
    if has_norms(forms):
        kept = _without_recompute(job.kind.named(job.attributes))
        made = job.kind.forms(forms, kept, training=True)
        return {x: made[f"{x}_rot"] for x in "qk" if f"{x}_rot" in made}
    if not has_angles(forms):
        return {}
    return {x: fresh(forms[x]) for x in "qk" if x in names}


def _without_recompute(attributes: dict[str, Any]) -> dict[str, Any]:
    return {n: False if n == "recompute_rope" else value for n, value in attributes.items()}


def _kept_rotations(kind: Kind, attributes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The attributes of the forward that exports what it rotates, which is folded alike."""
    return tuple(_without_recompute(kind.named(attributes)).values())
