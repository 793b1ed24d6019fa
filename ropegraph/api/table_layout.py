"""Tables of angles that do not look like the table_layout they are read by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropegraph.ir.graph import singles
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    NormRope,
    NormRopeBackward,
    Rotation,
    TableLayout,
)
from ropegraph.lowering.engine import Step


def suspicions(step: Step, env: Sequence[Any]) -> list[str]:
    """A sentence for each table whose unread columns hold something else than the read ones."""
    found: list[str] = []
    for single in singles(step.node):
        attrs = single.attrs
        if isinstance(attrs, (NormRope, NormRopeBackward)):
            attrs = attrs.rope
        if not isinstance(attrs, Rotation) or attrs.angles == "inv_freq":
            continue
        if attrs.half_width or attrs.table_layout == "full":
            continue  # every column is read
        for port in ANGLE_PORTS[attrs.angles]:
            name = single.inputs[port]
            table: Tensor = env[step.slots[name]]
            parts = table.chunk(2, dim=-1) if attrs.angles == "packed" else (table,)
            if not all(_fits(attrs.table_layout, part) for part in parts):
                found.append(_sentence(single.name, name, attrs.table_layout, parts))
    return found


def _fits(layout: TableLayout, table: Tensor) -> bool:
    """True if the columns that the layout does not read repeat the others, or are zero."""
    if layout == "first_half":
        read, other = table.chunk(2, dim=-1)
    else:
        read, other = table[..., ::2], table[..., 1::2]
    return torch.equal(read, other) or not bool(other.any())


def _sentence(node: str, table: str, layout: TableLayout, parts: Sequence[Tensor]) -> str:
    unread: str = "second half"
    another: TableLayout = "pairs"
    if layout == "pairs":
        unread, another = "odd column", "first_half"
    fits = all(_fits(another, part) for part in parts)
    like = f'it looks like "{another}"' if fits else 'is it "full"?'
    return (
        f'{node!r} reads {table!r} by table_layout="{layout}", but the {unread} of it neither '
        f"repeats what is read nor is zero; {like}"
    )
