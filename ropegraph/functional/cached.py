"""Attention over a cache that new rows are written into: what it is, and the recording."""

from __future__ import annotations

from typing import Any

from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
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
    has_norms,
    rotation,
)
from ropegraph.functional.sdpa import SDPA, masks, sdpa, settings

_WHERE = "cached_attention"


def _forms(forms: Forms, attributes: Attributes, *, training: bool) -> dict[str, Form]:  # noqa: ARG001 - as others
    checks.attention(_WHERE, forms)
    norms.check(_WHERE, forms, attributes, forms["q"])
    q, k, v = (forms[name].dim for name in "qkv")
    if q[2] != k[2]:
        raise GraphError(
            f"{_WHERE}: q {list(q)} and k {list(k)} differ in rows; give the new rows of each"
        )
    for name, x in (("k", k), ("v", v)):
        cache = forms[f"{name}_cache"]
        fits = len(cache.dim) == 4 and (*cache.dim[:2], cache.dim[3]) == (x[0], x[1], x[3])
        if not fits:
            raise GraphError(
                f"{_WHERE}: {name}_cache is {list(cache.dim)}; use [{x[0]}, {x[1]}, s_max, {x[3]}] "
                f"for {name} {list(x)}"
            )
        if x[2] > cache.dim[2]:
            raise GraphError(
                f"{_WHERE}: {name} {list(x)} has {x[2]} new rows, and {name}_cache "
                f"{list(cache.dim)} room for {cache.dim[2]}; use a longer cache, or fewer rows"
            )
        if cache.dtype is not forms[name].dtype or cache.device != forms[name].device:
            raise GraphError(
                f"{_WHERE}: {name}_cache is {cache.dtype} on {cache.device}, {name} is "
                f"{forms[name].dtype} on {forms[name].device}; use one type and device"
            )
    for name in ("lengths", "seq_len_q"):
        if forms[name].dim != (q[0],):
            named = "new_lens" if name == "seq_len_q" else name
            raise GraphError(f"{_WHERE}: {named} is {list(forms[name].dim)}; use [{q[0]}]")
    return {"o": fresh(forms["q"], (*q[:3], v[3]))}


def _record(
    graph: pygraph, forms: Forms, attributes: Attributes, results: Forms
) -> dict[str, Tensor]:
    given = declare(graph, forms, "q", "k", "v", "k_cache", "v_cache", "lengths")
    given |= masks(graph, forms)
    at = given["lengths"]
    into: dict[str, dict[str, Any]] = {
        name: {"cache": given[f"{name}_cache"], "cache_positions": at} for name in "kv"
    }
    norms.normalise(graph, given, forms, attributes, {})
    given["q_rot"], given["k_rot"] = given["q"], given["k"]
    writes = not has_angles(forms) or has_norms(forms)  # norm and rotation are one launch, then
    if has_angles(forms):
        own = rotation(_WHERE, attributes, forms["q"].dim[3])
        turn: dict[str, Any] = {**declare(graph, forms, *TABLES), **own}
        turn.update(declare(graph, forms, *POSITIONS) or {"start_positions": at})
        given["q_rot"] = graph.rope(given["q"], name="rope_q", **turn)
        turn.update({} if writes else into["k"])
        given["k_rot"] = graph.rope(given["k"], name="rope_k", **turn)
    if writes:
        given["k_rot"] = graph.cache_write(given["k_rot"], name="keep_k", **into["k"])
    given["v"] = graph.cache_write(given["v"], name="keep_v", **into["v"])
    o = sdpa(graph, given, attributes, results)["o"]
    return {"o": o.set_stride(results["o"].stride)}


CACHED_ATTENTION = register(
    Kind(
        name=_WHERE,
        data=("q", "k", "v", "k_cache", "v_cache", "lengths", "seq_len_q", "seq_len_kv"),
        optional=(*NORMS, *TABLES, *POSITIONS, "sink"),
        attributes=(*ROTATION, *SDPA, norms.NORM_EPS),
        results=("o",),
        gradients=(),
        turned={},
        forms=_forms,
        record=_record,
        settings=settings,
        changes=("k_cache", "v_cache"),
    )
)
