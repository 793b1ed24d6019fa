"""A recording as a value: names, data types and strides settled, types and offsets checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ropegraph.api.placing import settle
from ropegraph.api.ragged import check_offsets, check_ragged
from ropegraph.api.recording import RecordedNode, Recorder
from ropegraph.api.tensor import Tensor, settled_strides
from ropegraph.dtypes import FLOATS, DType, short, wider
from ropegraph.errors import GraphError
from ropegraph.execution.overlap import overlaps
from ropegraph.ir.contract import Fold, FoldContract
from ropegraph.ir.graph import Graph, Node, Value
from ropegraph.ir.ops import Attention, Norm, Op, Rotation, SplitQkv, op_name
from ropegraph.ir.types import check_dtypes, default_dtype, output_dtype, output_dtypes

# The largest number fp32 holds.
_FLOAT_MAX = (2.0 - 2.0**-23) * 2.0**127


def freeze(
    recorder: Recorder,
    fold: Fold,
    fold_log2: bool,
    contract: FoldContract | None,
    imported: tuple[str, ...] = (),
) -> Graph:
    """The graph as a value: names, data types and strides settled.

    Changes nothing in the recording, so that a graph can be printed while it is being recorded.
    """
    names, types = recorder.names(), _dtypes(recorder)
    nodes = tuple(_node(n, names, types, recorder.compute) for n in recorder.nodes)
    used = {t for n in recorder.nodes for t in (*n.inputs.values(), *n.outputs.values())}
    used |= {o for t in used if (o := t.get_ragged_offset()) is not None}
    written = {t for n in recorder.nodes for t in n.outputs.values()}
    values = {names[t]: _value(t, names, types) for t in recorder.tensors if t in used}
    values = settle(values, recorder.nodes, names)
    return Graph(
        recorder.name,
        values,
        nodes,
        visible=frozenset(names[t] for t in written if t.is_real),
        saved=frozenset(names[t] for t in written if t.spec.is_saved and not t.is_real),
        imported=imported,
        fold=fold,
        fold_log2=fold_log2,
        contract=contract,
    )


def _node(
    node: RecordedNode, names: Mapping[Tensor, str], types: Mapping[Tensor, DType], compute: DType
) -> Node[Op]:
    attrs = node.attrs
    found = wider(*(types[t] for t in node.inputs.values()))
    if isinstance(attrs, (Rotation, Attention, Norm)):
        found = wider(compute, attrs.compute, found)
        attrs = replace(attrs, compute=found)
    _check_scales(node.name, attrs, found)
    return Node(
        node.name,
        attrs,
        {port: names[t] for port, t in node.inputs.items()},
        {port: names[t] for port, t in node.outputs.items()},
    )


def _check_scales(name: str, attrs: Op, compute: DType) -> None:
    """A scale that the arithmetic cannot hold would make everything infinite."""
    for field in ("attn_scale", "output_scale", "attention_factor", "factor"):
        number = getattr(attrs, field, None)
        if number is not None and compute is DType.FLOAT and abs(number) > _FLOAT_MAX:
            argument = "scale" if field == "factor" else field
            raise GraphError(
                f"{op_name(attrs)} {name!r}: {argument}={number:.6g} is infinite in fp32; use less "
                f"than {_FLOAT_MAX:.6g}, or fp64 data"
            )


def _value(tensor: Tensor, names: Mapping[Tensor, str], types: Mapping[Tensor, DType]) -> Value:
    dim, stride = tuple(tensor.get_dim()), tuple(tensor.get_stride())
    offset = tensor.get_ragged_offset()
    return Value(
        name=names[tensor],
        dim=dim,
        stride=settled_strides(dim, stride),
        dtype=types[tensor],
        uid=None if tensor.get_uid() < 0 else tensor.get_uid(),
        ragged_offset=None if offset is None else names[offset],
        ragged_multiplier=tensor.get_ragged_offset_multiplier(),
        is_host=tensor.get_is_pass_by_value(),
        constant=tensor.spec.constant,
    )


def _dtypes(recorder: Recorder) -> dict[Tensor, DType]:
    """A type for every tensor that is used, in the order of the nodes; inputs are checked."""
    types = {t: d for t in recorder.tensors if (d := t.get_data_type()) is not DType.NOT_SET}
    for node in recorder.nodes:
        found: dict[str, DType] = {}
        for port, tensor in node.inputs.items():
            first = next(iter(found.values()), DType.NOT_SET)
            found[port] = types.setdefault(tensor, default_dtype(port, recorder.io, first))
            if found[port] is DType.NOT_SET:
                raise GraphError(
                    f"{op_name(node.attrs)} {node.name!r}: {port} {tensor.get_name()!r} has no "
                    "data type; give it data_type=, or the graph io_data_type="
                )
        check_dtypes(node.name, node.attrs, found)
        for port, tensor in node.outputs.items():
            types.setdefault(tensor, output_dtype(node.attrs, port, found))
            _check_output(node, port, tensor, types[tensor])
        check_ragged(node)
    for tensor in recorder.tensors:
        offset = tensor.get_ragged_offset()
        if offset is not None:
            check_offsets(tensor, offset, types.setdefault(offset, DType.INT32))
    return types


def _check_output(node: RecordedNode, port: str, tensor: Tensor, dtype: DType) -> None:
    where = f"{op_name(node.attrs)} {node.name!r}: {port} {tensor.get_name()!r}"
    allowed = output_dtypes(port)
    if dtype not in allowed:
        use = "a floating type" if allowed is FLOATS else " or ".join(map(short, allowed))
        raise GraphError(f"{where} is {dtype!r}; an output must be {use}")
    # A part that stays where it is is read there, and nothing writes to it.
    is_view = isinstance(node.attrs, SplitQkv) and not (tensor.is_real or tensor.spec.is_saved)
    is_dense = tensor.get_ragged_offset() is None and not is_view
    if is_dense and overlaps(tensor.get_dim(), tensor.get_stride()):
        raise GraphError(
            f"{where} has strides {tensor.get_stride()}, by which elements of its dim "
            f"{tensor.get_dim()} overlap; an output needs a place for each"
        )
