"""Everything that is recorded of a step, as one hashable value: the key of the plan cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log
from typing import cast

from ropegraph.dtypes import DType
from ropegraph.engines.cudnn_sdpa.operands import Operand, operands_of
from ropegraph.ir.graph import span
from ropegraph.ir.ops import Attention, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Step

LN2 = log(2.0)


@dataclass(frozen=True)
class Recipe:
    """A node, its tensors and its device.  Equal recipes run on one plan.

    attn_scale: ln 2 included; None when the port ``attn_scale`` carries it (times scale_unit).
    most_rows: s_q and s_kv, the longest that a sequence can be.
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
    most_rows: tuple[int, int]
    deterministic: bool
    device: Device
    slots: tuple[int, ...] = field(compare=False)

    def __iter__(self) -> Iterator[tuple[int, Operand, int]]:
        """(uid, operand, slot) of every tensor."""
        pairs = zip(self.operands, self.slots, strict=True)
        return ((i, operand, slot) for i, (operand, slot) in enumerate(pairs, 1))

    def copied_bytes(self, operand: Operand) -> int:
        """Bytes of the mended copy that cuDNN reads instead of ``operand``; 0 for none.

        Of lengths, and of Stats where a bias may hide a whole row: see repair.py. A ragged Stats
        is left alone, as only its offsets know its extent.
        """
        if operand.port in ("seq_len_q", "seq_len_kv"):
            return 4 * operand.dim[0]
        ports = {each.port for each in self.operands}
        is_risky = "bias" in ports and "sink_token" not in ports
        if operand.port != "stats" or operand.ragged or not is_risky:
            return 0
        return 4 * span(operand.dim, operand.stride)

    @property
    def io(self) -> DType:
        return self.operands[0].dtype


def recipe_of(step: Step, device: Device) -> Recipe:
    """The recipe of an Sdpa or SdpaBackward step."""
    attrs = cast(Attention, step.node.attrs)
    unit = LN2 if attrs.softmax_input_is_log2 else 1.0
    operands, slots = operands_of(step, attrs)
    # FE narrows bounds to 32 bits. One that reaches past every key reaches as far at this.
    paged = attrs.max_seq_len_kv if isinstance(attrs, Sdpa) else None
    s_q, s_kv = step.value("q").dim[2], step.value("k").dim[2] if paged is None else paged
    bounds = [
        None if bound is None else min(bound, s_q + s_kv)
        for bound in (attrs.left_bound, attrs.right_bound)
    ]
    return Recipe(
        is_backward=isinstance(attrs, SdpaBackward),
        operands=tuple(operands),
        attn_scale=None if attrs.attn_scale is None else attrs.attn_scale * unit,
        scale_unit=unit,
        left_bound=bounds[0],
        right_bound=bounds[1],
        bottom_right=attrs.bottom_right,
        alibi=attrs.alibi,
        padding=attrs.padding,
        dropout_p=attrs.dropout_p or 0.0,
        max_seq_len_kv=paged,
        most_rows=(s_q, s_kv),
        deterministic=isinstance(attrs, SdpaBackward) and attrs.deterministic,
        device=device,
        slots=tuple(slots),
    )
