"""Norm and rotation of one tensor: what attention over packed sequences does with Q and with K.

A graph holds these either as rows of one tensor, which a norm takes, or as ragged data, which
attention takes: so the norm has a graph of its own.
"""

from __future__ import annotations

from ropegraph.api import tensor as handles
from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.functional import checks, norms
from ropegraph.functional.dispatch import register
from ropegraph.functional.kind import (
    POSITIONS,
    ROTATION,
    TABLES,
    Attributes,
    Forms,
    Kind,
    declare,
    fresh,
    has_angles,
    rotation,
)

_POSITIONS = (*POSITIONS, "cu_seqlens")


def _forms(forms: Forms, attributes: Attributes, *, training: bool) -> dict[str, Form]:
    checks.data("attention", forms, "x")
    x = forms["x"]
    norms.as_epsilon("attention", attributes["norm_eps"])
    norms.check_weight("attention", attributes["part"], forms["weight"], x)
    found = {"y": fresh(x)}
    return found | {"inv": norms.inverse_form(x)} if training else found


def _record(
    graph: pygraph, forms: Forms, attributes: Attributes, results: Forms
) -> dict[str, handles.Tensor]:
    x = declare(graph, forms, "x")["x"]
    is_training = "inv" in results
    y, inverse = norms.normalised(
        graph, x, "weight", forms, attributes, name="norm", is_training=is_training
    )
    if has_angles(forms):
        turn = declare(graph, forms, *TABLES, *_POSITIONS)
        y = graph.rope(y, name="rope", **turn, **rotation("attention", attributes, x.get_dim()[3]))
    made = {"y": y.set_stride(results["y"].stride)}
    return made if inverse is None else {**made, "inv": inverse.set_stride(results["inv"].stride)}


NORM_ROPE = register(
    Kind(
        name="norm_rope",
        data=("x", "weight"),
        optional=(*TABLES, *_POSITIONS),
        attributes=(*ROTATION, norms.NORM_EPS, ("part", "str")),
        results=("y", "inv"),
        gradients=("x", "weight"),
        turned={},
        forms=_forms,
        record=_record,
        reads_result=False,
    )
)
