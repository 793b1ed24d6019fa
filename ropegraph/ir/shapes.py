"""Output dims of each operation, and the shape rules of its inputs.

Used when a node is recorded and again after every pass: the messages name node, port and value.
"""

from __future__ import annotations

from collections.abc import Mapping

from ropegraph.errors import GraphError
from ropegraph.ir.cache import written_cache
from ropegraph.ir.graph import merged_ports
from ropegraph.ir.mla import infer_mla, infer_mla_backward
from ropegraph.ir.norm import infer_norm, infer_norm_backward, infer_norm_rope
from ropegraph.ir.ops import (
    Attention,
    CacheWrite,
    JoinQkv,
    Matmul,
    MlaKvRope,
    MlaKvRopeBackward,
    NormRope,
    NormRopeBackward,
    NormRopePair,
    Op,
    RmsNorm,
    RmsNormBackward,
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    RopePair,
    Scale,
    Sdpa,
    SdpaBackward,
    SplitQkv,
    Sum,
    op_name,
)
from ropegraph.ir.packed import packed_dim, parts_of
from ropegraph.ir.rotation_shapes import check_rotation, written_dim

Dim = tuple[int, ...]


def infer(name: str, attrs: Op, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """Dims of every output port of a node, from the dims at its input ports.

    Raises GraphError naming the node, the port, its dims and what would fit.
    """
    where = f"{op_name(attrs)} {name!r}"
    match attrs:
        case Rope():
            check_rotation(where, attrs, "input", dims)
            if "cache" in dims:
                return {"output": written_cache(where, "input", dims)}
            return {"output": written_dim(where, attrs, "input", dims["input"])}
        case RopeBackward():
            check_rotation(where, attrs, "dY", dims)
            return {"dX": written_dim(where, attrs, "dY", dims["dY"])}
        case RopeFreqsGrad():
            check_rotation(where, attrs, "input", dims)
            written = written_dim(where, attrs, "input", dims["input"])
            _same(where, "dY", dims["dY"], "input", written)
            return {"dfreqs": dims["freqs"]}
        case CacheWrite():
            return {"output": written_cache(where, "input", dims)}
        case RopePair(parts) | NormRopePair(parts):
            outputs: dict[str, Dim] = {}
            for i, part in enumerate(parts):
                own = infer(name, part, merged_ports(dims, i))
                outputs |= {f"{port}{i}": dim for port, dim in own.items()}
            return outputs
        case Sdpa():
            b, h_q, s_q, d_v = _attention(where, attrs, dims)
            return {"O": (b, h_q, s_q, d_v), "Stats": (b, h_q, s_q, 1)}
        case SdpaBackward():
            b, h_q, s_q, d_v = _attention(where, attrs, dims)
            _exact(where, "o", dims["o"], (b, h_q, s_q, d_v))
            _exact(where, "dO", dims["dO"], (b, h_q, s_q, d_v))
            _exact(where, "stats", dims["stats"], (b, h_q, s_q, 1))
            grads = {"dQ": dims["q"], "dK": dims["k"], "dV": dims["v"]}
            if "bias" in dims:
                grads["dBias"] = dims["bias"]
            if "sink_token" in dims:
                grads["dSink_token"] = dims["sink_token"]
            return grads
        case Scale():
            return {"output": dims["input"]}
        case Sum():
            first = dims["0"]
            for port, dim in dims.items():
                _same(where, port, dim, "0", first)
            return {"output": first}
        case Matmul():
            return {"C": _matmul(where, attrs, dims["A"], dims["B"])}
        case SplitQkv():
            return parts_of(where, attrs, dims["qkv"])
        case JoinQkv():
            return {"qkv": packed_dim(where, attrs, dims)}
        case MlaKvRope():
            return infer_mla(where, attrs, dims)
        case MlaKvRopeBackward():
            return infer_mla_backward(where, attrs, dims)
        case RmsNorm():
            return infer_norm(where, dims)
        case RmsNormBackward():
            return infer_norm_backward(where, dims)
        case NormRope() | NormRopeBackward():
            return infer_norm_rope(where, attrs, dims)


def _matmul(where: str, attrs: Matmul, a: Dim, b: Dim) -> Dim:
    for port, dim in (("A", a), ("B", b)):
        if len(dim) != 3:
            raise GraphError(
                f"{where}: {port} {list(dim)} has {len(dim)} dims; use [b, rows, columns]"
            )
    m, k = a[:0:-1] if attrs.transpose_A else a[1:]
    rows, n = b[:0:-1] if attrs.transpose_B else b[1:]
    if k != rows:
        raise GraphError(
            f"{where}: A {list(a)} has {k} columns, but B {list(b)} has {rows} rows; "
            "they are multiplied, so both need one number"
        )
    if a[0] != b[0] and 1 not in (a[0], b[0]):
        raise GraphError(
            f"{where}: A {list(a)} and B {list(b)} have batches of {a[0]} and {b[0]}; use one for "
            "both, or 1 for one of them"
        )
    batch = b[0] if a[0] == 1 else a[0]
    return (1 if attrs.sum_batch else batch, m, n)


def _attention(where: str, attrs: Attention, dims: Mapping[str, Dim]) -> Dim:
    q, k, v = dims["q"], dims["k"], dims["v"]
    for port in ("q", "k", "v"):
        _rank4(where, port, dims[port])
    (b, h_q, s_q, d_qk), (b_k, h_k, s_kv, _), (b_v, h_v, s_v, d_v) = q, k, v
    if k[3] != d_qk:
        raise GraphError(
            f"{where}: k {list(k)} has d_qk={k[3]} but q {list(q)} has {d_qk}; "
            "they are multiplied, so both need one width"
        )
    for port, h in (("k", h_k), ("v", h_v)):
        if (h == 0) != (h_q == 0) or (h and h_q % h):
            raise GraphError(
                f"{where}: h_q={h_q} is not a multiple of the {h} heads of {port} "
                f"{list(dims[port])}; query heads share key heads in equal groups"
            )
    longest = attrs.max_seq_len_kv if isinstance(attrs, Sdpa) else None
    if longest is not None:
        s_kv = longest
        for port, pages in (("k", k), ("v", v)):
            table = dims[f"paged_attention_{port}_table"]
            if len(table) != 4 or table[0] != b or table[1] != 1 or table[3] != 1:
                raise GraphError(
                    f"{where}: paged_attention_{port}_table {list(table)} must be "
                    f"[{b}, 1, pages per sequence, 1]"
                )
            if table[2] * pages[2] < s_kv:
                raise GraphError(
                    f"{where}: paged_attention_max_seq_len_kv={s_kv} is more than the {table[2]} "
                    f"pages of {pages[2]} tokens that paged_attention_{port}_table holds"
                )
    else:
        if b_k != b or b_v != b:
            raise GraphError(
                f"{where}: the batch sizes of q {list(q)}, k {list(k)} and v {list(v)} differ; "
                "use one for all"
            )
        if s_v != s_kv:
            raise GraphError(
                f"{where}: k {list(k)} has s_kv={s_kv} keys but v {list(v)} has {s_v}; "
                "every key needs its value"
            )
    if "bias" in dims:
        bias = dims["bias"]
        fits = len(bias) == 4 and all(
            x in (1, full) for x, full in zip(bias, (b, h_q, s_q, s_kv), strict=True)
        )
        if not fits:
            raise GraphError(
                f"{where}: bias {list(bias)} does not broadcast to the logits "
                f"[{b}, {h_q}, {s_q}, {s_kv}]; each axis must be as long, or 1"
            )
    for port in ("seq_len_q", "seq_len_kv"):
        if port in dims:
            _exact(where, port, dims[port], (b, 1, 1, 1))
    if "sink_token" in dims:
        _exact(where, "sink_token", dims["sink_token"], (1, h_q, 1, 1))
    for port in ("attn_scale", "seed", "offset"):
        if port in dims and any(x != 1 for x in dims[port]):
            raise GraphError(
                f"{where}: {port} {list(dims[port])} must hold one number: [1, 1, 1, 1]"
            )
    return (b, h_q, s_q, d_v)


def _rank4(where: str, port: str, dim: Dim) -> None:
    if len(dim) != 4:
        raise GraphError(f"{where}: {port} {list(dim)} has {len(dim)} dims; use [b, h, s, d]")


def _same(where: str, port: str, dim: Dim, other: str, wanted: Dim) -> None:
    if dim != wanted:
        raise GraphError(f"{where}: {port} {list(dim)} differs from {other} {list(wanted)}")


def _exact(where: str, port: str, dim: Dim, wanted: Dim) -> None:
    if dim != wanted:
        raise GraphError(f"{where}: {port} is {list(dim)}; use {list(wanted)}")
