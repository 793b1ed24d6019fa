"""The keywords of rope and rope_backward, read into attributes and ports."""

from __future__ import annotations

from typing import Any

from ropegraph.api.checks import as_choice, as_count, as_flag, as_number, refuse_unknown
from ropegraph.dtypes import as_compute
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Rope, RopeBackward, TableLayout

LAYOUTS: tuple[TableLayout, ...] = ("first_half", "pairs", "full")
# Sources of the contract that this version does not serve.
ANGLES = ("cos", "sin", "cos_sin", "inv_freq")
POSITIONS = ("position_ids", "start_positions", "cu_seqlens")


KEYWORDS = (
    "freqs", "output_scale", "rope_dim", "rope_offset", "interleaved", "interleaved_output",
    "attention_factor", "inverse", "half_width", "table_layout",
)  # fmt: skip


def rotation(
    kind: type[Rope] | type[RopeBackward],
    where: str,
    width: int,
    *,
    freqs: Any,
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
    **sources: Any,
) -> Rope | RopeBackward:
    """The attributes of a rotation of rows ``width`` wide.

    Raises GraphError naming ``where``, the argument, its value and what would work.
    """
    others = {n: given for n, given in sources.items() if n not in (*ANGLES, *POSITIONS)}
    refuse_unknown(where, others, {"out_dims": None}, known=(*KEYWORDS, *ANGLES, *POSITIONS))
    _one_source(where, freqs, sources)
    r = as_count(rope_dim, f"{where}: rope_dim") or width
    pairs_in = as_flag(interleaved, f"{where}: interleaved")
    pairs_out = (
        pairs_in
        if interleaved_output is None
        else as_flag(interleaved_output, f"{where}: interleaved_output")
    )
    half = as_flag(half_width, f"{where}: half_width")
    return kind(
        rope_dim=r,
        rope_offset=(
            width - r if rope_offset is None else as_count(rope_offset, f"{where}: rope_offset")
        ),
        output_scale=as_number(output_scale, f"{where}: output_scale"),
        attention_factor=as_number(attention_factor, f"{where}: attention_factor"),
        interleaved=pairs_in,
        interleaved_output=pairs_out,
        inverse=as_flag(inverse, f"{where}: inverse"),
        half_width=half,
        table_layout=_layout(where, table_layout, half, pairs_in or pairs_out),
        angle_precision=_only(where, "angle_precision", angle_precision, "float32"),
        numerics=_only(where, "numerics", numerics, "fp32"),
        cp_size=_only(where, "cp_size", cp_size, 1),
        cp_rank=_only(where, "cp_rank", cp_rank, 0),
        head_groups=as_count(head_groups, f"{where}: head_groups"),
        compute=as_compute(compute_data_type, f"{where}: compute_data_type"),
    )


def _one_source(where: str, freqs: Any, sources: dict[str, Any]) -> None:
    """Angles come from exactly one place, and so far only from freqs."""
    angles, positions = (
        [name for name in names if sources.get(name) is not None] for names in (ANGLES, POSITIONS)
    )
    if freqs is not None and angles:
        raise GraphError(
            f"{where}: angles are given twice, as freqs and as {' and '.join(angles)}; "
            "give exactly one source"
        )
    for name in (*angles, *positions):
        raise GraphError(
            f"{where}: {name}= is not served yet; give freqs=, a table of angles whose row i "
            "belongs to position i"
        )
    if freqs is None:
        raise GraphError(f"{where}: no angles; give freqs=[s, 1, 1, rope_dim] in radians, fp32")


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


def _only(where: str, argument: str, given: Any, served: Any) -> Any:
    if not isinstance(given, (str, int)) or given != served:
        raise GraphError(f"{where}: {argument}={given!r:.60} is not served yet; use {served!r}")
    return served
