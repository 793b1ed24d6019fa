"""A graph as versioned JSON with a checksum, and the key that stands for everything in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from ropegraph.dtypes import DType
from ropegraph.errors import GraphError, InternalError
from ropegraph.ir import contract, graph, ops, score_mod
from ropegraph.ir.fits import check_fields
from ropegraph.ir.verify import verify

FORMAT = "ropegraph"
VERSION = 1

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        graph.Graph, graph.Node, graph.Value,
        *ops.NAMES,
        score_mod.ScoreProgram, score_mod.Instruction, score_mod.Ref, score_mod.Port,
        contract.FoldContract, contract.FoldEntry, contract.Turn,
    )
}  # fmt: skip


def dumps(value: graph.Graph) -> bytes:
    """Serialize a graph.  Floats keep every bit."""
    body = _canonical(value)
    return json.dumps(
        {"format": FORMAT, "version": VERSION, "sha256": _digest(body), "graph": json.loads(body)}
    ).encode()


def loads(data: bytes | str) -> graph.Graph:
    """Read a serialized graph.  Raises GraphError if it is no such file, newer, or damaged."""
    try:
        file = json.loads(data)
        kind, version, digest, body = (file[k] for k in ("format", "version", "sha256", "graph"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise GraphError("deserialize: the data is not a serialized ropegraph graph") from error
    if kind != FORMAT or version != VERSION:
        raise GraphError(
            f"deserialize: this is {kind!r} version {version!r}; use {FORMAT!r} version {VERSION}"
        )
    if _digest(json.dumps(body, sort_keys=True)) != digest:
        raise GraphError("deserialize: the checksum does not match; the data was changed")
    try:
        found = _decode(body)
        if not isinstance(found, graph.Graph):
            raise TypeError(f"it is a {type(found).__name__}")
        _check_values(found)
        verify(found, after="deserialize")
    except (
        AttributeError, InternalError, KeyError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise GraphError(f"deserialize: the graph has a part that does not fit: {error}") from error
    return found


def _check_values(found: graph.Graph) -> None:
    """Raise ValueError if a value is filed under another name, or has no place for its dims."""
    for name, value in found.values.items():
        if value.name != name:
            raise ValueError(f"the value {value.name!r} is filed as {name!r}")
        if len(value.stride) != len(value.dim) or min((*value.dim, *value.stride), default=0) < 0:
            raise ValueError(f"{name!r} has dim {list(value.dim)}, stride {list(value.stride)}")


def key(value: graph.Graph, context: tuple[str, ...] = ()) -> str:
    """A hash of every field of the graph, and of what else decides how it is lowered."""
    return _digest(_canonical(value) + "\n".join(context))


def _canonical(value: graph.Graph) -> str:
    return json.dumps(_encode(value), sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(value: Any) -> Any:
    if isinstance(value, DType):
        return {"$dtype": value.name}
    if is_dataclass(value):
        content = {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
        return {"$": type(value).__name__, **content}
    if isinstance(value, frozenset):
        return {"$set": sorted(cast("frozenset[str]", value))}
    if isinstance(value, Mapping):
        # A list of pairs: the order of values and ports is part of the graph.
        return {"$map": [[k, _encode(v)] for k, v in cast("Mapping[str, Any]", value).items()]}
    if isinstance(value, tuple):
        return [_encode(v) for v in cast("tuple[Any, ...]", value)]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(v) for v in cast("list[Any]", value))
    if not isinstance(value, dict):
        return value
    items = cast("dict[str, Any]", value)
    if "$dtype" in items:
        return DType[items["$dtype"]]
    if "$set" in items:
        return frozenset(items["$set"])
    if "$map" in items:
        return {k: _decode(v) for k, v in items["$map"]}
    cls = _CLASSES[items["$"]]
    found = cls(**{k: _decode(v) for k, v in items.items() if k != "$"})
    check_fields(found)
    return found
