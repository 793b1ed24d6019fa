"""The parameter block of rope.cu, packed once; what changes from call to call is patched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ropegraph.engines.cuda_rope.job import Job
from ropegraph.engines.cuda_rope.shape import Shape, alignment

_POINTER, _I64, _I32, _F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

# The same fields in the same order as struct Job and struct Params of rope.cu.
_JOB: list[tuple[str, type]] = [
    ("x", _POINTER), ("y", _POINTER), ("angles", _POINTER), ("offsets", _POINTER),
    ("multiplier", _I64), ("x_room", _I64), ("y_room", _I64),
    ("x_b", _I64), ("x_h", _I64), ("x_s", _I64), ("x_d", _I64),
    ("y_b", _I64), ("y_h", _I64), ("y_s", _I64), ("y_d", _I64),
    ("angle_b", _I64), ("angle_s", _I64), ("angle_pair", _I64), ("angle_second", _I64),
    ("batch", _I32), ("heads", _I32), ("rows", _I32), ("dim", _I32),
    ("tokens", _I32), ("begin", _I32), ("pairs", _I32), ("unit_heads", _I32), ("units", _I32),
    ("adjoint", _I32), ("sign", _F32), ("factor", _F32), ("scale", _F32), ("unused", _I32),
]  # fmt: skip


class JobParams(ctypes.Structure):
    """struct Job."""

    _fields_ = _JOB


class Params(ctypes.Structure):
    """struct Params."""

    _fields_ = [
        ("first", JobParams),
        ("second", JobParams),
        ("flag", _POINTER),
        ("parts", _I32),
        ("first_parts", _I32),
        ("part_units", _I32),
        ("warps_s", _I32),
    ]


WORD = 8  # pointers and strides are words of 8 bytes; a patch names the word


@dataclass(frozen=True)
class Pointer:
    """A word of the block that holds the address of the tensor in ``slot``.

    mask: bits of the address that must be 0 for the vector kernel.
    """

    word: int
    slot: int
    mask: int


def job_word(nth: int, field: str) -> int:
    """The word of a field of job ``nth``."""
    return (nth * ctypes.sizeof(JobParams) + getattr(JobParams, field).offset) // WORD


FLAG = Params.flag.offset // WORD


def pointers_of(jobs: Sequence[Job], vec: int) -> tuple[Pointer, ...]:
    """Every address that a call has to fill in."""
    found: list[Pointer] = []
    for nth, job in enumerate(jobs):
        found += (
            Pointer(job_word(nth, "x"), job.x.slot, alignment(job.x, vec) - 1),
            Pointer(job_word(nth, "y"), job.y.slot, alignment(job.y, vec) - 1),
            Pointer(job_word(nth, "angles"), job.angles.slot, 0),
        )
        if job.offsets is not None:
            found.append(Pointer(job_word(nth, "offsets"), job.offsets.slot, 0))
    return tuple(found)


def packed(jobs: Sequence[Job], shape: Shape, warps_s: int) -> bytes:
    """The block, with every address 0."""
    params = Params()
    for nth, (job, target) in enumerate(zip(jobs, (params.first, params.second), strict=False)):
        _pack(target, job, shape.unit_heads[nth], shape.units[nth])
    params.parts, params.first_parts = shape.parts, shape.first_parts
    params.part_units, params.warps_s = shape.part_units, warps_s
    return bytes(params)


def _pack(to: JobParams, job: Job, unit_heads: int, units: int) -> None:
    to.x_b, to.x_h, to.x_s, to.x_d = job.x.stride
    to.y_b, to.y_h, to.y_s, to.y_d = job.y.stride
    to.angle_b, to.angle_s = job.angles.batch, job.angles.row
    to.angle_pair, to.angle_second = job.angles.pair, job.angles.second
    to.multiplier = 1 if job.offsets is None else job.offsets.multiplier
    to.batch, to.heads, to.rows, to.dim = job.dim
    to.tokens = job.dim[2]
    to.begin, to.pairs = job.begin, job.pairs
    to.unit_heads, to.units = unit_heads, units
    to.adjoint, to.sign = int(job.is_adjoint), job.sign
    to.factor, to.scale = job.factor, job.scale
