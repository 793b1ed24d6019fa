"""Data types at the ports of each operation: what is allowed, what is assumed, what comes out."""

from __future__ import annotations

from collections.abc import Mapping

from ropegraph.dtypes import FLOATS, INDEX, DType, short, wider
from ropegraph.errors import GraphError
from ropegraph.ir.mla import check_mla_dtypes, mxfp8_dtypes
from ropegraph.ir.norm import check_norm_dtypes
from ropegraph.ir.ops import (
    MXFP8_PORTS,
    POSITION_PORTS,
    MlaKvRope,
    MlaKvRopeBackward,
    Norm,
    Op,
    Pair,
    RmsNormBackward,
    SdpaBackward,
    op_name,
)

# Ports that carry something else than the data type of the graph: what is assumed, what is allowed.
_INTEGER = (
    "seq_len_q", "seq_len_kv", "seed", "offset", "ragged_offset",
    "paged_attention_k_table", "paged_attention_v_table", *POSITION_PORTS,
    "cache_positions",
)  # fmt: skip
_SINGLE = ("freqs", "inv_freq", "sink_token", "stats", "inv_variance")
_TABLES = ("cos", "sin", "cos_sin")
_SAME_AS_FIRST = ("q", "k", "v", "o", "dO", "dY", "k_rope", "dValue", "B")


def default_dtype(port: str, io: DType, first: DType) -> DType:
    """The type of an input that declares none. first: the type at the node's first port."""
    if port in _INTEGER:
        return DType.INT32
    if port in ("stats", "sink_token", "attn_scale", "inv_variance"):
        return wider(first)
    if port in (*_SINGLE, *_TABLES) or port.startswith("score_mod."):
        return DType.FLOAT
    return io


def check_dtypes(name: str, attrs: Op, dtypes: Mapping[str, DType]) -> None:
    """Raise GraphError naming node, port and type if an input has a type the op cannot read."""
    where = f"{op_name(attrs)} {name!r}"
    if isinstance(attrs, Pair):
        return
    first_port, first = next(iter(dtypes.items()))
    for port, dtype in dtypes.items():
        if port in _INTEGER:
            allowed = INDEX
        elif port in _SINGLE:
            allowed = (DType.FLOAT, DType.DOUBLE)
        else:
            allowed = FLOATS
        if port.startswith("score_mod."):
            allowed = (*FLOATS, *INDEX, DType.BOOLEAN)
        if dtype not in allowed:
            raise GraphError(
                f"{where}: {port} is {short(dtype)}; use {', '.join(map(short, allowed))}"
            )
        if port in _SAME_AS_FIRST and dtype is not first:
            raise GraphError(
                f"{where}: {port} is {short(dtype)} but {first_port} is {short(first)}; "
                "both must have one data type"
            )
    if getattr(attrs, "numerics", "fp32") == "nemo" and first is DType.DOUBLE:
        raise GraphError(
            f"{where}: numerics='nemo' rounds an fma in fp32, but {first_port} is fp64; use fp16, "
            "bf16 or fp32"
        )
    if "cos" in dtypes and dtypes["cos"] is not dtypes["sin"]:
        raise GraphError(
            f"{where}: cos is {short(dtypes['cos'])} but sin is {short(dtypes['sin'])}; "
            "both must have one data type"
        )
    if isinstance(attrs, (MlaKvRope, MlaKvRopeBackward)):
        check_mla_dtypes(where, attrs, dtypes)
    if isinstance(attrs, Norm):
        check_norm_dtypes(where, dtypes)


def output_dtype(attrs: Op, port: str, dtypes: Mapping[str, DType]) -> DType:
    """The type of an output that declares none: that of the data, or fp32 / fp64 for statistics."""
    first = next(iter(dtypes.values()))
    if "cache" in dtypes:
        return dtypes["cache"]
    if port in ("Stats", "inv_variance"):
        return wider(first)
    if isinstance(attrs, RmsNormBackward):
        return dtypes["input" if port == "DX" else "scale"]
    if isinstance(attrs, SdpaBackward) and port in ("dBias", "dSink_token"):
        return dtypes["bias" if port == "dBias" else "sink_token"]
    if port == "dfreqs":
        return dtypes["freqs"]
    return mxfp8_dtypes(port)[0] if port in MXFP8_PORTS else first


def output_dtypes(port: str) -> tuple[DType, ...]:
    """The types that an output may be declared as: any floating one, but for MXFP8."""
    return mxfp8_dtypes(port) if port in MXFP8_PORTS else FLOATS
