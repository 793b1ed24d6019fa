"""Attention on q, k and v of their own: what it is, and the recording."""

from __future__ import annotations

from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor
from ropegraph.functional import checks, norms
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
    rotation,
)
from ropegraph.functional.sdpa import MASKS, SDPA, masks, result_forms, sdpa, settings

K_POSITIONS = tuple(f"k_{name}" for name in POSITIONS)


def _forms(forms: Forms, attributes: Attributes, *, training: bool) -> dict[str, Form]:
    checks.attention("attention", forms)
    norms.check("attention", forms, attributes, forms["q"])
    keeps_rotations = not attributes["recompute_rope"]
    found = result_forms(forms, forms, training=training, keeps_rotations=keeps_rotations)
    if training and "cu_seqlens" in forms:
        _, h, t, _ = forms["q"].dim
        found["stats"] = found["stats"]._replace(stride=(h * t, 1, h, 1))
    return found


def _record(
    graph: pygraph, forms: Forms, attributes: Attributes, results: Forms
) -> dict[str, Tensor]:
    given = _heads(graph, forms, attributes)
    given |= masks(graph, forms)
    norms.normalise(graph, given, forms, attributes, results)
    _rotate(graph, given, forms, attributes, (1.0, 1.0))
    made = sdpa(graph, given, attributes, results)
    forms = {"q_rot": fresh(forms["q"]), "k_rot": fresh(forms["k"]), **results}
    for name, tensor in made.items():
        if tensor.spec.producer is not None:
            _place(tensor, forms[name], given, attributes)
    return made


def _turn(
    graph: pygraph, forms: Forms, attributes: Attributes, factors: tuple[float, float]
) -> dict[str, Tensor]:
    given = _heads(graph, forms, attributes)
    norms.normalise(graph, given, forms, attributes, {})
    _rotate(graph, given, forms, attributes, factors)
    made = {name: given[name] for name in ("q_rot", "k_rot")}
    for name, x in (("q_rot", "q"), ("k_rot", "k")):
        _place(made[name], fresh(forms[x]), given, attributes)
    return made


def _heads(graph: pygraph, forms: Forms, attributes: Attributes) -> dict[str, Tensor]:
    """q, k and v as inputs; sequences packed along s are ragged ones."""
    if "cu_seqlens" not in forms:
        return declare(graph, forms, "q", "k", "v")
    given = declare(graph, forms, "cu_seqlens")
    offset = given["cu_seqlens"]
    offset.set_dim([*offset.get_dim(), 1, 1, 1]).set_stride([1, 1, 1, 1])
    for name in ("q", "k", "v"):
        dim, stride, row = _ragged(forms[name], offset, attributes)
        x = graph.tensor(dim, stride, forms[name].dtype, name=name, ragged_offset=offset)
        given[name] = x.set_ragged_offset_multiplier(row)
    return given


def _ragged(form: Form, offset: Tensor, attributes: Attributes) -> tuple[list[int], list[int], int]:
    """Dims, strides and elements a token of [1, h, t, d] as sequences of at most max_seqlen."""
    _, h, t, d = form.dim
    longest = t if attributes["max_seqlen"] is None else min(attributes["max_seqlen"], t)
    n, row = offset.get_dim()[0] - 1, max(h * d, 1)
    return [n, h, longest, d], [longest * row, d, row, 1], row


def _place(tensor: Tensor, form: Form, given: dict[str, Tensor], attributes: Attributes) -> None:
    """Lay a result out as ``form``."""
    if "cu_seqlens" not in given:
        tensor.set_stride(form.stride)
        return
    offset = given["cu_seqlens"]
    _, stride, row = _ragged(form, offset, attributes)
    tensor.set_stride(stride).set_ragged_offset(offset).set_ragged_offset_multiplier(row)


def _rotate(
    graph: pygraph,
    given: dict[str, Tensor],
    forms: Forms,
    attributes: Attributes,
    factors: tuple[float, float],
) -> None:
    """Add q_rot and k_rot to ``given``: q and k themselves where there are no angles."""
    if not has_angles(forms):
        given["q_rot"], given["k_rot"] = given["q"], given["k"]
        return
    tables = declare(graph, forms, *TABLES)
    positions = declare(graph, forms, *POSITIONS, *K_POSITIONS)
    turn = rotation("attention", attributes, forms["q"].dim[3])
    of_q = {name: positions[name] for name in POSITIONS if name in positions}
    of_k = of_q
    if attributes["own_k_positions"]:
        of_k = {name: positions[f"k_{name}"] for name in POSITIONS if f"k_{name}" in positions}
    for x, own, factor in zip("qk", (of_q, of_k), factors, strict=True):
        turned = graph.rope(
            given[x], name=f"rope_{x}", output_scale=factor, **tables, **own, **turn
        )
        given[f"{x}_rot"] = turned


ATTENTION = register(
    Kind(
        name="attention",
        data=("q", "k", "v"),
        optional=(*NORMS, *TABLES, *POSITIONS, *K_POSITIONS, "cu_seqlens", *MASKS),
        attributes=(
            *ROTATION,
            *SDPA,
            norms.NORM_EPS,
            ("recompute_rope", "bool"),
            ("own_k_positions", "bool"),
            ("max_seqlen", "SymInt?"),
        ),
        results=("o", "stats", *norms.STATISTICS, "q_rot", "k_rot"),
        gradients=("q", "k", "v", *NORMS, "freqs", "bias", "sink"),
        turned={"q": "q_rot", "k": "k_rot"},
        forms=_forms,
        record=_record,
        turn=_turn,
        settings=settings,
    )
)
