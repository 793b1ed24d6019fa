"""mla_kv_rope for mla.cu: what it takes, as plain numbers, and how the work is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ropegraph.dtypes import DType, short
from ropegraph.engines.cuda_rope.job import Side
from ropegraph.engines.cuda_rope.shape import LANES, MAX_WORD, MAX_X, MAX_YZ
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward
from ropegraph.lowering.engine import Step

SOURCE = Path(__file__).with_name("mla.cu")
MLA = (MlaKvRope, MlaKvRopeBackward)

FLIGHT = 8  # loads in flight a lane
WARPS = 4  # of a block
BLOCK, TILE = 32, 64  # elements that share an MXFP8 scale; channels that a warp quantizes at once
TURNED_HEADS = 4  # heads for which a warp stores one turned tile
_SERVED = (DType.HALF, DType.BFLOAT16, DType.FLOAT)
_LIMIT = 2**30  # extents are 32 bits wide in the kernel, strides and offsets 64


class Mode(IntEnum):
    """MLA_MODE of mla.cu."""

    FORWARD = 0
    MXFP8 = 1
    BACKWARD = 2


# Fields of struct Params that are tensors -> the ports that they stand for.
_FORWARD = {port: port for port in ("kv", "k_rope", "key", "value")}
_MXFP8 = {"kv": "kv", "k_rope": "k_rope"} | {
    port.replace("_row", ""): port for port in MXFP8_PORTS if "row" in port
}
PLACES: dict[Mode, dict[str, str]] = {
    Mode.FORWARD: _FORWARD,
    Mode.MXFP8: _MXFP8 | {port: port for port in MXFP8_PORTS if "row" not in port},
    Mode.BACKWARD: {"kv": "dKV", "k_rope": "dK_rope", "key": "dKey", "value": "dValue"},
}
TABLES = ("cos", "sin")


@dataclass(frozen=True)
class Task:
    """One step.  places: by field of Params, those that are there.  half: pairs that turn."""

    mode: Mode
    places: Mapping[str, Side]
    tables: Mapping[str, Side]
    batch: int
    heads: int
    tokens: int
    nope: int
    v: int
    half: int
    data: DType
    table: DType

    @property
    def is_empty(self) -> bool:
        """True if nothing is written; a sum over no heads is written."""
        extents = (self.batch, self.tokens)
        return 0 in extents or (self.mode is not Mode.BACKWARD and not self.heads)


@dataclass(frozen=True)
class Cut:
    """How one kernel works on a task: heads a warp takes, warps for all heads, the grid."""

    part_heads: int
    parts: int
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class MlaVariant:
    """One translation unit: mla_vector for ``vec`` > 1, and mla_any."""

    mode: Mode
    data: DType
    table: DType
    vec: int

    @property
    def macros(self) -> dict[str, str]:
        """Macro -> value."""
        return {
            "MLA_MODE": str(int(self.mode)),
            "MLA_DATA": self.data.c_name,
            "MLA_TABLE": self.table.c_name,
            "MLA_VEC": str(self.vec),
            "MLA_FLIGHT": str(FLIGHT),
            "MLA_WARPS": str(WARPS),
        }

    @property
    def options(self) -> tuple[str, ...]:
        """The macros as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.macros.items())


def why_not_mla(step: Step) -> tuple[str, ...]:
    """Every rule of the kernel, beyond those of the device, that the step breaks."""
    broken: list[str] = []
    mode = _mode(step)
    places = PLACES[mode]
    given = {port: step.value(port) for port in places.values() if step.has(port)}
    first = next(iter(given.values()))
    for port, value in given.items():
        is_data = mode is not Mode.MXFP8 or port in ("kv", "k_rope")
        if is_data and value.dtype not in _SERVED:
            broken.append(f"{port} is {short(value.dtype)}, not fp16, bf16 or fp32")
        elif is_data and value.dtype is not first.dtype:
            broken.append(f"{port} is {short(value.dtype)} where others are {short(first.dtype)}")
        if any(n >= _LIMIT for n in value.dim):
            broken.append(f"{port} {list(value.dim)} has an extent of 2^30 or more")
    hosts = [port for port in (*given, *TABLES) if step.value(port).is_host]
    broken += [f"{port} is passed by value" for port in hosts]
    if not broken:
        task = task_of(step)
        if not task.is_empty and any(cut_of(task, v).grid[0] > MAX_X for v in (1, vector_of(task))):
            broken.append("more tokens times heads than one grid holds")
    return tuple(broken)


