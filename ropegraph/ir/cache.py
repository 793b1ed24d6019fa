"""Writes into a KV cache: the shape rules, and which nodes do that.

The rows of batch entry i go to rows cache_positions[i], cache_positions[i] + 1, ... of its cache;
every other row keeps its bits. What is written is the cache itself, in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropegraph.errors import GraphError
from ropegraph.ir.ops import CACHE_PORTS

Dim = tuple[int, ...]


def written_cache(where: str, port: str, dims: Mapping[str, Dim]) -> Dim:
    """The dims of the cache that the data at ``port`` is written into.

    Raises GraphError naming ``where``, what was given and what would fit.
    """
    data, cache = dims[port], dims["cache"]
    if len(data) != 4:
        raise GraphError(f"{where}: {port} {list(data)} has {len(data)} dims; use [b, h, s, d]")
    b, h, s, d = data
    if len(cache) != 4 or (*cache[:2], cache[3]) != (b, h, d):
        raise GraphError(
            f"{where}: cache {list(cache)} cannot take rows of {port} {list(data)}; "
            f"use [{b}, {h}, s_max, {d}]"
        )
    if s > cache[2]:
        raise GraphError(
            f"{where}: cache {list(cache)} has {cache[2]} rows a sequence for the {s} of {port}; "
            f"use s_max of at least {s}"
        )
    if dims["cache_positions"] != (b,):
        raise GraphError(
            f"{where}: cache_positions is {list(dims['cache_positions'])}; use [{b}], the row of "
            "the cache where each sequence goes on"
        )
    return cache


def writes_cache(node: Any) -> bool:
    """True if what the node writes is a cache."""
    return CACHE_PORTS[0] in node.inputs
