"""Output dims of each operation, and the shape rules of its inputs.

Used when a node is recorded and again after every pass: the messages name node, port and value.
"""

from __future__ import annotations

from collections.abc import Mapping

from ropegraph.errors import GraphError
from ropegraph.ir.attention import infer_attention, infer_attention_backward
from ropegraph.ir.cache import written_cache
from ropegraph.ir.graph import merged_ports
from ropegraph.ir.mla import infer_mla, infer_mla_backward
from ropegraph.ir.norm import infer_norm, infer_norm_backward, infer_norm_rope
from ropegraph.ir.ops import (
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
            return infer_attention(where, attrs, dims)
        case SdpaBackward():
            return infer_attention_backward(where, attrs, dims)
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


def _same(where: str, port: str, dim: Dim, other: str, wanted: Dim) -> None:
    if dim != wanted:
        raise GraphError(f"{where}: {port} {list(dim)} differs from {other} {list(wanted)}")