def task_of(step: Step) -> Task:
    """The task of a step that the kernel takes."""
    attrs, mode = step.node.attrs, _mode(step)
    places = {
        field: _side(step, port) for field, port in PLACES[mode].items() if step.has(port)
    }  # fmt: skip
    tables = {port: _side(step, port) for port in TABLES}
    cos = step.value("cos")
    if isinstance(attrs, MlaKvRopeBackward):
        v = attrs.v_dim
        b, h, s, _ = step.value(next(iter(step.node.inputs))).dim
    else:
        assert isinstance(attrs, MlaKvRope)
        b, h, s, width = step.value("kv").dim
        v = width - attrs.nope_dim
    data = next(iter(places.values())).dtype
    return Task(mode, places, tables, b, h, s, attrs.nope_dim, v, cos.dim[3] // 2, data, cos.dtype)


def vector_of(task: Task) -> int:
    """Elements that a lane moves at once: up to 16 bytes; 1 if strides or widths allow no vector.

    The base pointers have to be aligned as well: alignment() says how much.
    """
    vec = MAX_WORD // task.data.itemsize
    if task.mode is Mode.MXFP8:
        return vec if task.nope % BLOCK == 0 and _fits(task, vec) else 1
    while vec > 1 and not _fits(task, vec):
        vec //= 2
    return vec


def alignment(field: str, side: Side, vec: int) -> int:
    """Bytes that the base of a tensor must be a multiple of for vectors of ``vec`` elements."""
    is_single = field in ("key_scale", "value_scale")  # bytes that lie apart
    return 1 if is_single else min(MAX_WORD, vec * side.dtype.itemsize)


def _fits(task: Task, vec: int) -> bool:
    if any(n % vec for n in (task.nope, task.v, task.half)):
        return False
    if task.mode is Mode.BACKWARD and 2 * task.half > LANES * vec:
        return False
    for field, side in (*task.places.items(), *task.tables.items()):
        align = alignment(field, side, vec)
        *outer, stride_d = side.stride
        if align > 1 and stride_d != 1:
            return False
        if any(s * side.dtype.itemsize % align for s in outer):
            return False
    return True


def cut_of(task: Task, vec: int) -> Cut:
    """Heads a warp takes, and the grid over all of them."""
    if task.mode is not Mode.MXFP8:
        rows = LANES // max(1, min(LANES, (task.nope + task.v) // vec))
        part_heads = max(1, min(task.heads, FLIGHT * rows))
        parts = -(-task.heads // part_heads)
        units = task.tokens * (parts + (task.mode is Mode.BACKWARD))
        return Cut(part_heads, parts, _grid(units, task.batch))
    blocks = task.tokens // BLOCK
    if vec == 1:
        each = (task.nope + 2 * task.half + task.v) // BLOCK
        return Cut(1, task.heads, _grid(blocks * task.heads * each, task.batch))
    part_heads = max(1, min(task.heads, TURNED_HEADS))
    parts = -(-task.heads // part_heads)
    each = -(-task.nope // TILE) + -(-task.v // TILE)
    inner = part_heads * each + -(-2 * task.half // TILE)
    return Cut(part_heads, parts, _grid(blocks * parts * inner, task.batch))


def variant_of_task(task: Task) -> MlaVariant:
    """The kernels for a task."""
    return MlaVariant(task.mode, task.data, task.table, vector_of(task))


def is_token_next(task: Task) -> bool:
    """True if the next token of a head lies closer than the next head of a token."""
    strides = [side.stride for side in task.places.values() if side.stride[1]]
    return bool(strides) and 0 < strides[0][2] < strides[0][1]


def _mode(step: Step) -> Mode:
    match step.node.attrs:
        case MlaKvRopeBackward():
            return Mode.BACKWARD
        case MlaKvRope(quantize=None):
            return Mode.FORWARD
        case _:
            return Mode.MXFP8


def _grid(units: int, batch: int) -> tuple[int, int, int]:
    """Blocks for ``units`` warps of every batch entry; the kernel leaves out what is too many."""
    z = max(1, -(-batch // MAX_YZ))
    return max(1, -(-units // WARPS)), max(1, -(-batch // z)), z


def _side(step: Step, port: str) -> Side:
    value = step.value(port)
    return Side(step.slot(port), value.dtype, _stride(value))


def _stride(value: Value) -> tuple[int, int, int, int]:
    b, h, s, d = (0 if n == 1 else x for n, x in zip(value.dim, value.stride, strict=True))
    # A last axis of length 1 is never stepped over, and its vector is that one element.
    return b, h, s, d
