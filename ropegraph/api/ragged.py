"""Which tensors may be ragged, and what their offsets must be like."""

from __future__ import annotations

from ropegraph.api.angle_source import SOURCE_KEYWORDS
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.dtypes import INDEX, DType
from ropegraph.errors import GraphError
from ropegraph.ir.ops import (
    POSITION_PORTS,
    Attention,
    Norm,
    Rotation,
    Scale,
    Sum,
    op_name,
)

_RAGGED_PORTS = ("q", "k", "v", "o", "dO", "stats", "input", "dY")
# What a rotation looks up: dense beside ragged data.
_INDEXED = (*SOURCE_KEYWORDS, "dfreqs", *POSITION_PORTS)


def check_ragged(node: RecordedNode) -> None:
    """Only data is ragged: a table, a mask or a length that were would be read as if it was not."""
    for port, tensor in node.inputs.items():
        if tensor.get_ragged_offset() is not None and isinstance(node.attrs, Norm):
            raise GraphError(
                f"{op_name(node.attrs)} {node.name!r}: {port} {tensor.get_name()!r} has a "
                "ragged_offset; pack the sequences into [1, h, t, d] and give rope cu_seqlens"
            )
        is_data = port in _RAGGED_PORTS or isinstance(node.attrs, (Scale, Sum))
        if tensor.get_ragged_offset() is not None and not is_data:
            raise GraphError(
                f"{op_name(node.attrs)} {node.name!r}: {port} {tensor.get_name()!r} has a "
                f"ragged_offset; only {', '.join(_RAGGED_PORTS)} may be ragged"
            )
    if not isinstance(node.attrs, Attention):
        _check_same_offset(node)
    if isinstance(node.attrs, Rotation):
        _check_restarts(node)


def _check_same_offset(node: RecordedNode) -> None:
    """What turns or scales a ragged tensor leaves each sequence where it is."""
    port, first = next(iter(node.inputs.items()))
    others = (*node.inputs.items(), *node.outputs.items())
    for other, tensor in others:
        if other not in _INDEXED and _place(tensor) != _place(first):
            raise GraphError(
                f"{op_name(node.attrs)} {node.name!r}: {other} {tensor.get_name()!r} has not the "
                f"ragged_offset (and multiplier) of {port} {first.get_name()!r}; both must be "
                "ragged by the same tensor, or dense"
            )


def _check_restarts(node: RecordedNode) -> None:
    """Ragged offsets already say where sequences begin and that positions restart there."""
    port, data = next(iter(node.inputs.items()))
    given = [p for p in ("position_ids", "cu_seqlens") if p in node.inputs]
    if data.get_ragged_offset() is not None and given:
        raise GraphError(
            f"{op_name(node.attrs)} {node.name!r}: {given[0]} and the ragged_offset of {port} "
            f"{data.get_name()!r} both say which positions the rows have; give one of them"
        )


def _place(tensor: Tensor) -> tuple[Tensor | None, int]:
    offset = tensor.get_ragged_offset()
    return offset, 1 if offset is None else tensor.get_ragged_offset_multiplier()


def check_offsets(tensor: Tensor, offset: Tensor, dtype: DType) -> None:
    """Raise GraphError if the offsets of a ragged tensor have not the form or type they need."""
    if len(tensor.get_dim()) != 4:
        raise GraphError(
            f"tensor {tensor.get_name()!r}: a ragged tensor is [b, h, s, d], not {tensor.get_dim()}"
        )
    wanted = [tensor.get_dim()[0] + 1, 1, 1, 1]
    if offset.get_dim() != wanted:
        raise GraphError(
            f"tensor {tensor.get_name()!r}: ragged_offset {offset.get_name()!r} is "
            f"{offset.get_dim()}; use {wanted}, one offset a sequence and the end"
        )
    if dtype not in INDEX:
        raise GraphError(
            f"tensor {tensor.get_name()!r}: ragged_offset {offset.get_name()!r} is "
            f"{dtype!r}; use int32 or int64"
        )
