"""Where the angles of a rotation come from, and which position a row has: the tensors given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropegraph.api.checks import as_choice, as_count
from ropegraph.errors import GraphError
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    POSITION_PORTS,
    AnglePrecision,
    AngleSource,
    Numerics,
)

PRECISIONS: tuple[AnglePrecision, ...] = ("float32", "exact")
NUMERICS: tuple[Numerics, ...] = ("fp32", "nemo", "hf")
SOURCE_KEYWORDS = tuple(port for ports in ANGLE_PORTS.values() for port in ports)
TENSOR_KEYWORDS = (*SOURCE_KEYWORDS, *POSITION_PORTS)
MOST_RANKS = 2**30  # kernels count chunks, two a rank, in 32 bits
_CHOICE = (
    "give exactly one of freqs= (a table of radians, [s, 1, 1, rope_dim]), cos= and sin= (two "
    "tables), cos_sin= (one with both on its last axis), or inv_freq= ([rope_dim/2] radians a "
    "position)"
)


def angle_source(where: str, given: Mapping[str, Any]) -> AngleSource:
    """The one source among the tensors given.  Raises GraphError naming all of several."""
    found: dict[AngleSource, list[str]] = {}
    for source, ports in ANGLE_PORTS.items():
        if present := [port for port in ports if given[port] is not None]:
            found[source] = present
    if not found:
        raise GraphError(f"{where}: no angles; {_CHOICE}")
    if len(found) > 1:
        first, *others = (" and ".join(ports) for ports in found.values())
        raise GraphError(
            f"{where}: angles are given twice, as {first} and as {', as '.join(others)}; "
            "give exactly one source"
        )
    (source, ports), *_ = found.items()
    for port in ANGLE_PORTS[source]:
        if port not in ports:
            raise GraphError(f"{where}: {ports[0]}= is given without {port}=; a table needs both")
    return source


def check_positions(where: str, given: Mapping[str, Any], cp_size: int) -> None:
    """Raise GraphError where two arguments both say which position a row has."""
    if given["position_ids"] is None:
        return
    others = [port for port in POSITION_PORTS[1:] if given[port] is not None]
    others += [f"cp_size={cp_size}"] if cp_size > 1 else []
    if others:
        raise GraphError(
            f"{where}: position_ids and {' and '.join(others)} both say which positions the rows "
            "have; give position_ids alone, or leave it out"
        )


def context_parallel(where: str, cp_size: object, cp_rank: object) -> tuple[int, int]:
    """How many ranks share each sequence, and which of them this is."""
    size = as_count(cp_size, f"{where}: cp_size", 1)
    if size >= MOST_RANKS:
        raise GraphError(f"{where}: cp_size={size}; use less than {MOST_RANKS}")
    rank = as_count(cp_rank, f"{where}: cp_rank")
    if rank >= size:
        raise GraphError(f"{where}: cp_rank={rank} with cp_size={size}; use 0 to {size - 1}")
    return size, rank


def precision(where: str, given: object, source: AngleSource) -> AnglePrecision:
    """angle_precision, which speaks of angles that are made from positions."""
    chosen: AnglePrecision = as_choice(given, f"{where}: angle_precision", PRECISIONS)
    if chosen != "float32" and source != "inv_freq":
        raise GraphError(
            f"{where}: angle_precision={chosen!r} speaks of angles made from inv_freq, but they "
            f"are given as {' and '.join(ANGLE_PORTS[source])}; leave it out"
        )
    return chosen


def bit_exact(
    where: str, given: object, source: AngleSource, output_scale: float, attention_factor: float
) -> Numerics:
    """numerics; the modes that promise bits read tables and round nothing else."""
    chosen: Numerics = as_choice(given, f"{where}: numerics", NUMERICS)
    if chosen == "fp32":
        return chosen
    if source not in ("cos_sin", "packed"):
        raise GraphError(
            f"{where}: numerics={chosen!r} reads cosines and sines as they are, but the angles are "
            f"given as {source}; give cos= and sin=, or cos_sin="
        )
    if output_scale != 1.0:
        raise GraphError(
            f"{where}: numerics={chosen!r} is bit-exact, so output_scale={output_scale:.6g} has "
            "no place in it; use 1.0, and scale() behind it"
        )
    if chosen == "nemo" and attention_factor != 1.0:
        raise GraphError(
            f"{where}: numerics='nemo' has no attention_factor, which is {attention_factor:.6g}; "
            "use 1.0, or multiply the tables"
        )
    return chosen
