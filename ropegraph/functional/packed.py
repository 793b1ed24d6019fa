"""Attention on packed QKV: what it is, and the recording."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from ropegraph.api.checks import as_list
from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.functional import norms
from ropegraph.functional.dispatch import register
from ropegraph.functional.kind import (
    NORMS,
    POSITIONS,
    ROTATION,
    TABLES,
    Attributes,
    Forms,
    Kind,
    declare,
    fresh,
    has_angles,
    has_norms,
    rotation,
)
from ropegraph.functional.sdpa import MASKS, SDPA, masks, result_forms, sdpa, settings
from ropegraph.ir.ops import SplitQkv
from ropegraph.ir.packed import PARTS, view_of


def heads(form: Form, attributes: Attributes) -> dict[str, Form]:
    """q, k and v, [b, h, s, d] each, where they lie in the packed tensor.

    Raises GraphError if split does not fit.
    """
    split = SplitQkv(cast(Any, tuple(attributes["split"])), attributes["by_groups"])
    found: dict[str, Form] = {}
    for part in PARTS:
        _, dim, stride = view_of(split, part, form.dim, form.stride, "qkv_attention")
        if len(dim) == 5:  # heads in two levels, which only the result of a rotation has in one
            b, groups, ratio, s, d = dim
            dim = b, groups * ratio, s, d
            stride = stride[0], stride[2], *stride[3:]
        found[part] = form._replace(dim=dim, stride=stride)
    return found


def read_split(where: str, given: Iterable[int], by_groups: bool | None, dim: Any) -> Any:
    """(split, by_groups) in their final types.  Raises GraphError if both layouts fit."""
    split = tuple(as_list(given, f"{where}: split"))
    if len(split) != 3:
        raise GraphError(f"{where}: split={list(split)}; use three numbers, for q, k and v")
    if by_groups is None:
        fits = [len(dim) == 4 and sum(split) == dim[axis] for axis in (2, 3)]
        if all(fits):
            raise GraphError(
                f"{where}: split={list(split)} fits both the heads and the width of qkv "
                f"{list(dim)}; say by_groups=True or False"
            )
        by_groups = fits[1]
    return split, by_groups


def _forms(forms: Forms, attributes: Attributes, *, training: bool) -> dict[str, Form]:
    parts = heads(forms["qkv"], attributes)
    norms.check("qkv_attention", forms, attributes, parts["q"])
    keeps_rotations = not (attributes["recompute_rope"] or attributes["in_place"])
    return result_forms(parts, forms, training=training, keeps_rotations=keeps_rotations)


def _record(
    graph: pygraph, forms: Forms, attributes: Attributes, results: Forms
) -> dict[str, Tensor]:
    given = masks(graph, forms) | _rotated(graph, forms, attributes, results, (1.0, 1.0))
    made = sdpa(graph, given, attributes, results)
    return {name: made[name].set_stride(form.stride) for name, form in results.items()}


def _turn(
    graph: pygraph, forms: Forms, attributes: Attributes, factors: tuple[float, float]
) -> dict[str, Tensor]:
    made = _rotated(graph, forms, attributes, {}, factors)
    del made["v"]
    parts = heads(forms["qkv"], attributes)
    for name, part in (("q_rot", "q"), ("k_rot", "k")):
        made[name].set_stride(fresh(parts[part]).stride)
    return made


def _rotated(
    graph: pygraph,
    forms: Forms,
    attributes: Attributes,
    results: Forms,
    factors: tuple[float, float],
) -> dict[str, Tensor]:
    """q_rot, k_rot and v as parts of qkv, or made from them, and the statistics of the norms."""
    given = declare(graph, forms, "qkv", *TABLES, *POSITIONS)
    qkv = given.pop("qkv")
    own: dict[str, Any] = {}
    if has_angles(forms):
        width = heads(forms["qkv"], attributes)["q"].dim[3]
        own = rotation("qkv_attention", attributes, width)
    layout = {"split": attributes["split"], "by_groups": attributes["by_groups"]}
    if has_norms(forms):
        split = graph.split_qkv(qkv, name="split", **layout)
        parts: dict[str, Tensor] = dict(zip(PARTS, split, strict=True))
        norms.normalise(graph, parts, forms, attributes, results)
        if has_angles(forms):
            turn: dict[str, Any] = {**given, **own}
            for x, factor in zip("qk", factors, strict=True):
                parts[x] = graph.rope(parts[x], name=f"rope_{x}", output_scale=factor, **turn)
        return {"q_rot": parts.pop("q"), "k_rot": parts.pop("k"), **parts}
    if has_angles(forms):
        made = graph.qkv_rope(
            qkv,
            name="rope",
            in_place=attributes["in_place"],
            q_output_scale=factors[0],
            k_output_scale=factors[1],
            **layout,
            **given,
            **own,
        )
    else:
        made = graph.split_qkv(qkv, name="split", **layout)
    return dict(zip(("q_rot", "k_rot", "v"), made, strict=True))


QKV_ATTENTION = register(
    Kind(
        name="qkv_attention",
        data=("qkv",),
        optional=(*NORMS, *TABLES, *POSITIONS, *MASKS),
        attributes=(
            ("split", "int[]"),
            ("by_groups", "bool"),
            *ROTATION,
            *SDPA,
            norms.NORM_EPS,
            ("recompute_rope", "bool"),
            ("in_place", "bool"),
        ),
        results=("o", "stats", *norms.STATISTICS, "q_rot", "k_rot"),
        gradients=("qkv", *NORMS, "freqs", "bias", "sink"),
        turned={},
        forms=_forms,
        record=_record,
        turn=_turn,
        settings=settings,
        in_place=True,
    )
)
