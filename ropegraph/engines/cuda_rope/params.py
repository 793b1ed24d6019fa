"""The parameter block of rope.cu, packed once; what changes from call to call is patched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ropegraph.engines.cuda_rope.block import WORD, Pointer, magic
from ropegraph.engines.cuda_rope.job import Job, Table
from ropegraph.engines.cuda_rope.shape import Cut, Grid, Shape, Split, alignment

MOST_JOBS = 3
_POINTER, _I64, _I32, _F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

# The same fields in the same order as struct Job and struct Params of rope.cu.
_JOB: list[tuple[str, type]] = [
    ("x", _POINTER), ("y", _POINTER),
    ("angles", _POINTER),
    ("angle_b", _I64), ("angle_s", _I64), ("angle_pair", _I64), ("angle_second", _I64),
    ("sines", _POINTER),
    ("sine_b", _I64), ("sine_s", _I64), ("sine_pair", _I64), ("sine_second", _I64),
    ("sine_offset", _I64), ("table_rows", _I64),
    ("ids", _POINTER), ("id_b", _I64), ("id_s", _I64),
    ("offsets", _POINTER),
    ("multiplier", _I64), ("offset_limit", _I64), ("x_room", _I64), ("y_room", _I64),
    ("token_magic", ctypes.c_uint64), ("flag", _POINTER),
    ("x_b", _I64), ("x_h", _I64), ("x_s", _I64), ("x_d", _I64),
    ("y_b", _I64), ("y_h", _I64), ("y_s", _I64), ("y_d", _I64),
    ("x_g", _I64), ("y_g", _I64), ("group_magic", ctypes.c_uint64),
    ("cache_at", _POINTER), ("cache_b", _I64), ("cache_last", _I64),
    ("cp_size", _I32), ("cp_rank", _I32),
    ("batch", _I32), ("heads", _I32), ("rows", _I32), ("dim", _I32),
    ("tokens", _I32), ("begin", _I32), ("pairs", _I32), ("part_heads", _I32),
    ("turn_lanes", _I32), ("turn_log_tokens", _I32), ("turn_heads", _I32), ("turn_magic", _I32),
    ("pass_lanes", _I32), ("pass_log_tokens", _I32), ("pass_heads", _I32), ("pass_magic", _I32),
    ("adjoint", _I32), ("sign", _F32), ("factor", _F32), ("scale", _F32),
]  # fmt: skip


class JobParams(ctypes.Structure):
    """struct Job."""

    _fields_ = _JOB


class Params(ctypes.Structure):
    """struct Params.  A kernel that writes into no cache does not have the third job."""

    _fields_ = [
        ("parts_magic", ctypes.c_uint64),
        ("parts", _I32),
        ("first_parts", _I32),
        ("both_parts", _I32),
        ("warps_s", _I32),
        ("log_group", _I32),
        ("unused", _I32),
        ("jobs", JobParams * MOST_JOBS),
    ]


def job_word(nth: int, field: str) -> int:
    """The word of a field of job ``nth``."""
    place = Params.jobs.offset + nth * ctypes.sizeof(JobParams)
    return (place + getattr(JobParams, field).offset) // WORD


def pointers_of(jobs: Sequence[Job], vec: int) -> tuple[Pointer, ...]:
    """Every address that a call has to fill in."""
    found: list[Pointer] = []
    for nth, job in enumerate(jobs):
        found += (
            Pointer(job_word(nth, "x"), job.x.slot, alignment(job.x, vec) - 1),
            Pointer(job_word(nth, "y"), job.y.slot, alignment(job.y, vec) - 1),
        )
        others = {
            "angles": job.angles, "sines": job.sines, "ids": job.positions,
            "offsets": job.offsets, "cache_at": job.cache,
        }  # fmt: skip
        found += (
            Pointer(job_word(nth, field), tensor.slot)
            for field, tensor in others.items()
            if tensor is not None
        )
    return tuple(found)


def packed(jobs: Sequence[Job], shape: Shape, grid: Grid, flag: int = 0) -> Params:
    """The block, with every address but that of the flag 0."""
    params = Params()
    for job, cut, target in zip(jobs, shape.cuts, params.jobs, strict=False):
        _pack(target, job, cut)
        target.flag = flag
    params.parts, params.first_parts = shape.parts, shape.cuts[0].parts
    params.both_parts = sum(cut.parts for cut in shape.cuts[:2])
    params.parts_magic = magic(shape.parts)
    params.warps_s, params.log_group = grid.warps_s, grid.log_group
    return params


def _pack(to: JobParams, job: Job, cut: Cut) -> None:
    to.x_b, to.x_h, to.x_s, to.x_d = job.x.stride
    to.y_b, to.y_h, to.y_s, to.y_d = job.y.stride
    to.x_g, to.y_g, to.group_magic = job.x.group, job.y.group, magic(job.group_heads)
    if job.cache is not None:
        to.cache_b, to.cache_last = job.cache.batch, job.cache.last
    if job.angles is not None:
        to.angle_b, to.angle_s, to.angle_pair, to.angle_second = _steps(job.angles)
    if job.sines is not None:
        to.sine_b, to.sine_s, to.sine_pair, to.sine_second = _steps(job.sines)
        to.sine_offset = job.sines.offset
    to.table_rows = job.rows
    if job.positions is not None:
        to.id_b, to.id_s = job.positions.batch, job.positions.row
    to.batch, to.heads, to.rows, to.dim = job.dim
    if job.offsets is not None:
        to.batch, to.multiplier = job.offsets.count, job.offsets.multiplier
        to.token_magic = magic(job.x.stride[2])
    if job.kind.sequences == "packed":
        to.token_magic, to.offset_limit = magic(job.cp_size), job.dim[2] * job.cp_size
    to.cp_size, to.cp_rank = job.cp_size, job.cp_rank
    to.tokens = job.dim[2]
    to.begin, to.pairs = job.begin, job.pairs
    to.part_heads = cut.part_heads
    to.turn_lanes, to.turn_log_tokens, to.turn_heads, to.turn_magic = _numbers(cut.turn)
    to.pass_lanes, to.pass_log_tokens, to.pass_heads, to.pass_magic = _numbers(cut.others)
    to.adjoint, to.sign = int(job.is_adjoint), job.sign
    to.factor, to.scale = job.factor, job.scale


def _steps(table: Table) -> tuple[int, int, int, int]:
    return table.batch, table.row, table.pair, table.second


def _numbers(split: Split) -> tuple[int, int, int, int]:
    return split.lanes, split.log_tokens, split.heads, split.magic
