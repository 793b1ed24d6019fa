"""The sequences of a ragged tensor, as dense views of the buffer it was bound to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor

from ropegraph.errors import PositionError
from ropegraph.ir.graph import Value, span
from ropegraph.lowering.engine import Step


def read_starts(offsets: Tensor, value: Value) -> list[int]:
    """The [b + 1] element offsets as host numbers.  Raises PositionError if they decrease."""
    starts = [
        int(x) * value.ragged_multiplier for x in cast("list[int]", offsets.reshape(-1).tolist())
    ]
    if starts and starts[0] < 0:
        raise PositionError(
            f"{value.ragged_offset!r}: the first offset of {value.name!r} is {starts[0]}; "
            "offsets count elements from the start of the buffer"
        )
    for i, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise PositionError(
                f"{value.ragged_offset!r}: offsets of {value.name!r} decrease at sequence {i}, "
                f"from {start} to {end}; give a running sum"
            )
    return starts


def lengths_of(starts: Sequence[int], value: Value) -> list[int]:
    """Tokens of each sequence where the offsets alone tell: at most s.

    Raises PositionError if offsets are no whole number of rows apart.
    """
    s, stride_s = value.dim[2], max(value.stride[2], 1)
    for i, (start, end) in enumerate(pairwise(starts)):
        if (end - start) % stride_s:
            raise PositionError(
                f"{value.ragged_offset!r}: sequence {i} of {value.name!r} reaches from offset "
                f"{start} to {end}, which is no whole number of rows of stride {stride_s}"
            )
    return [min(s, (end - start) // stride_s) for start, end in pairwise(starts)]


def row_span(value: Value) -> int:
    """Elements that one row needs: of the axes that lie within the stride of a row."""
    _, h, _, d = value.dim
    _, stride_h, stride_s, stride_d = value.stride
    return 1 + sum((n - 1) * step for n, step in ((h, stride_h), (d, stride_d)) if step < stride_s)


def views(
    buffer: Tensor, value: Value, starts: Sequence[int], lengths: Sequence[int]
) -> list[Tensor]:
    """[h, length, d] views of ``buffer``, one a sequence, with the strides of ``value``.

    Raises PositionError if a sequence reaches past the last element of the buffer: the memory
    behind it may belong to another tensor.
    """
    _, h, _, d = value.dim
    _, stride_h, stride_s, stride_d = value.stride
    first = buffer.storage_offset()
    room = span(buffer.shape, buffer.stride())
    found: list[Tensor] = []
    for i, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        reach = start + (h - 1) * stride_h + (length - 1) * stride_s + (d - 1) * stride_d + 1
        if length and h and d and reach > room:
            raise PositionError(
                f"{value.name!r}: sequence {i} of {length} tokens at offset {start} ends at "
                f"element {reach}, past the {room} elements of its buffer"
            )
        shape = (h, length, d)
        found.append(buffer.as_strided(shape, (stride_h, stride_s, stride_d), first + start))
    return found


def parts(step: Step, env: Sequence[Tensor], ports: Sequence[str]) -> list[list[Tensor]]:
    """The tensors at ``ports`` as they are if dense; one list of views a sequence if ragged.

    The first port is an output: where it is ragged, its memory outside every sequence becomes zero.
    """
    tensors = [env[step.slot(port)] for port in ports]
    values = [step.value(port) for port in ports]
    ragged = values[0].ragged_offset
    if ragged is None:
        return [tensors]
    starts = read_starts(env[step.slots[ragged]], values[0])
    lengths = lengths_of(starts, values[0])
    columns = [views(t, v, starts, lengths) for t, v in zip(tensors, values, strict=True)]
    tensors[0].zero_()
    return [list(row) for row in zip(*columns, strict=True)]
