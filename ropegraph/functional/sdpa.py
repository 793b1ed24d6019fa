"""What every attention of these functions records: masks, sdpa, and the forms of its results."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ropegraph.api.checks import as_number
from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor
from ropegraph.functional import norms
from ropegraph.functional.kind import (
    Attribute,
    Attributes,
    Forms,
    declare,
    fresh,
    has_norms,
    is_prepared,
)

MASKS = ("seq_len_q", "seq_len_kv", "bias", "sink", "seed")
SDPA: tuple[Attribute, ...] = (
    ("scale", "float?"),
    ("left", "SymInt?"),
    ("right", "SymInt?"),
    ("bottom_right", "bool"),
    ("alibi", "bool"),
    ("softcap", "float?"),
    ("dropout_p", "float"),
    ("fold", "str"),
    ("fold_log2", "bool"),
    ("deterministic", "bool"),
)


def sdpa(
    graph: pygraph, given: dict[str, Tensor], attributes: Attributes, results: Forms
) -> dict[str, Tensor]:
    """Record attention on ``q_rot``, ``k_rot``, ``v`` and the masks in ``given``.

    The width of a head of Q gives the scale where none is named.
    """
    scale, width = attributes["scale"], given["q_rot"].get_dim()[-1]
    seed = given.get("seed")
    o, stats = graph.sdpa(
        given["q_rot"],
        given["k_rot"],
        given["v"],
        max(width, 1) ** -0.5 if scale is None else as_number(scale, "attention: scale"),
        generate_stats="stats" in results,
        bias=given.get("bias"),
        use_alibi_mask=attributes["alibi"],
        use_padding_mask="seq_len_q" in given,
        seq_len_q=given.get("seq_len_q"),
        seq_len_kv=given.get("seq_len_kv"),
        diagonal_band_left_bound=attributes["left"],
        diagonal_band_right_bound=attributes["right"],
        diagonal_alignment="BOTTOM_RIGHT" if attributes["bottom_right"] else "TOP_LEFT",
        dropout=None if seed is None else (attributes["dropout_p"], seed, 0),
        sink_token=given.get("sink"),
        softcap=attributes["softcap"],
        name="attention",
    )
    made = {name: given[name] for name in (*norms.STATISTICS, "q_rot", "k_rot") if name in given}
    return {"o": o, **made} if stats is None else {"o": o, "stats": stats, **made}


def result_forms(
    heads: Forms, given: Container[str], *, training: bool, keeps_rotations: bool
) -> dict[str, Form]:
    """Forms of the results of attention, and of what the backward will read.

    heads: of q, k and v, [b, h, s, d] each.  given: the slots that hold a tensor.
    """
    q, k, v = (heads[name] for name in "qkv")
    o = fresh(q, (*q.dim[:3], v.dim[3]))
    if not training:
        return {"o": o}
    found = {"o": o, "stats": norms.statistics_form(o)}
    if has_norms(given):
        made = map(norms.inverse_form, (q, k))
        found |= dict(zip(norms.STATISTICS, made, strict=True))
    if is_prepared(given) and keeps_rotations:
        found |= {"q_rot": fresh(q), "k_rot": fresh(k)}
    return found


def masks(graph: pygraph, forms: Forms) -> dict[str, Tensor]:
    """The optional inputs of attention."""
    found = declare(graph, forms, *MASKS)
    if "seed" in found and forms["seed"].device.type == "cpu":
        found["seed"].set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_is_pass_by_value(True)
    elif "seed" in found:
        found["seed"].set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
    return found


def settings(attributes: Attributes) -> dict[str, Any]:
    """What the graph itself is made with."""
    return {"fold": attributes["fold"], "fold_log2": attributes["fold_log2"]}
