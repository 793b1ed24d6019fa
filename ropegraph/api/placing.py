"""Which tensors lie in the memory of another: parts of a packed tensor, and what is in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.dtypes import short
from ropegraph.errors import GraphError
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import JoinQkv, SplitQkv, op_name
from ropegraph.ir.packed import PARTS, View, view_of

Values = dict[str, Value]


def settle(values: Values, nodes: Sequence[RecordedNode], names: Mapping[Tensor, str]) -> Values:
    """The values, those that need no memory of their own placed within the one they are part of.

    What the caller binds has memory of its own, so it is copied to there or from there.
    """
    values = dict(values)
    for node in nodes:
        match node.attrs:
            case SplitQkv() as attrs:
                whole = values[names[node.inputs["qkv"]]]
                for part in PARTS:
                    tensor = node.outputs.get(part)
                    if tensor is not None and _is_free(tensor, values[names[tensor]]):
                        view = view_of(attrs, part, whole.dim, whole.stride)
                        _put(values, names[tensor], whole, view)
            case _:
                _in_place(values, node, nodes, names)
    for node in reversed(nodes):
        if isinstance(node.attrs, JoinQkv):
            whole = values[names[node.outputs["qkv"]]]
            for part in PARTS:
                tensor = node.inputs.get(part)
                if tensor is None or tensor.spec.producer is None:
                    continue
                value = values[names[tensor]]
                if _is_free(tensor, value) and value.dtype is whole.dtype:
                    view = view_of(node.attrs, part, whole.dim, whole.stride)
                    _put(values, names[tensor], whole, view)
    return values


def _is_free(tensor: Tensor, value: Value) -> bool:
    """True if nobody binds the tensor and it has no place so far."""
    is_bound = tensor.is_real or tensor.spec.is_saved
    return not is_bound and value.within is None and value.ragged_offset is None


def _put(values: Values, name: str, whole: Value, view: View) -> None:
    root, start = whole.within or whole.name, whole.start + view.start
    values[name] = replace(values[name], dim=view.dim, stride=view.stride, within=root, start=start)


def _in_place(
    values: Values, node: RecordedNode, nodes: Sequence[RecordedNode], names: Mapping[Tensor, str]
) -> None:
    """What is to be written where its input lies, if nothing else reads that."""
    for tensor in node.outputs.values():
        source = tensor.spec.in_place_of
        if source is None:
            continue
        where = f"{op_name(node.attrs)} {node.name!r}"
        readers = [n.name for n in nodes for t in n.inputs.values() if t is source]
        others = [name for name in readers if name != node.name] or readers[1:]
        if others and writes_cache(node):
            raise GraphError(
                f"{where} writes over {source.get_name()!r}, which is also read by {others}; read "
                "and write what this write returned instead"
            )
        if others:
            raise GraphError(
                f"{where} is in place, but {source.get_name()!r} is also read by {others}; "
                "leave in_place out"
            )
        if not _is_free(tensor, values[names[tensor]]):
            if writes_cache(node):
                raise GraphError(
                    f"{where}: its output is the cache {source.get_name()!r} itself, in place; "
                    "leave out set_output, set_uid and set_saved, and bind the cache"
                )
            raise GraphError(
                f"{where}: {tensor.get_name()!r} is in place and has no buffer of its own; leave "
                "out set_output, set_uid or in_place"
            )
        own = values[names[source]]
        if writes_cache(node) and values[names[tensor]].dtype is not own.dtype:
            raise GraphError(
                f"{where}: {tensor.get_name()!r} is the cache {source.get_name()!r} itself, which "
                f"is {short(own.dtype)}; leave out set_data_type"
            )
        _put(values, names[tensor], own, View(0, own.dim, own.stride))
