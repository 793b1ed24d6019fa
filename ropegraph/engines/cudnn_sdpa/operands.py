"""The tensors that are recorded of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ropegraph.dtypes import DType
from ropegraph.engines.cudnn_sdpa.facts import OPERANDS, SCALARS
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Attention, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Step
from ropegraph.lowering.memory import span_bytes

# Outputs that cuDNN writes whether or not the graph reads them; whose rows and width each has.
_OF_FORWARD = {"O": ("q", "v")}
_OF_BACKWARD = {"dQ": ("q", "q"), "dK": ("k", "k"), "dV": ("v", "v")}
# The scale reaches cuDNN in fp32. Its kernels hide slots before they scale, so a scale of 0 or less
# turns the -inf of a hidden slot into NaN or +inf (measured: 9.19 on sm_90).
SCALE_RANGE = (2.0**-100, 2.0**100)


@dataclass(frozen=True)
class Operand:
    """One tensor of the recorded graph.  Its uid is its place in the recipe, counted from 1.

    port: the port, or the name of a tensor of ragged offsets.  ragged: the port of its offsets.
    spare_bytes: not 0 for an output nobody reads, which lands in the workspace.
    every: for offsets that are made here, the elements from one sequence to the next.
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
    every: int | None = None


def is_usable_scale(attn_scale: float) -> bool:
    """True if cuDNN computes with it."""
    return SCALE_RANGE[0] <= attn_scale <= SCALE_RANGE[1]


def operands_of(step: Step, attrs: Attention) -> tuple[list[Operand], list[int]]:
    """The tensors to record, q first, and the slot of each; -1 for one that has no slot."""
    operands: list[Operand] = []
    slots: list[int] = []
    offsets: dict[str | int, str] = {}
    is_paged = isinstance(attrs, Sdpa) and attrs.max_seq_len_kv is not None

    def ragged(port: str, value: Value) -> str:
        """The name under which the offsets of a value are recorded, each once; "" without any.

        A padded tensor is recorded as a ragged one whose sequences lie a batch stride apart: the
        kernels stop at the end of a ragged sequence, while what lies past seq_len in a dense
        tensor is read, multiplied by 0, and lets NaN through.
        """
        source: str | int | None = value.ragged_offset
        is_pool = is_paged and port in ("k", "v")
        if source is None and attrs.padding and port in OPERANDS and not is_pool:
            source = tidy(value.dim, value.stride)[0]
        if source is None:
            return ""
        return offsets.setdefault(source, f"ragged_offset_{len(offsets)}")

    def add(operand: Operand, slot: int) -> None:
        operands.append(operand)
        slots.append(slot)

    skipped = () if attrs.dropout_p else ("seed", "offset")
    for port in step.node.inputs:
        if port not in skipped:
            add(_operand(port, step.value(port), ragged(port, step.value(port))), step.slot(port))
    for port in step.node.outputs:
        value = step.value(port)
        add(_operand(port, value, ragged(port, value), is_output=True), step.slot(port))
    always = _OF_BACKWARD if isinstance(attrs, SdpaBackward) else _OF_FORWARD
    for port, (rows, width) in always.items():
        if not step.has(port):
            value = _like(step.value(rows), step.value(width).dim[3])
            size = max(span_bytes(value), 1)
            name = ragged(port, value)
            add(_operand(port, value, name, is_output=True, spare_bytes=size), -1)
    for source, name in offsets.items():
        if isinstance(source, str):
            value = step.values[source]
            dim = (value.numel, 1, 1, 1)
            add(Operand(name, dim, (1, 1, 1, 1), value.dtype), step.slots[source])
        else:
            add(_even_offsets(name, step.value("q").dim[0], source), -1)
    return operands, slots


def _even_offsets(name: str, sequences: int, every: int) -> Operand:
    dtype = DType.INT32 if sequences * every < 2**31 else DType.INT64
    return Operand(name, (sequences + 1, 1, 1, 1), (1, 1, 1, 1), dtype, every=every)


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
        stride=tidy(dim, stride),
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


def tidy(dim: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides that fit on axes of length 1 too: they mean nothing there, but FE checks them."""
    tidied: list[int] = []
    below = 1
    for n, step in zip(reversed(dim), reversed(stride), strict=True):
        tidied.append(step if n != 1 else below)
        below *= n
    return tuple(reversed(tidied))
