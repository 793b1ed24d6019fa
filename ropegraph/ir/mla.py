"""The shapes and data types of mla_kv_rope and its backward."""

from __future__ import annotations

from collections.abc import Mapping

from ropegraph.dtypes import DType, short
from ropegraph.errors import GraphError
from ropegraph.ir.ops import MlaKvRope, MlaKvRopeBackward

Dim = tuple[int, ...]

BLOCK = 32  # elements that share a scale
TABLES = (DType.BFLOAT16, DType.FLOAT)


def infer_mla(where: str, attrs: MlaKvRope, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """Dims of key and value, or of the eight MXFP8 outputs.

    Raises GraphError naming port, dims and what would fit.
    """
    kv, k_rope = _data(where, "kv", dims), _data(where, "k_rope", dims)
    b, h, s, width = kv
    if not 0 <= attrs.nope_dim <= width:
        raise GraphError(
            f"{where}: nope_dim={attrs.nope_dim} of the {width} channels of kv {list(kv)}; a head "
            f"of kv is nope_dim channels of the key and then those of the value, so use 0 to "
            f"{width}"
        )
    if k_rope[:3] != (b, 1, s):
        raise GraphError(
            f"{where}: k_rope {list(k_rope)} does not belong to kv {list(kv)}; all heads of a "
            f"token share one row, so use [{b}, 1, {s}, r]"
        )
    r = k_rope[3]
    if r % 2:
        raise GraphError(
            f"{where}: k_rope {list(k_rope)} has r={r} channels; a rotation acts on pairs of them, "
            "so use an even number"
        )
    _tables(where, dims, "k_rope", r, s)
    key, value = (b, h, s, attrs.nope_dim + r), (b, h, s, width - attrs.nope_dim)
    if attrs.quantize is None:
        return {"key": key, "value": value}
    return _mxfp8(where, "key", key, f"nope_dim + r = {key[3]}") | _mxfp8(
        where, "value", value, f"v_dim={value[3]}"
    )


def infer_mla_backward(
    where: str, attrs: MlaKvRopeBackward, dims: Mapping[str, Dim]
) -> dict[str, Dim]:
    """Dims of dKV and dK_rope.  Raises GraphError naming port, dims and what would fit."""
    given = [port for port in ("dKey", "dValue") if port in dims]
    if not given:
        raise GraphError(f"{where}: no gradient; give dKey, dValue or both")
    b, h, s, _ = _data(where, given[0], dims)
    r = _tables(where, dims, given[0], None, s)
    for port, width in (("dKey", attrs.nope_dim + r), ("dValue", attrs.v_dim)):
        if port in dims and dims[port] != (b, h, s, width):
            raise GraphError(
                f"{where}: {port} is {list(dims[port])}; with nope_dim={attrs.nope_dim}, "
                f"v_dim={attrs.v_dim} and tables {r} wide use {[b, h, s, width]}"
            )
    return {"dKV": (b, h, s, attrs.nope_dim + attrs.v_dim), "dK_rope": (b, 1, s, r)}


def check_mla_dtypes(
    where: str, attrs: MlaKvRope | MlaKvRopeBackward, dtypes: Mapping[str, DType]
) -> None:
    """Raise GraphError if a table, or data that is to be quantized, has a type without meaning."""
    if dtypes["cos"] not in TABLES:
        raise GraphError(
            f"{where}: cos and sin are {short(dtypes['cos'])}; use bf16 or fp32 for both"
        )
    if isinstance(attrs, MlaKvRope) and attrs.quantize and dtypes["kv"] is not DType.BFLOAT16:
        raise GraphError(
            f"{where}: kv is {short(dtypes['kv'])}, but quantize={attrs.quantize!r} takes bf16 kv "
            "and k_rope; cast them, or leave quantize out"
        )


def mxfp8_dtypes(port: str) -> tuple[DType, DType]:
    """The types that an MXFP8 output may have, the usual one first."""
    return (DType.FP8_E8M0 if port.endswith("_scale") else DType.FP8_E4M3, DType.UINT8)


def _mxfp8(where: str, side: str, dim: Dim, what: str) -> dict[str, Dim]:
    b, h, s, d = dim
    for n, extent, blocks in ((d, what, "channels"), (s, f"s={s}", "tokens")):
        if n % BLOCK:
            raise GraphError(
                f"{where}: {side} {list(dim)} has {extent}, no multiple of {BLOCK}; MXFP8 scales "
                f"blocks of {BLOCK} {blocks}, so pad to {n + -n % BLOCK} or leave quantize out"
            )
    return {
        f"{side}_row": dim,
        f"{side}_row_scale": (b, h, s, d // BLOCK),
        f"{side}_column": dim,
        f"{side}_column_scale": (b, h, s // BLOCK, d),
    }


def _data(where: str, port: str, dims: Mapping[str, Dim]) -> Dim:
    if len(dims[port]) != 4:
        raise GraphError(
            f"{where}: {port} {list(dims[port])} has {len(dims[port])} dims; use [b, h, s, d], "
            "with the strides of whatever order the memory has"
        )
    return dims[port]


def _tables(where: str, dims: Mapping[str, Dim], port: str, r: int | None, s: int) -> int:
    """The width of cos and sin, which must be r where that is known."""
    cos, sin = dims["cos"], dims["sin"]
    if cos != sin:
        raise GraphError(
            f"{where}: cos {list(cos)} and sin {list(sin)} differ; use two tables of one shape"
        )
    if len(cos) != 4 or cos[1:3] != (1, 1) or (r is not None and cos[3] != r):
        raise GraphError(
            f"{where}: cos {list(cos)} is no table for {port} {list(dims[port])}; use "
            f"[s_max, 1, 1, {'r' if r is None else r}], a column for each channel that is written"
        )
    if cos[3] % 2:
        raise GraphError(f"{where}: cos {list(cos)} is {cos[3]} wide; use an even width")
    if cos[0] < s:
        raise GraphError(
            f"{where}: cos {list(cos)} has {cos[0]} rows for {s} tokens, row t for token t; use at "
            f"least {s}"
        )
    return cos[3]
