"""The rotations in fp64 with every source of angles and positions, one sequence after the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.job import parts_of
from ropegraph.engines.cuda_rope.kind import ports_of
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Rope, RopeBackward, Rotation
from tests.kernels.cases import Case, widened


@dataclass(frozen=True)
class Rows:
    """Views [h, n, d] of what one sequence reads and writes, its number, and its positions [n].

    positions: None if the sequence cannot be cut into chunks.
    """

    x: Tensor
    y: Tensor
    sequence: int
    positions: Tensor | None


def expected(given: Case) -> dict[str, Tensor]:
    """What each output must hold, in fp64, from the same rounded inputs.

    Rows with a wrong position are NaN, rows of no sequence zero.
    """
    found: dict[str, Tensor] = {}
    for attrs, suffix in parts_of(given.step):
        _, written = ports_of(attrs, suffix)
        y = widened(given.at(written)).zero_()
        for rows in _sequences(given, attrs, suffix, y):
            if rows.positions is None:
                rows.y.fill_(torch.nan)
            else:
                _turn(given, attrs, suffix, rows)
        found[written] = y
    return found


def chunk(s: Tensor, length: int, attrs: Rotation) -> Tensor | None:
    """Place in the whole sequence of rows s of the ``length`` that this rank holds."""
    if attrs.cp_size == 1 or not length:
        return s
    if length % 2:
        return None
    whole = torch.arange(length * attrs.cp_size).chunk(2 * attrs.cp_size)
    return torch.cat([whole[attrs.cp_rank], whole[-1 - attrs.cp_rank]])[s]


def _sequences(given: Case, attrs: Rope | RopeBackward, suffix: str, y: Tensor) -> Iterator[Rows]:
    step, (read, written) = given.step, ports_of(attrs, suffix)
    x, value = widened(given.at(read)), step.value(read)

    def positions(i: int, n: int, at: int = 0) -> Tensor | None:
        if step.has(port := "position_ids" + suffix):
            ids = given.at(port).long()
            return ids[i % len(ids), at : at + n]
        places = chunk(torch.arange(n), n, attrs)
        if places is not None and step.has(port := "start_positions" + suffix):
            places = places + given.at(port)[i].long()
        return places

    if value.ragged_offset is not None:
        offsets = given.env[step.slots[value.ragged_offset]].long() * value.ragged_multiplier
        for i, (start, stop) in enumerate(
            zip(offsets.tolist(), offsets[1:].tolist(), strict=False)
        ):
            n = min((stop - start) // value.stride[2], value.dim[2])
            views = (_tokens(t, step.value(p), start, n) for t, p in ((x, read), (y, written)))
            yield Rows(*views, i, positions(i, n))
    elif step.has(port := "cu_seqlens" + suffix):
        bounds = given.at(port).tolist()
        for i, (start, stop) in enumerate(pairwise(bounds)):
            first, last = start // attrs.cp_size, stop // attrs.cp_size
            is_cut = attrs.cp_size == 1 or (stop - start) % (2 * attrs.cp_size) == 0
            own = positions(0 if step.has("position_ids" + suffix) else i, last - first, first)
            views = (t[0, :, first:last] for t in (x, y))
            yield Rows(*views, i, own if is_cut else None)
    else:
        for i in range(len(x)):
            yield Rows(x[i], y[i], i, positions(i, x.shape[2]))


def _tokens(flat: Tensor, value: Value, start: int, n: int) -> Tensor:
    _, h, _, d = value.dim
    base = flat.storage_offset() + start
    return flat.as_strided((h, n, d), value.stride[1:], base) if n > 0 else flat.new_empty(h, 0, d)


def _turn(given: Case, attrs: Rope | RopeBackward, suffix: str, rows: Rows) -> None:
    assert rows.positions is not None
    (cos1, sin1), (cos2, sin2) = _cos_sin(given, attrs, suffix, rows)
    first, second = _lanes(attrs, attrs.interleaved)
    to_first, to_second = _lanes(attrs, attrs.interleaved_output)
    if isinstance(attrs, RopeBackward):
        (first, second), (to_first, to_second) = (to_first, to_second), (first, second)
        sin1, sin2 = -sin2, -sin1
    x1, x2 = rows.x[..., first], rows.x[..., second]
    y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    # Channels outside the rotation: a copy, but for a row whose position is wrong.
    rows.y.copy_(rows.x * attrs.output_scale)
    rows.y[..., to_first] = attrs.output_scale * attrs.attention_factor * y1
    rows.y[..., to_second] = attrs.output_scale * attrs.attention_factor * y2
    rows.y[:, cos1.isnan().any(1)] = torch.nan


def _cos_sin(
    given: Case, attrs: Rotation, suffix: str, rows: Rows
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Cosines and sines [n, r/2] of the first and of the second channel that a pair writes."""
    position = rows.positions
    assert position is not None

    def taken(port: str, part: slice) -> Tensor:
        table = given.at(port + suffix).double()[:, :, 0, part]
        is_there = (position >= 0) & (position < len(table))
        entry = rows.sequence if table.shape[1] > 1 else 0
        found = table[torch.where(is_there, position, 0), entry]
        return torch.where(is_there[:, None], found, torch.nan)

    width = attrs.rope_dim // 2 if attrs.half_width else attrs.rope_dim
    whole = slice(0, width)
    if attrs.angles == "inv_freq":
        inv_freq = given.at("inv_freq" + suffix).reshape(-1)
        if attrs.angle_precision == "exact":
            angle = position.double()[:, None] * inv_freq.double()
        else:
            angle = (position.float()[:, None] * inv_freq).double()
        cos, sin, columns = angle.cos(), angle.sin(), (torch.arange(attrs.rope_dim // 2),) * 2
    else:
        columns = _columns(attrs)
        if attrs.angles == "freqs":
            cos, sin = taken("freqs", whole).cos(), taken("freqs", whole).sin()
        elif attrs.angles == "packed":
            cos, sin = taken("cos_sin", whole), taken("cos_sin", slice(width, 2 * width))
        else:
            cos, sin = taken("cos", whole), taken("sin", whole)
    sin = -sin if attrs.inverse else sin
    first, second = columns
    return (cos[:, first], sin[:, first]), (cos[:, second], sin[:, second])


def _lanes(attrs: Rotation, interleaved: bool) -> tuple[Tensor, Tensor]:
    pair, half = torch.arange(attrs.rope_dim // 2), attrs.rope_dim // 2
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
    return attrs.rope_offset + first, attrs.rope_offset + second


def _columns(attrs: Rotation) -> tuple[Tensor, Tensor]:
    pair = torch.arange(attrs.rope_dim // 2)
    if attrs.half_width or attrs.table_layout == "first_half":
        return pair, pair
    if attrs.table_layout == "pairs":
        return 2 * pair, 2 * pair
    first, second = _lanes(attrs, attrs.interleaved_output)
    return first - attrs.rope_offset, second - attrs.rope_offset
