"""The keywords of rope and rope_backward, read into attributes and ports."""

from __future__ import annotations

from typing import Any

from ropegraph.api.angle_source import (
    TENSOR_KEYWORDS,
    angle_source,
    bit_exact,
    check_positions,
    context_parallel,
    precision,
)
from ropegraph.api.checks import as_choice, as_count, as_flag, as_number, refuse_unknown
from ropegraph.dtypes import as_compute
from ropegraph.errors import GraphError
from ropegraph.ir.ops import ANGLE_PORTS, POSITION_PORTS, Rope, RopeBackward, TableLayout

LAYOUTS: tuple[TableLayout, ...] = ("first_half", "pairs", "full")
KEYWORDS = (
    "output_scale", "rope_dim", "rope_offset", "interleaved", "interleaved_output",
    "attention_factor", "inverse", "half_width", "table_layout", "angle_precision", "numerics",
    "cp_size", "cp_rank",
)  # fmt: skip


def rotation(
    kind: type[Rope] | type[RopeBackward],
    where: str,
    width: int,
    *,
    output_scale: Any,
    rope_dim: Any,
    rope_offset: Any,
    interleaved: Any,
    interleaved_output: Any,
    attention_factor: Any,
    inverse: Any,
    half_width: Any,
    table_layout: Any,
    angle_precision: Any,
    numerics: Any,
    cp_size: Any,
    cp_rank: Any,
    head_groups: Any,
    compute_data_type: Any,
    fe_arguments: dict[str, Any],
    **tensors: Any,
) -> tuple[Rope | RopeBackward, dict[str, Any]]:
    """The attributes of a rotation of rows ``width`` wide, and its tensors by port.

    tensors: every one of TENSOR_KEYWORDS, None where it is not given.
    Raises GraphError naming ``where``, the argument, its value and what would work.
    """
    refuse_unknown(where, fe_arguments, {"out_dims": None}, known=(*KEYWORDS, *TENSOR_KEYWORDS))
    source = angle_source(where, tensors)
    size, rank = context_parallel(where, cp_size, cp_rank)
    check_positions(where, tensors, size)
    r = as_count(rope_dim, f"{where}: rope_dim") or width
    pairs_in = as_flag(interleaved, f"{where}: interleaved")
    pairs_out = (
        pairs_in
        if interleaved_output is None
        else as_flag(interleaved_output, f"{where}: interleaved_output")
    )
    half = as_flag(half_width, f"{where}: half_width") or source == "inv_freq"
    scale = as_number(output_scale, f"{where}: output_scale")
    factor = as_number(attention_factor, f"{where}: attention_factor")
    attrs = kind(
        rope_dim=r,
        rope_offset=(
            width - r if rope_offset is None else as_count(rope_offset, f"{where}: rope_offset")
        ),
        output_scale=scale,
        attention_factor=factor,
        interleaved=pairs_in,
        interleaved_output=pairs_out,
        inverse=as_flag(inverse, f"{where}: inverse"),
        angles=source,
        half_width=half,
        table_layout=_layout(where, table_layout, half, pairs_in or pairs_out),
        angle_precision=precision(where, angle_precision, source),
        numerics=bit_exact(where, numerics, source, scale, factor),
        cp_size=size,
        cp_rank=rank,
        head_groups=as_count(head_groups, f"{where}: head_groups"),
        compute=as_compute(compute_data_type, f"{where}: compute_data_type"),
    )
    ports = (*ANGLE_PORTS[source], *POSITION_PORTS)
    return attrs, {port: tensors[port] for port in ports if tensors[port] is not None}


def _layout(where: str, given: Any, half_width: bool, interleaved: bool) -> TableLayout:
    """table_layout, which must be stated where pairs make both layouts plausible."""
    if given is None:
        if interleaved and not half_width:
            raise GraphError(
                f"{where}: interleaved needs table_layout= with a full-width table: 'pairs' for "
                "columns t0 t0 t1 t1, 'first_half' if the first rope_dim/2 columns hold the "
                "angles, 'full' if every lane has its own; or half_width=True"
            )
        return "first_half"
    chosen: TableLayout = as_choice(given, f"{where}: table_layout", LAYOUTS)
    if half_width and chosen != "first_half":
        raise GraphError(
            f"{where}: table_layout={chosen!r} speaks of a full-width table, but half_width=True"
        )
    return chosen
