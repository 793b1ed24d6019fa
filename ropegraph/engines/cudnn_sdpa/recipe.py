"""Everything that is recorded of a step, as one hashable value: the key of the plan cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log
from typing import cast

from ropegraph.dtypes import DType
from ropegraph.engines.cudnn_sdpa.operands import Operand, operands_of
from ropegraph.ir.ops import Attention, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Step

LN2 = log(2.0)


@dataclass(frozen=True)
class Recipe:
    """A node, its tensors and its device.  Equal recipes run on one plan.

    attn_scale: ln 2 included; None when the port ``attn_scale`` carries it (times scale_unit).
    slots: the slot of each operand, -1 for a spare one; no part of the identity, as the place
    of a buffer is not recorded.
    """

    is_backward: bool
    operands: tuple[Operand, ...]
    attn_scale: float | None
    scale_unit: float
    left_bound: int | None
    right_bound: int | None
    bottom_right: bool
    alibi: bool
    padding: bool
    dropout_p: float
    max_seq_len_kv: int | None
    deterministic: bool
    device: Device
    slots: tuple[int, ...] = field(compare=False)

    def __iter__(self) -> Iterator[tuple[int, Operand, int]]:
        """(uid, operand, slot) of every tensor."""
        pairs = zip(self.operands, self.slots, strict=True)
        return ((i, operand, slot) for i, (operand, slot) in enumerate(pairs, 1))

    @property
    def copies_stats(self) -> bool:
        """True where a bias may hide a whole row: see repair.py.

        A ragged Stats is left alone, as only its offsets know its extent.
        """
        ports = {operand.port: operand for operand in self.operands}
        is_dense = "stats" in ports and not ports["stats"].ragged
        return is_dense and "bias" in ports and "sink_token" not in ports

    @property
    def stats_bytes(self) -> int:
        stats = next(operand for operand in self.operands if operand.port == "stats")
        return 4 * (1 + sum((n - 1) * s for n, s in zip(stats.dim, stats.stride, strict=True)))

    @property
    def io(self) -> DType:
        return self.operands[0].dtype


def recipe_of(step: Step, device: Device) -> Recipe:
    """The recipe of an Sdpa or SdpaBackward step."""
    attrs = cast(Attention, step.node.attrs)
    unit = LN2 if attrs.softmax_input_is_log2 else 1.0
    operands, slots = operands_of(step, attrs)
    return Recipe(
        is_backward=isinstance(attrs, SdpaBackward),
        operands=tuple(operands),
        attn_scale=None if attrs.attn_scale is None else attrs.attn_scale * unit,
        scale_unit=unit,
        left_bound=attrs.left_bound,
        right_bound=attrs.right_bound,
        bottom_right=attrs.bottom_right,
        alibi=attrs.alibi,
        padding=attrs.padding,
        dropout_p=attrs.dropout_p or 0.0,
        max_seq_len_kv=attrs.max_seq_len_kv if isinstance(attrs, Sdpa) else None,
        deterministic=isinstance(attrs, SdpaBackward) and attrs.deterministic,
        device=device,
        slots=tuple(slots),
    )
