"""QK norm: each head of Q and of K by itself, before it turns. Checks, forms, and the recording."""

from __future__ import annotations

import torch

from ropegraph.api.checks import as_number
from ropegraph.api.enums import norm_forward_phase as phases
from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.functional.kind import NORMS, Attribute, Attributes, Forms, fresh, has_norms, widest

NORM_EPS: Attribute = ("norm_eps", "float")
EPSILON = 1e-6  # what norm_eps is where nobody speaks of it
STATISTICS = ("q_inv", "k_inv")


def check(where: str, forms: Forms, attributes: Attributes, data: Form) -> None:
    """Raise GraphError unless norm_eps is one, and the weights fit ``data`` if there are any."""
    epsilon = as_epsilon(where, attributes["norm_eps"])
    if not has_norms(forms) and epsilon != EPSILON:
        raise GraphError(
            f"{where}: norm_eps={epsilon:g} speaks of q_norm and k_norm, which are not given"
        )
    for name in NORMS:
        if name in forms:
            check_weight(where, name, forms[name], data)


def as_epsilon(where: str, norm_eps: object) -> float:
    """norm_eps as a float.  Raises GraphError unless it is a number of 0 or more."""
    epsilon = as_number(norm_eps, f"{where}: norm_eps")
    if epsilon < 0:
        raise GraphError(f"{where}: norm_eps={epsilon:g} is negative; use 0 or more")
    return epsilon


def check_weight(where: str, name: str, weight: Form, data: Form) -> None:
    """Raise GraphError unless a weight fits data [b, h, s, d]."""
    width = data.dim[-1]
    if len(weight.dim) != 1 or weight.dim[0] != width:
        raise GraphError(
            f"{where}: {name} is {list(weight.dim)}; use [{width}], a weight for each channel of a "
            "head"
        )
    if weight.dtype not in (data.dtype, torch.float32):
        raise GraphError(
            f"{where}: {name} is {weight.dtype} but q is {data.dtype}; use that, or torch.float32"
        )


def statistics_form(x: Form) -> Form:
    """A number for each row of [b, h, s, d]: [b, h, s, 1], packed, in at least f32."""
    b, h, s, _ = x.dim
    return Form((b, h, s, 1), (h * s, s, 1, 1), widest(x.dtype), x.device)


def inverse_form(x: Form) -> Form:
    """What a norm keeps of each row for its gradient: the same, nested in memory as x is."""
    return fresh(x, (*x.dim[:3], 1))._replace(dtype=widest(x.dtype))


def normalise(
    graph: pygraph, given: dict[str, Tensor], forms: Forms, attributes: Attributes, results: Forms
) -> None:
    """Put the normalised ``q`` and ``k`` in the place of those in ``given``, if they are to be.

    What the backward needs of them is added as ``q_inv`` and ``k_inv`` if it is among ``results``.
    """
    if not has_norms(forms):
        return
    for x, weight, name in zip("qk", NORMS, STATISTICS, strict=True):
        is_training = name in results
        given[x], inverse = normalised(
            graph, given[x], weight, forms, attributes, name=f"norm_{x}", is_training=is_training
        )
        if inverse is not None:
            given[name] = inverse.set_stride(results[name].stride)


def normalised(
    graph: pygraph,
    x: Tensor,
    weight: str,
    forms: Forms,
    attributes: Attributes,
    *,
    name: str,
    is_training: bool,
) -> tuple[Tensor, Tensor | None]:
    """x normalised with the weight in a slot, and 1 / rms if a gradient will be asked for."""
    form = forms[weight]
    (width,), (step,) = form.dim, form.stride
    stride = [width * step, width * step, width * step, step]
    scale = graph.tensor([1, 1, 1, width], stride, form.dtype, name=weight)
    phase = phases.TRAINING if is_training else phases.INFERENCE
    y, inverse = graph.rmsnorm(phase, x, scale, epsilon=attributes["norm_eps"], name=name)
    assert y is not None
    return y, inverse
