"""rope: the rotation of one tensor, differentiable."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ropegraph.api import tensor as handles
from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.functional.arguments import angles, tensor, tensors
from ropegraph.functional.checks import data
from ropegraph.functional.dispatch import call, register
from ropegraph.functional.foreign import closed, refuse
from ropegraph.functional.kind import (
    POSITIONS,
    ROTATION,
    TABLES,
    Attributes,
    Forms,
    Kind,
    declare,
    fresh,
    rotation,
)

_POSITIONS = (*POSITIONS, "cu_seqlens")


def _forms(forms: Forms, attributes: Attributes, *, training: bool) -> dict[str, Form]:  # noqa: ARG001 - as others
    data("rope", forms, "x")
    return {"y": fresh(forms["x"])}


def _record(
    graph: pygraph, forms: Forms, attributes: Attributes, results: Forms
) -> dict[str, handles.Tensor]:
    given = declare(graph, forms, "x", *TABLES, *_POSITIONS)
    x = given.pop("x")
    options = {name: attributes[name] for name in ("output_scale", "cp_size", "cp_rank")}
    y = graph.rope(
        x, name="rope", **given, **options, **rotation("rope", attributes, x.get_dim()[3])
    )
    return {"y": y.set_stride(results["y"].stride)}


ROPE = register(
    Kind(
        name="rope",
        data=("x",),
        optional=(*TABLES, *_POSITIONS),
        attributes=(*ROTATION, ("output_scale", "float"), ("cp_size", "int"), ("cp_rank", "int")),
        results=("y",),
        gradients=("x", "freqs"),
        turned={"x": "y"},
        forms=_forms,
        record=_record,
        linear=True,
        reads_result=False,
    )
)


@closed
def rope(
    x: Tensor,
    freqs: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cos_sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    position_ids: Tensor | None = None,
    start_positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rope_dim: int = 0,
    rope_offset: int | None = None,
    interleaved: bool = False,
    interleaved_output: bool | None = None,
    output_scale: float = 1.0,
    attention_factor: float = 1.0,
    inverse: bool = False,
    half_width: bool = False,
    table_layout: str | None = None,
    angle_precision: str = "float32",
    numerics: str = "fp32",
    cp_size: int = 1,
    cp_rank: int = 0,
    **foreign: NoReturn,
) -> Tensor:
    """Rotate channel pairs of ``x`` by its positions; the arguments are those of pygraph.rope.

    x: [b, h, s, d], any strides, fp16, bf16, fp32 or fp64.  Exactly one source of angles:
    freqs: radians [s_max, 1 or b, 1, r], [s_max, r] or [b, s_max, r]; cos and sin; cos_sin;
    inv_freq [r / 2].  rope_dim: fewer than all channels want rope_offset as well, which says which.
    position_ids: [b or 1, s].  start_positions: [b].  cu_seqlens: [n + 1], x is [1, h, t, d].
    Returns a new [b, h, s, d] of the type of x, whatever autocast says, with memory in the order
    of x. Differentiable in x, twice and more, and in freqs (by torch alone, once).
    Raises GraphError for what does not fit, and where another tensor requires grad.
    """
    if foreign:
        refuse(rope, foreign)
    tensors("rope", x=x)
    slots = (
        x, *angles(freqs, cos, sin, cos_sin, inv_freq),
        tensor(position_ids, "position_ids"), tensor(start_positions, "start_positions"),
        tensor(cu_seqlens, "cu_seqlens"),
    )  # fmt: skip
    attributes: tuple[Any, ...] = (
        rope_dim, rope_offset, interleaved, interleaved_output, attention_factor, inverse,
        half_width, table_layout, angle_precision, numerics, output_scale, cp_size, cp_rank,
    )  # fmt: skip
    return call(ROPE, slots, attributes)
