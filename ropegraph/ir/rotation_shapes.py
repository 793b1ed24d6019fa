"""The shape rules of rotations: the rotated segment, what carries the angles, the positions."""

from __future__ import annotations

from collections.abc import Mapping

from ropegraph.errors import GraphError
from ropegraph.ir.ops import ANGLE_PORTS, POSITION_PORTS, RopeBackward, Rotation

Dim = tuple[int, ...]


def merged_heads(data: Dim) -> Dim:
    """Data [b, groups, h / groups, s, d] as [b, h, s, d]; other dims as they are."""
    if len(data) != 5:
        return data
    b, groups, heads, s, d = data
    return (b, groups * heads, s, d)


def written_dim(where: str, attrs: Rotation, port: str, data: Dim) -> Dim:
    """The dims of what a rotation writes: heads in two levels become one, or the other way."""
    groups = attrs.head_groups
    if not groups:
        return data
    if isinstance(attrs, RopeBackward):
        b, h, s, d = merged_heads(data)
        if h % groups:
            raise GraphError(
                f"{where}: head_groups={groups} do not divide the {h} heads of {port} {list(data)}"
            )
        return (b, groups, h // groups, s, d)
    if len(data) != 5 or data[1] != groups:
        raise GraphError(
            f"{where}: {port} {list(data)} with head_groups={groups}; "
            f"use [b, {groups}, heads of a group, s, d]"
        )
    return merged_heads(data)


def check_rotation(where: str, attrs: Rotation, port: str, dims: Mapping[str, Dim]) -> None:
    """Raise GraphError naming node, port, dims and what would fit.  port: that of the data."""
    data = merged_heads(dims[port])
    if len(data) != 4:
        raise GraphError(f"{where}: {port} {list(data)} has {len(data)} dims; use [b, h, s, d]")
    dims = {**dims, port: data}
    _segment(where, attrs, port, data)
    _positions(where, attrs, port, dims)
    has_positions = any(p in dims for p in POSITION_PORTS)
    # Which rows are read is known only where no tensor says so.
    rows = 1 if has_positions else data[2] * attrs.cp_size
    for source in ANGLE_PORTS[attrs.angles]:
        if source not in dims:
            continue
        if source == "inv_freq":
            _inv_freq(where, attrs, dims[source])
        else:
            _table(where, attrs, source, dims, data, rows)
    if "cos" in dims and dims["cos"] != dims["sin"]:
        raise GraphError(
            f"{where}: cos {list(dims['cos'])} and sin {list(dims['sin'])} differ; "
            "use two tables of one shape"
        )


def _segment(where: str, attrs: Rotation, port: str, data: Dim) -> None:
    d, r = data[3], attrs.rope_dim
    if r % 2 or r < 0:
        raise GraphError(
            f"{where}: rope_dim={r} of the {d} channels of {port} is odd; a rotation acts on pairs "
            f"of channels, so use an even one from 2 to {d - d % 2}"
        )
    if r > d:
        raise GraphError(
            f"{where}: rope_dim={r} is more than the {d} channels of {port} {list(data)}; "
            f"use an even one up to {d - d % 2}"
        )
    if not 0 <= attrs.rope_offset <= d - r:
        raise GraphError(
            f"{where}: rope_offset={attrs.rope_offset} with rope_dim={r} leaves the {d} channels "
            f"of {port}; use 0 to {d - r}"
        )


def _table(
    where: str, attrs: Rotation, port: str, dims: Mapping[str, Dim], data: Dim, rows: int
) -> None:
    table, b, d = dims[port], data[0], data[3]
    r = attrs.rope_dim
    columns = r // 2 if attrs.half_width else r
    parts = 2 if port == "cos_sin" else 1
    width = parts * columns
    batches = (1,) if "cu_seqlens" in dims else (1, b)
    if len(table) != 4 or table[2] != 1 or table[1] not in batches:
        raise GraphError(
            f"{where}: {port} {list(table)} is not a table of angles; use [s, 1, 1, {width}]"
            + (f", or [s, {b}, 1, {width}] with one table per batch entry" if b > 1 else "")
        )
    if table[3] != width:
        other = parts * (r if attrs.half_width else r // 2)
        part = f"rope_dim={table[3] // parts}"
        if table[3] == other and not attrs.half_width:
            # Half as wide: a part of each head, or each angle once. Only the caller knows.
            part += " if it is for a part of each head, half_width=True if it has each angle once"
        elif table[3] == other:
            part = "half_width=False"
        raise GraphError(
            f"{where}: {port} {list(table)} is {table[3]} wide, but rope_dim={r} of {d} channels "
            f"with half_width={attrs.half_width} reads {width} columns; "
            f"use a table {width} wide or {part}"
        )
    if table[0] < rows:
        raise GraphError(
            f"{where}: {port} {list(table)} has {table[0]} rows for {rows} positions; "
            f"use a table of at least {rows} rows"
        )


def _inv_freq(where: str, attrs: Rotation, dim: Dim) -> None:
    half = attrs.rope_dim // 2
    if dim not in ((half,), (1, 1, 1, half)):
        raise GraphError(
            f"{where}: inv_freq is {list(dim)}, but rope_dim={attrs.rope_dim} needs [{half}], "
            "one number of radians a position for each pair"
        )


def _positions(where: str, attrs: Rotation, port: str, dims: Mapping[str, Dim]) -> None:
    b, _, s, _ = dims[port]
    if "position_ids" in dims and dims["position_ids"] not in ((b, s), (1, s)):
        raise GraphError(
            f"{where}: position_ids is {list(dims['position_ids'])}; use [{b}, {s}] or [1, {s}]"
        )
    cu_seqlens = dims.get("cu_seqlens")
    if cu_seqlens is not None:
        if len(cu_seqlens) != 1 or not cu_seqlens[0]:
            raise GraphError(
                f"{where}: cu_seqlens is {list(cu_seqlens)}; use [n + 1], the token where each of "
                "n sequences starts and the end"
            )
        if b != 1:
            raise GraphError(
                f"{where}: cu_seqlens packs sequences along s, so {port} {list(dims[port])} must "
                "have a batch of 1: [1, h, tokens, d]"
            )
    elif attrs.cp_size > 1 and s % 2:
        raise GraphError(
            f"{where}: with cp_size={attrs.cp_size} a rank holds two chunks of equal length, but "
            f"{port} {list(dims[port])} has s={s}; pad whole sequences to a multiple of "
            f"2 cp_size = {2 * attrs.cp_size}"
        )
    sequences = b if cu_seqlens is None else cu_seqlens[0] - 1
    if "start_positions" in dims and dims["start_positions"] != (sequences,):
        raise GraphError(
            f"{where}: start_positions is {list(dims['start_positions'])}; use [{sequences}], "
            "one for each sequence"
        )
