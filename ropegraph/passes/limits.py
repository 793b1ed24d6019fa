"""How large a folded scale may get before it costs more than it saves."""

from __future__ import annotations

from typing import Any

from ropegraph.dtypes import DType, short
from ropegraph.ir.graph import Node
from ropegraph.ir.ops import Rotation, Scale

# Beyond these a scaled fp16 row overflows or turns subnormal at ordinary magnitudes.
_LIMITS = {DType.HALF: (2.0**-10, 2.0**4)}
_WIDE = (2.0**-100, 2.0**100)


def output_scale(node: Node[Any]) -> float:
    """The scale a rope or scale node puts on its output."""
    return node.attrs.factor if isinstance(node.attrs, Scale) else node.attrs.output_scale


def times(node: Node[Any], factor: float) -> Node[Any]:
    """The same node with its scale multiplied by ``factor``: a user's own scale stays in."""
    total = output_scale(node) * factor
    if isinstance(node.attrs, Scale):
        return node.with_attrs(factor=total)
    return node.with_attrs(output_scale=total)


def why_not_scale(node: Node[Any], factor: float, dtype: DType) -> str | None:
    """Why ``factor`` cannot be multiplied onto the node's scale, or None."""
    if isinstance(node.attrs, Rotation) and node.attrs.numerics != "fp32":
        return f"{node.name!r} is bit-exact (numerics={node.attrs.numerics!r})"
    low, high = _LIMITS.get(dtype, _WIDE)
    total = abs(output_scale(node) * factor)
    if not low <= total <= high:
        return (
            f"the total output_scale of {node.name!r} would be {total:.6g}, outside "
            f"[{low:.6g}, {high:.6g}] for {short(dtype)}"
        )
    return None
