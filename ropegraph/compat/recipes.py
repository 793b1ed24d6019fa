"""What the compat functions record: one rotation, one of Q and K, one of packed QKV."""

from __future__ import annotations

from typing import Any

from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor

Tensors = dict[str, Tensor]


def rope(graph: pygraph, tensors: Tensors, **attributes: Any) -> Tensors:
    """x -> y; the other tensors are rope's own keywords."""
    tables = {name: t for name, t in tensors.items() if name != "x"}
    return {"y": graph.rope(tensors["x"], **tables, **attributes)}


def rope_pair(graph: pygraph, tensors: Tensors, **attributes: Any) -> Tensors:
    """q, k -> q_rot, k_rot in one launch."""
    tables = {name: t for name, t in tensors.items() if name not in ("q", "k")}
    return {f"{x}_rot": graph.rope(tensors[x], **tables, **attributes) for x in ("q", "k")}


def qkv_rope(graph: pygraph, tensors: Tensors, **attributes: Any) -> Tensors:
    """qkv -> q, k and a copy of v."""
    tables = {name: t for name, t in tensors.items() if name != "qkv"}
    made = graph.qkv_rope(tensors["qkv"], **tables, **attributes)
    return dict(zip(("q", "k", "v"), made, strict=True))
