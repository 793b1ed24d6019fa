"""Everything that is recorded of a step, as one hashable value: the key of the plan cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log
from typing import cast

from ropegraph.dtypes import DType
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Attention, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Step
from ropegraph.lowering.memory import span_bytes

LN2 = log(2.0)

# Outputs that cuDNN writes whether or not the graph reads them, and whose dims each one takes.
_ALWAYS = {
    Sdpa: {"O": ("q", "v")},
    SdpaBackward: {"dQ": ("q", "q"), "dK": ("k", "k"), "dV": ("v", "v")},
}
SCALARS = ("attn_scale", "seed", "offset")


@dataclass(frozen=True)
class Operand:
    """One tensor of the recorded graph.  Its uid is its place in the recipe, counted from 1.

    port: the port, or the name of a tensor of ragged offsets.  ragged: the port of its offsets.
    spare_bytes: not 0 for an output nobody reads, which lands in the workspace.
    """

    port: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType
    is_output: bool = False
    is_host: bool = False
    ragged: str = ""
    multiplier: int = 1
    spare_bytes: int = 0


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
        return ((i + 1, o, s) for i, (o, s) in enumerate(zip(self.operands, self.slots, strict=True)))

    @property
    def io(self) -> DType:
        return self.operands[0].dtype


def recipe_of(step: Step, device: Device) -> Recipe:
    attrs = cast(Attention, step.node.attrs)
    unit = LN2 if attrs.softmax_input_is_log2 else 1.0
    operands, slots = _operands(step, attrs)
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


def _operands(step: Step, attrs: Attention) -> tuple[list[Operand], list[int]]:
    operands: list[Operand] = []
    slots: list[int] = []
    offsets: dict[str, str] = {}

    def add(operand: Operand, slot: int) -> None:
        operands.append(operand)
        slots.append(slot)

    def offsets_of(value: Value) -> str:
        """The name under which the offsets of a ragged value are recorded, once a tensor."""
        name = value.ragged_offset
        if name is None:
            return ""
        if name not in offsets:
            offsets[name] = f"ragged_offset_{len(offsets)}"
        return offsets[name]

    skipped = () if attrs.dropout_p else ("seed", "offset")
    for port in step.node.inputs:
        if port not in skipped:
            add(_operand(port, step.value(port), offsets_of(step.value(port))), step.slot(port))
    for port in step.node.outputs:
        value = step.value(port)
        add(_operand(port, value, offsets_of(value), is_output=True), step.slot(port))
    for port, (rows, width) in _ALWAYS[type(attrs)].items():
        if not step.has(port):
            value = _like(step.value(rows), step.value(width).dim[3])
            size = max(span_bytes(value), 1)
            add(_operand(port, value, offsets_of(value), True, size), -1)
    for name, recorded in offsets.items():
        value = step.values[name]
        add(Operand(recorded, (value.numel, 1, 1, 1), (1, 1, 1, 1), value.dtype), step.slots[name])
    return operands, slots


def _operand(
    port: str, value: Value, ragged: str, is_output: bool = False, spare_bytes: int = 0
) -> Operand:
    dim, stride = value.dim, value.stride
    if port in SCALARS:
        dim = stride = (1, 1, 1, 1)
    # A host scale is converted on its way to cuDNN, so it is always recorded as fp32.
    dtype = DType.FLOAT if port == "attn_scale" and value.is_host else value.dtype
    return Operand(
        port=port,
        dim=dim,
        stride=_tidy(dim, stride),
        dtype=dtype,
        is_output=is_output,
        is_host=value.is_host,
        ragged=ragged,
        multiplier=value.ragged_multiplier if ragged else 1,
        spare_bytes=spare_bytes,
    )


def _like(value: Value, width: int) -> Value:
    """A tensor with the rows of ``value``, each ``width`` wide; packed unless it is ragged."""
    b, h, s, d = value.dim
    if value.ragged_offset is not None and width == d:
        return value
    return Value("spare", (b, h, s, width), (s * h * width, width, h * width, 1), value.dtype)


def _tidy(dim: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The stride of an axis of length 1 means nothing, but cuDNN Frontend checks it: make it fit."""
    tidied: list[int] = []
    below = 1
    for n, step in zip(reversed(dim), reversed(stride), strict=True):
        tidied.append(step if n != 1 else below)
        below *= n
    return tuple(reversed(tidied))
