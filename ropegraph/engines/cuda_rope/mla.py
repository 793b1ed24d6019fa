"""mla_kv_rope for mla.cu: what it takes, as plain numbers, and how the work is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ropegraph.dtypes import DType, short
from ropegraph.engines.cuda_rope.job import Side, side_of
from ropegraph.engines.cuda_rope.shape import LANES, MAX_WORD, MAX_X, MAX_YZ
from ropegraph.engines.cuda_rope.unit import Unit
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward
from ropegraph.lowering.engine import Step

SOURCE = Path(__file__).with_name("mla.cu")
MLA = (MlaKvRope, MlaKvRopeBackward)

BLOCK, ACROSS = 32, 8  # elements that share an MXFP8 scale; vectors of a tile of 32 tokens
_SERVED = (DType.HALF, DType.BFLOAT16, DType.FLOAT)
_LIMIT = 2**30  # extents are 32 bits wide in the kernel, strides and offsets 64


class Mode(IntEnum):
    """MLA_MODE of mla.cu."""

    FORWARD = 0
    MXFP8 = 1
    BACKWARD = 2


@dataclass(frozen=True)
class Tuning:
    """What changes the speed alone.

    flight, sum_flight: loads in flight a lane, where it copies and where it sums.  units: vectors
    that a lane copies; MXFP8: heads for which a warp stores one turned tile.  tokens: that a warp
    takes, up to ``flight``.  warps: of a block.  resident: warps an SM at least, 0 for any.
    vec: channels of a lane, at most, for MXFP8.  log_group: log2 of the tiles of tokens that warps
    run over before they run over the heads.  is_batch_inner: batch entries before tokens.
    """

    flight: int = 8
    units: int = 8
    tokens: int = 1
    warps: int = 4
    resident: int = 0
    sum_flight: int = 8
    vec: int = 8
    log_group: int = 0
    is_batch_inner: bool = False


# By what lies closest in memory: the next head of a token, the next token of a head.
TUNED: dict[tuple[Mode, str], Tuning] = {
    (Mode.FORWARD, "heads"): Tuning(flight=4, units=4, warps=1, resident=24),
    (Mode.FORWARD, "tokens"): Tuning(
        flight=4, units=4, tokens=4, warps=1, resident=24, log_group=10, is_batch_inner=True
    ),
    (Mode.BACKWARD, "heads"): Tuning(flight=4, units=4, warps=1, resident=32, sum_flight=4),
    (Mode.BACKWARD, "tokens"): Tuning(
        flight=4, units=8, tokens=4, warps=1, sum_flight=4, log_group=10, is_batch_inner=True
    ),
    (Mode.MXFP8, "heads"): Tuning(vec=16, units=4, warps=4),
    (Mode.MXFP8, "tokens"): Tuning(vec=16, units=4, warps=2, log_group=2),
}  # fmt: skip

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
    """One step.

    places: by field of Params, those that are there.  half: pairs that turn.
    is_batch_next: the next batch entry of a token lies closer than the next token.
    """

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
    tuning: Tuning = Tuning()
    is_batch_next: bool = False

    @property
    def is_empty(self) -> bool:
        """True if nothing is written; a sum over no heads is written."""
        extents = (self.batch, self.tokens)
        return 0 in extents or (self.mode is not Mode.BACKWARD and not self.heads)


@dataclass(frozen=True)
class Cut:
    """How one kernel works on a task.

    part_heads, parts: heads a warp takes, and how many times to have all.  shares: warps for a
    tile of tokens, ``inner`` of each part, ``each`` of each head.  batch: entries along x.
    """

    part_heads: int
    parts: int
    shares: int
    inner: int
    each: int
    log_group: int
    batch: int
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class MlaVariant(Unit):
    """One translation unit: mla_vector for ``vec`` > 1, and mla_any."""

    mode: Mode
    data: DType
    table: DType
    vec: int
    tuning: Tuning = Tuning()

    @property
    def macros(self) -> dict[str, str]:
        return {
            "MLA_MODE": str(int(self.mode)),
            "MLA_DATA": self.data.c_name,
            "MLA_TABLE": self.table.c_name,
            "MLA_VEC": str(self.vec),
            "MLA_FLIGHT": str(self.tuning.flight),
            "MLA_SUM_FLIGHT": str(self.tuning.sum_flight),
            "MLA_TOKENS": str(self.tuning.tokens),
            "MLA_WARPS": str(self.tuning.warps),
            "MLA_RESIDENT": str(self.tuning.resident),
        }

    @property
    def code(self) -> str:
        return SOURCE.read_text(encoding="utf-8")

    @property
    def kernels(self) -> tuple[str, ...]:
        return ("mla_vector", "mla_any") if self.vec > 1 else ("mla_any",)


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
        field: side_of(step, port) for field, port in PLACES[mode].items() if step.has(port)
    }  # fmt: skip
    tables = {port: side_of(step, port) for port in TABLES}
    cos = step.value("cos")
    if isinstance(attrs, MlaKvRopeBackward):
        v = attrs.v_dim
        b, h, s, _ = step.value(next(iter(step.node.inputs))).dim
    else:
        assert isinstance(attrs, MlaKvRope)
        b, h, s, width = step.value("kv").dim
        v = width - attrs.nope_dim
    data = next(iter(places.values())).dtype
    tuning = TUNED[mode, "tokens" if _is_next(places, 2, 1) else "heads"]
    half, is_batch_next = cos.dim[3] // 2, _is_next(places, 0, 2)
    return Task(
        mode, places, tables, b, h, s, attrs.nope_dim, v, half, data, cos.dtype, tuning,
        is_batch_next,
    )  # fmt: skip


def vector_of(task: Task) -> int:
    """Elements that a lane moves at once: up to 16 bytes; 1 if strides or widths allow no vector.

    The base pointers have to be aligned as well: alignment() says how much.
    """
    vec = MAX_WORD // task.data.itemsize
    if task.mode is Mode.MXFP8:
        fitting = (n for n in (task.tuning.vec, vec) if task.nope % BLOCK == 0 and _fits(task, n))
        return next(fitting, 1)
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
    tuning = task.tuning
    if task.mode is not Mode.MXFP8:
        tokens = tuning.tokens if vec > 1 else 1
        rows = LANES // max(1, min(LANES, (task.nope + task.v) // vec))
        part_heads = max(1, min(task.heads, max(1, tuning.units // tokens) * rows))
        parts = -(-task.heads // part_heads)
        tiles = -(-task.tokens // tokens)
        sums = tokens if task.mode is Mode.BACKWARD else 0
        return _cut(task, part_heads, parts, 1, 1, sums, tiles)
    tiles = task.tokens // BLOCK
    if vec == 1:
        each = (task.nope + 2 * task.half + task.v) // BLOCK
        return _cut(task, 1, task.heads, each, each, 0, tiles)
    part_heads = max(1, min(task.heads, tuning.units))
    parts = -(-task.heads // part_heads)
    tile = ACROSS * vec
    each = -(-task.nope // tile) + -(-task.v // tile)
    inner = part_heads * each + -(-2 * task.half // tile)
    return _cut(task, part_heads, parts, inner, each, 0, tiles)


def variant_of_task(task: Task) -> MlaVariant:
    """The kernels for a task."""
    return MlaVariant(task.mode, task.data, task.table, vector_of(task), task.tuning)


def _is_next(places: Mapping[str, Side], inner: int, outer: int) -> bool:
    """True if a step along axis ``inner`` is shorter than one along ``outer``."""
    strides = [side.stride for side in places.values() if side.stride[1]]
    return bool(strides) and 0 < strides[0][inner] < strides[0][outer]


def _mode(step: Step) -> Mode:
    match step.node.attrs:
        case MlaKvRopeBackward():
            return Mode.BACKWARD
        case MlaKvRope(quantize=None):
            return Mode.FORWARD
        case _:
            return Mode.MXFP8


def _cut(
    task: Task, part_heads: int, parts: int, inner: int, each: int, sums: int, tiles: int
) -> Cut:
    """The grid; the kernel leaves out what is too many."""
    tuning, shares = task.tuning, parts * inner + sums
    log_group = tuning.log_group
    while log_group and 2**log_group > tiles:
        log_group -= 1
    warps = (-(-tiles >> log_group) << log_group) * shares
    batch = task.batch if tuning.is_batch_inner or task.is_batch_next else 1
    if warps * batch > MAX_X:
        batch = 1
    entries = -(-task.batch // max(1, batch))
    z = max(1, -(-entries // MAX_YZ))
    grid = max(1, -(-warps * batch // tuning.warps)), max(1, -(-entries // z)), z
    return Cut(part_heads, parts, shares, inner, each, log_group, max(1, batch), grid)
