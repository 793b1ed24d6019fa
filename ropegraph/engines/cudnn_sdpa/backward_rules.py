"""The rules of the backward alone."""

from __future__ import annotations

from collections.abc import Iterator

from ropegraph.dtypes import short
from ropegraph.engines.cudnn_sdpa.facts import Facts
from ropegraph.engines.cudnn_sdpa.forward_rules import is_packed
from ropegraph.engines.cudnn_sdpa.rules import Rule


def sizes(f: Facts) -> Iterator[str]:
    """At least one row or one key more than a single pair."""
    if f.s_q == 1 and f.s_kv == 1:
        yield "s_q = s_kv = 1 has no backward"


def head_dims(f: Facts) -> Iterator[str]:
    """By architecture; FE leaves none of these to the heuristics."""
    if not f.major:
        return
    d_qk, d_v = f.d_qk, f.d_v
    if f.major == 10 and f.since(91100):
        yield from _head_dims_sm100(f)
        return
    cap = 256 if f.major == 9 else 128
    for name, d in (("d_qk", d_qk), ("d_v", d_v)):
        if d > cap:
            yield f"{name}={d} is above {cap}, the most for a backward on {f.device}"
    is_mixed = 128 < d_qk <= 192 and 64 < d_v <= 128
    is_early = f.major == 9 and f.since(91100) and f.before(91300)
    if is_early and is_mixed and d_qk != 192 and d_v != 128:
        yield f"d_qk={d_qk} with d_v={d_v} in {f.cudnn_name}; of that kind it has 192 with 128"


def _head_dims_sm100(f: Facts) -> Iterator[str]:
    d_qk, d_v = f.d_qk, f.d_v
    if d_qk == 192:
        if d_v != 128:
            yield f"d_qk=192 needs d_v=128, this is {d_v}"
    elif (d_qk, d_v) == (256, 256) and f.since(92300):
        pass
    elif max(d_qk, d_v) > 128:
        yield f"d_qk={d_qk}, d_v={d_v}; a backward on {f.device} takes up to 128, or 192 with 128"


def deterministic(f: Facts) -> Iterator[str]:
    """Where two runs can give the same bits."""
    # On sm_100 head dims of 256 exist in the deterministic form only.
    forced = f.major == 10 and (f.d_qk, f.d_v) == (256, 256)
    if not f.is_deterministic and not forced:
        return
    if f.major == 10:
        if f.before(91800):
            yield f"a deterministic backward on {f.device} needs cuDNN 9.18 or newer"
        for word, present in (
            ("dBias", f.has("dBias")),
            ("dropout", f.has_dropout),
            ("ALiBi", f.attrs.alibi),
        ):
            if present:
                yield f"a deterministic backward on {f.device} together with {word}"


def sequences(f: Facts) -> Iterator[str]:
    """Padded or ragged tensors; the first are recorded as the second."""
    if not f.is_sequential:
        return
    h_q, h_k, h_v = f.heads
    if f.is_deterministic and f.major in (8, 12):
        yield f"a deterministic backward with padding on {f.device}"
    if f.major in (8, 12) and f.value("stats").ragged_offset is not None:
        yield f"ragged stats on {f.device}; use [b, h, s, 1] beside ragged q, k, v"
    if f.before(90600) and (h_q != h_k or h_q != h_v):
        yield "padding with grouped heads needs cuDNN 9.6 or newer"
    if f.has("sink_token") and f.before(92600):
        yield f"padding with sink_token needs cuDNN 9.26 or newer, this is {f.cudnn_name}"
    if f.has("dBias") and f.major == 10:
        yield f"dBias with padding on {f.device}"


def bias(f: Facts) -> Iterator[str]:
    """Whole biases only; dBias in the type of q."""
    if not f.has("bias"):
        return
    given = f.value("bias")
    if given.dim[2:] != (f.s_q, f.s_kv):
        # Measured on sm_90 with 9.19: dQ, dK, dV are wrong where rows share a bias, dBias where
        # rows or keys do.
        yield (
            f"bias {list(given.dim)} repeats along rows or keys [{f.s_q}, {f.s_kv}], "
            "where cuDNN's backward is wrong"
        )
    if not f.has("dBias"):
        return
    for port in ("bias", "dBias"):
        if f.value(port).dtype is not f.value("q").dtype:
            yield f"{port} is {short(f.value(port).dtype)}; dBias needs the type of q for both"
    if f.before(90500) and (f.s_q % 64 or f.s_kv % 64):
        yield f"dBias before cuDNN 9.5 needs s_q={f.s_q}, s_kv={f.s_kv} divisible by 64"


def stats_layout(f: Facts) -> Iterator[str]:
    """Packed before 9.26."""
    if f.before(92600) and not is_packed(f.value("stats")):
        yield "stats must be packed [b, h, s, 1] before cuDNN 9.26"


BACKWARD: tuple[Rule, ...] = (
    sizes, head_dims, deterministic, sequences, bias, stats_layout,
)  # fmt: skip
