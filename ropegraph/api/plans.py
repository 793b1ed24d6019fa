"""Built graphs, kept by all that their recording depends on, for callers that record on the fly.

What depends on values or addresses stays out of the key; two threads may use one plan at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ropegraph.api.handle import Handle
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor
from ropegraph.api.wrapper import graph_cache
from ropegraph.dtypes import torch_dtype

LIMIT = 256  # plans that are kept; the one not used for longest goes

# Records on a graph whose inputs are there by name, and returns its outputs by name.
Recipe = Callable[..., Mapping[str, Tensor]]


class Form(NamedTuple):
    """What a recording depends on of a framework tensor."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def form_of(x: torch.Tensor) -> Form:
    """The form of a tensor, which is not read."""
    return Form(tuple(x.shape), x.stride(), x.dtype, x.device)


@dataclass(frozen=True)
class Recording:
    """A graph: ``recipe(graph, tensors, **attributes)``.

    inputs: by name; an absent one is a tensor that was not given.  strides: those of the outputs,
    by name.  attributes: in their final types, for 1, 1.0 and True are one key.
    """

    recipe: Recipe
    inputs: tuple[tuple[str, Form], ...]
    strides: tuple[tuple[str, tuple[int, ...]], ...]
    attributes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Gradient:
    """The gradient graph of a recording: d<name> for every name in ``of``.

    grads: the gradients that come in, by the names of the forward's outputs; any strides.
    """

    forward: Recording
    of: tuple[str, ...]
    grads: tuple[tuple[str, Form], ...]


class Plan:
    """A graph with how its outputs are allocated.  ``saved``: what a gradient graph reads."""

    def __init__(self, graph: pygraph) -> None:
        self.graph = graph
        self.saved = tuple(graph.saved)
        made = graph.lowered.recorded
        self._outputs = {
            name: (value.dim, value.stride, torch_dtype(value.dtype))
            for name in made.outputs
            for value in (made.values[name],)
        }

    def __call__(
        self, inputs: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run on the inputs by name; every output by name, new but for those in ``out``."""
        device = next(iter(inputs.values())).device
        results = dict(out or {})
        for name, (dim, stride, dtype) in self._outputs.items():
            if name not in results:
                results[name] = torch.empty_strided(dim, stride, dtype=dtype, device=device)
        self.graph.execute({**inputs, **results})
        return results


def _key(made_from: Recording | Gradient) -> Recording | Gradient:
    return made_from


@graph_cache(_key, maxsize=LIMIT)
def plan(made_from: Recording | Gradient) -> Plan:
    """The built graph of a recording, or of its gradients; made at most once while it is kept."""
    is_forward = isinstance(made_from, Recording)
    _, form = (made_from.inputs if is_forward else made_from.grads)[0]
    is_cuda = form.device.type == "cuda"
    with torch.cuda.device(form.device) if is_cuda else nullcontext():
        graph = _recorded(made_from) if is_forward else _derived(made_from)
        graph.build()
    return Plan(graph)


def run(
    made_from: Recording | Gradient,
    inputs: Mapping[str, torch.Tensor],
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Run the plan on the inputs by name, as Plan does."""
    return untraced(_run)(made_from, inputs, out)


def _run(
    made_from: Recording | Gradient,
    inputs: Mapping[str, torch.Tensor],
    out: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    return plan(made_from)(inputs, out)


def untraced(function: Any) -> Any:
    """The function, which torch.compile calls but does not trace.

    Traced, the executor's own operations would be fused anew, and round otherwise.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def _recorded(made_from: Recording) -> pygraph:
    device = made_from.inputs[0][1].device
    # A handle would fix the stream; without one a graph is built for the current CUDA device.
    handle = None if device.type == "cuda" else Handle(device)
    graph = pygraph(made_from.recipe.__name__, handle=handle)
    tensors = {
        name: graph.tensor(form.dim, form.stride, form.dtype, name=name)
        for name, form in made_from.inputs
    }
    made = made_from.recipe(graph, tensors, **dict(made_from.attributes))
    strides = dict(made_from.strides)
    for name, tensor in made.items():
        tensor.set_output(True).set_name(name).set_stride(strides[name])
    return graph


def _derived(made_from: Gradient) -> pygraph:
    forward = _recorded(made_from.forward)
    backward = forward.backward_graph([name for name, _ in made_from.grads], list(made_from.of))
    for name, form in made_from.grads:
        backward.find_tensor(f"d{name}").set_stride(form.stride)
    return backward
