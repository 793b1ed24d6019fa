"""The shapes of sdpa and its backward: q, k and v, the pages they may lie in, what stands by."""

from __future__ import annotations

from collections.abc import Mapping

from ropegraph.errors import GraphError
from ropegraph.ir.ops import Attention, Sdpa, SdpaBackward

Dim = tuple[int, ...]


def infer_attention(where: str, attrs: Sdpa, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """Dims of O and Stats.  Raises GraphError naming port, dims and what would fit."""
    out = _output(where, attrs, dims)
    return {"O": out, "Stats": (*out[:3], 1)}


def infer_attention_backward(
    where: str, attrs: SdpaBackward, dims: Mapping[str, Dim]
) -> dict[str, Dim]:
    """Dims of the gradients.  Raises GraphError naming port, dims and what would fit."""
    out = _output(where, attrs, dims)
    for port, wanted in (("o", out), ("dO", out), ("stats", (*out[:3], 1))):
        _exact(where, port, dims[port], wanted)
    grads = {"dQ": "q", "dK": "k", "dV": "v", "dBias": "bias", "dSink_token": "sink_token"}
    return {grad: dims[port] for grad, port in grads.items() if port in dims}


def _output(where: str, attrs: Attention, dims: Mapping[str, Dim]) -> Dim:
    """[b, h_q, s_q, d_v], all inputs checked."""
    _check_heads(where, dims)
    longest = attrs.max_seq_len_kv if isinstance(attrs, Sdpa) else None
    if longest is None:
        _check_sequences(where, dims)
    else:
        _check_pages(where, longest, dims)
    (b, h_q, s_q, _), k, v = dims["q"], dims["k"], dims["v"]
    _check_beside(where, dims, (b, h_q, s_q, k[2] if longest is None else longest))
    return (b, h_q, s_q, v[3])


def _check_heads(where: str, dims: Mapping[str, Dim]) -> None:
    """Rows that can be multiplied, and query heads in equal groups."""
    for port in ("q", "k", "v"):
        if len(dims[port]) != 4:
            # Five are what packing by groups leaves of Q until it is rotated.
            two_levels = (
                ": heads in two levels are rotated into a tensor of their own first, or packed one "
                "behind the other"
            )
            raise GraphError(
                f"{where}: {port} {list(dims[port])} has {len(dims[port])} dims; use [b, h, s, d]"
                f"{two_levels if len(dims[port]) == 5 else ''}"
            )
    q, k = dims["q"], dims["k"]
    if k[3] != q[3]:
        raise GraphError(
            f"{where}: k {list(k)} has d_qk={k[3]} but q {list(q)} has {q[3]}; "
            "they are multiplied, so both need one width"
        )
    h_q = q[1]
    for port in ("k", "v"):
        h = dims[port][1]
        if (h == 0) != (h_q == 0) or (h and h_q % h):
            raise GraphError(
                f"{where}: h_q={h_q} is not a multiple of the {h} heads of {port} "
                f"{list(dims[port])}; query heads share key heads in equal groups"
            )


def _check_sequences(where: str, dims: Mapping[str, Dim]) -> None:
    """Keys and values that lie in rows of their own."""
    q, k, v = dims["q"], dims["k"], dims["v"]
    if not q[0] == k[0] == v[0]:
        raise GraphError(
            f"{where}: the batch sizes of q {list(q)}, k {list(k)} and v {list(v)} differ; "
            "use one for all"
        )
    if v[2] != k[2]:
        raise GraphError(
            f"{where}: k {list(k)} has s_kv={k[2]} keys but v {list(v)} has {v[2]}; "
            "every key needs its value"
        )


def _check_pages(where: str, longest: int, dims: Mapping[str, Dim]) -> None:
    """Keys and values in pages: tables that lead to enough of them."""
    b = dims["q"][0]
    for port in ("k", "v"):
        table, pages = dims[f"paged_attention_{port}_table"], dims[port]
        if len(table) != 4 or (table[0], table[1], table[3]) != (b, 1, 1):
            raise GraphError(
                f"{where}: paged_attention_{port}_table {list(table)} must be "
                f"[{b}, 1, pages per sequence, 1]"
            )
        if table[2] * pages[2] < longest:
            raise GraphError(
                f"{where}: paged_attention_max_seq_len_kv={longest} is more than the {table[2]} "
                f"pages of {pages[2]} tokens that paged_attention_{port}_table holds"
            )


def _check_beside(where: str, dims: Mapping[str, Dim], logits: Dim) -> None:
    """What acts on the logits: bias, lengths, sink, numbers.  logits: [b, h_q, s_q, s_kv]."""
    b, h_q, _, _ = logits
    if "bias" in dims:
        bias = dims["bias"]
        if len(bias) != 4 or any(x not in (1, n) for x, n in zip(bias, logits, strict=True)):
            raise GraphError(
                f"{where}: bias {list(bias)} does not broadcast to the logits {list(logits)}; "
                "each axis must be as long, or 1"
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


def _exact(where: str, port: str, dim: Dim, wanted: Dim) -> None:
    if dim != wanted:
        raise GraphError(f"{where}: {port} is {list(dim)}; use {list(wanted)}")
