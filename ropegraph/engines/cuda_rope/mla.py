"""mla_kv_rope for mla.cu: a step as plain numbers, and how fast it is worked on best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.job import Side, side_of
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward
from ropegraph.lowering.engine import Step


class Mode(IntEnum):
    """MLA_MODE of mla.cu."""

    FORWARD = 0
    MXFP8 = 1
    BACKWARD = 2


@dataclass(frozen=True)
class Tuning:
    """What changes the speed alone.

    flight, sum_flight: loads in flight a lane, where it copies and where it sums.  units: vectors
    that a lane copies; MXFP8: heads that a block takes.  tokens: that a warp takes, up to
    ``flight``.  warps: of a block.  resident: warps an SM at least, 0 for any.  vec: channels of a
    lane, at most, for MXFP8.  log_group: log2 of the tiles of tokens that warps run over before
    they run over the heads.  is_batch_inner: batch entries before tokens.
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
    (Mode.MXFP8, "heads"): Tuning(vec=16, units=8, warps=8, resident=16),
    (Mode.MXFP8, "tokens"): Tuning(vec=16, units=8, warps=8, resident=16),
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
    def key_dim(self) -> int:
        """Channels of a head's key."""
        return self.nope + 2 * self.half

    @property
    def is_empty(self) -> bool:
        """True if nothing is written; a sum over no heads is written."""
        extents = (self.batch, self.tokens)
        return 0 in extents or (self.mode is not Mode.BACKWARD and not self.heads)


def task_of(step: Step) -> Task:
    """The task of a step that the kernel takes."""
    attrs, mode = step.node.attrs, mode_of(step)
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


def mode_of(step: Step) -> Mode:
    """Which of the three kernels a step needs."""
    match step.node.attrs:
        case MlaKvRopeBackward():
            return Mode.BACKWARD
        case MlaKvRope(quantize=None):
            return Mode.FORWARD
        case _:
            return Mode.MXFP8


def _is_next(places: Mapping[str, Side], inner: int, outer: int) -> bool:
    """True if a step along axis ``inner`` is shorter than one along ``outer``."""
    strides = [side.stride for side in places.values() if side.stride[1]]
    return bool(strides) and 0 < strides[0][inner] < strides[0][outer]
