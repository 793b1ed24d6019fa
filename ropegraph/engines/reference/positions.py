"""The position of every row, as host numbers, one row after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ropegraph.engines.reference.buffers import integers, sequence_lengths
from ropegraph.errors import PositionError
from ropegraph.ir.ops import ANGLE_PORTS, Rotation, op_name
from ropegraph.lowering.engine import Step

# For every batch entry and row: a position, None for a row of no sequence.
Places = list[list[int | None]]


def places(step: Step, attrs: Rotation, env: Sequence[Tensor]) -> Places:
    """What Rotation says of the rows of the first port.

    Raises PositionError if a length or cu_seqlens does not fit.
    """
    value = step.value(next(iter(step.node.inputs)))
    b, s = value.dim[0], value.dim[-2]
    if step.has("position_ids"):
        flat: list[int | None] = [*integers(step, "position_ids", env)]
        rows = [flat[i * s : (i + 1) * s] for i in range(len(flat) // s if s else 0)]
        return rows if len(rows) == b else rows * b
    if step.has("cu_seqlens"):
        return [_packed(step, attrs, integers(step, "cu_seqlens", env), s, env)]
    is_dense = value.ragged_offset is None
    lengths = [s] * b if is_dense else sequence_lengths(step, value, env)
    found: Places = []
    for i, length in enumerate(lengths):
        first = integers(step, "start_positions", env)[i] if step.has("start_positions") else 0
        own = [first + n for n in _chunks(step, attrs, i, length)]
        found.append([*own, *[None] * (s - length)])
    return found


def _packed(
    step: Step, attrs: Rotation, cu: list[int], rows: int, env: Sequence[Tensor]
) -> list[int | None]:
    found: list[int | None] = [None] * rows
    if cu[0] < 0 or cu[-1] // attrs.cp_size > rows:
        raise PositionError(
            f"{_where(step)}: cu_seqlens goes from {cu[0]} to {cu[-1]}, beyond the "
            f"{rows * attrs.cp_size} tokens of the data"
        )
    for i in range(len(cu) - 1):
        length = cu[i + 1] - cu[i]
        if length < 0:
            raise PositionError(f"{_where(step)}: cu_seqlens decreases at sequence {i}")
        if attrs.cp_size > 1 and length % (2 * attrs.cp_size):
            raise PositionError(
                f"{_where(step)}: sequence {i} has length {length}, which 2*cp_size="
                f"{2 * attrs.cp_size} does not divide"
            )
        first = integers(step, "start_positions", env)[i] if step.has("start_positions") else 0
        begin = cu[i] // attrs.cp_size
        for n, place in enumerate(_chunks(step, attrs, i, length // attrs.cp_size)):
            found[begin + n] = first + place
    return found


def _chunks(step: Step, attrs: Rotation, sequence: int, length: int) -> list[int]:
    """The places in its whole sequence of the ``length`` rows that this rank holds.

    The sequence is cut into 2 cp_size chunks; a rank holds one from the front and one from behind.
    """
    size, rank = attrs.cp_size, attrs.cp_rank
    if size == 1:
        return list(range(length))
    if length % 2:
        raise PositionError(
            f"{_where(step)}: sequence {sequence} has length {length * size}, which 2*cp_size="
            f"{2 * size} does not divide"
        )
    whole, chunk = range(length * size), length // 2
    front, behind = (whole[i * chunk : (i + 1) * chunk] for i in (rank, 2 * size - 1 - rank))
    return [*front, *behind]


def outside(step: Step, attrs: Rotation, found: Places) -> list[tuple[int, int]]:
    """The (batch entry, row) of every position that the table has no row for."""
    table = ANGLE_PORTS[attrs.angles][0]
    if table == "inv_freq":
        return []
    count = step.value(table).dim[0]
    return [
        (i, row)
        for i, entry in enumerate(found)
        for row, place in enumerate(entry)
        if place is not None and not 0 <= place < count
    ]


def refuse(step: Step, attrs: Rotation, found: Places, wrong: tuple[int, int]) -> PositionError:
    """The error for one of the positions that outside() found."""
    i, row = wrong
    table = ANGLE_PORTS[attrs.angles][0]
    return PositionError(
        f"{_where(step)}: row {row} of batch entry {i} has position {found[i][row]}, outside of "
        f"the {step.value(table).dim[0]} rows of {table}"
    )


def _where(step: Step) -> str:
    return f"{op_name(step.node.attrs)} {step.name!r}"
