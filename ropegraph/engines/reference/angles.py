"""Cosines and sines of every row in fp64, from whatever carries the angles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropegraph.engines.reference.positions import Places
from ropegraph.ir.ops import Rotation

# Cosine and sine, [b, 1, s, r/2], of the first and of the second lane that pairs write.
Lanes = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def lanes(attrs: Rotation, sources: Sequence[Tensor], found: Places) -> Lanes:
    """A cos t and A sin t.  sources: the tensors at ANGLE_PORTS in fp64.

    Rows without a position, or with one outside of the table, read row 0.
    """
    match attrs.angles:
        case "inv_freq":
            angle = _made(attrs, sources[0].reshape(-1), found)
            one = angle.cos(), angle.sin()
            pairs = one, one
        case "freqs":
            pairs = tuple((t.cos(), t.sin()) for t in _both(attrs, sources[0], found))
        case "cos_sin":
            cos, sin = (_both(attrs, table, found) for table in sources)
            pairs = tuple(zip(cos, sin, strict=True))
        case "packed":
            width = sources[0].shape[3] // 2
            cos = _both(attrs, sources[0][..., :width], found)
            sin = _both(attrs, sources[0][..., width:], found)
            pairs = tuple(zip(cos, sin, strict=True))
    a, sign = attrs.attention_factor, -1.0 if attrs.inverse else 1.0
    (cos1, sin1), (cos2, sin2) = pairs
    return (a * cos1, sign * a * sin1), (a * cos2, sign * a * sin2)


def _made(attrs: Rotation, inv_freq: Tensor, found: Places) -> Tensor:
    # Past int64 the numbers of fp64 lie so far apart that the last of it is the same position.
    place = torch.tensor(
        [[min(p or 0, 2**63 - 1) for p in entry] for entry in found],
        dtype=torch.int64,
        device=inv_freq.device,
    )[:, None, :, None]
    if attrs.angle_precision == "exact":
        return place.double() * inv_freq
    return (place.float().double() * inv_freq).float().double()


def _both(attrs: Rotation, table: Tensor, found: Places) -> tuple[Tensor, Tensor]:
    """The columns for both lanes of a table [s_max, 1 or b, 1, width], a row for every place."""
    count, batches = table.shape[:2]
    picked = [[_row(p, count) for p in entry] for entry in found]
    row = torch.tensor(picked, dtype=torch.int64, device=table.device)
    own = torch.arange(len(found), device=table.device)[:, None] if batches > 1 else 0
    rows = table[row, own, 0][:, None]
    first, second = _columns(attrs)
    return rows[..., first], rows[..., second]


def _row(place: int | None, count: int) -> int:
    return place if place is not None and 0 <= place < count else 0


def _columns(attrs: Rotation) -> tuple[Tensor, Tensor]:
    """The table columns that the first and the second lane of every pair read."""
    pair = torch.arange(attrs.rope_dim // 2)
    if attrs.half_width or attrs.table_layout == "first_half":
        return pair, pair
    if attrs.table_layout == "pairs":
        return 2 * pair, 2 * pair
    first, second = channels(attrs, attrs.interleaved_output)
    return first - attrs.rope_offset, second - attrs.rope_offset


def channels(attrs: Rotation, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The channels that hold the first and the second element of every pair."""
    half = attrs.rope_dim // 2
    pair = torch.arange(half)
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
    return attrs.rope_offset + first, attrs.rope_offset + second
