"""Derive the graph of gradients from a forward graph.

The backward is recorded as the chain rule reads on the graph as recorded; the forward's contract
then folds it as the forward was folded. So what runs is what a hand-made backward would be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropegraph.api.checks import as_list
from ropegraph.api.gradients.forward import Forward
from ropegraph.api.gradients.rules import rule_of
from ropegraph.api.gradients.tape import Tape
from ropegraph.api.tensor import Tensor
from ropegraph.errors import FoldContractError, GraphError
from ropegraph.ir.ops import Scale, Sdpa

if TYPE_CHECKING:
    from ropegraph.api.pygraph import pygraph


def derive(forward: pygraph, outputs: list[Any], inputs: list[Any]) -> pygraph:
    """The gradient graph of ``inputs``, fold included; see pygraph.backward_graph."""
    from ropegraph.api.pygraph import pygraph as make

    of, by = _tensors(forward, outputs, "outputs"), _tensors(forward, inputs, "inputs")
    if not of or not by:
        raise GraphError("backward_graph: give at least one output and one input")
    for tensor in of:
        if tensor.spec.producer is None:
            raise GraphError(
                f"backward_graph: output {tensor.get_name()!r} is an input of the graph"
            )
    recorded = Forward(forward.recorder, by)
    # The fold must be known before the contract is handed on, so nothing may change after it.
    _export(recorded, of)
    contract = forward.fold_contract
    backward = make(f"{forward.name}_backward", fold_contract=contract, **forward.settings)
    tape = Tape(recorded, backward.recorder)
    for tensor in of:
        dim, stride, name = tensor.get_dim(), tensor.get_stride(), f"d{tensor.get_name()}"
        grad = backward.tensor(dim, stride, tensor.get_data_type(), name=name)
        tape.share_offset(grad, tensor)
        tape.start(tensor, grad)
    for node in reversed(recorded.nodes):
        if any(map(tape.has_gradient, node.outputs.values())) and recorded.is_wanted(node):
            rule_of(node).record(tape, node)
    folded = _folded(forward)
    for tensor in by:
        _expose(tape, tensor, tensor in folded)
    backward.saved = tape.saved
    try:
        _ = backward.trace
    except FoldContractError as error:
        raise FoldContractError(
            f"backward_graph: {error}; record the forward with fold='auto'"
        ) from error
    return backward


def _tensors(forward: pygraph, given: Any, argument: str) -> list[Tensor]:
    """One tensor or several, each of them once."""
    one = isinstance(given, (str, Tensor))
    several = [given] if one else as_list(given, f"backward_graph: {argument}")
    return list(dict.fromkeys(_tensor(forward, t, argument) for t in several))


def _tensor(forward: pygraph, given: Any, argument: str) -> Tensor:
    if isinstance(given, str):
        return forward.find_tensor(given)
    if not isinstance(given, Tensor) or given.recorder is not forward.recorder:
        raise GraphError(f"backward_graph: {argument}: {given!r:.60} is no tensor of this graph")
    return given


def _export(forward: Forward, outputs: list[Tensor]) -> None:
    """Mark what the backward needs; a graph that is built already must export it by itself."""
    nodes = forward.leading_to(outputs)
    needed = [forward.whole(t) for node in nodes for t in rule_of(node).needs(forward, node)]
    missing = [t for t in needed if not t.is_real and not t.spec.is_saved]
    if missing and forward.recorder.closed_by:
        names = ", ".join(repr(t.get_name()) for t in dict.fromkeys(missing))
        raise GraphError(
            f"backward_graph: the forward {forward.recorder.name!r} is built and does not export "
            f"{names}; call backward_graph before build, or set_saved(True) on them"
        )
    for tensor in missing:
        tensor.set_saved(True)


def _folded(forward: pygraph) -> set[Tensor]:
    """The tensors that a fold of the forward scaled: their gradients must not show that."""
    entries = forward.fold_contract.entries
    return {
        node.inputs[port]
        for node in forward.recorder.nodes
        if isinstance(node.attrs, Sdpa) and node.name in entries
        for port, factor in zip(("q", "k"), entries[node.name].factors, strict=True)
        if factor != 1.0
    }


def _expose(tape: Tape, tensor: Tensor, is_folded: bool) -> None:
    """Make the gradient of an asked-for input an output."""
    name = f"d{tape.forward.names[tensor]}"
    if not tape.has_gradient(tensor):
        raise GraphError(f"backward_graph: the outputs do not depend on {tensor.get_name()!r}")
    grad = tape.gradient(tensor)
    if grad.spec.producer is None:
        raise GraphError(
            f"backward_graph: {tensor.get_name()!r} is an output itself; its gradient is given"
        )
    if is_folded:
        # A node of its own, so that the fold has where to return the scale to.
        made = tape.record(Scale(1.0), name, {"input": grad}, "output")
        grad = tape.replace(tensor, made["output"])
    grad.set_output(True).set_name(name)
