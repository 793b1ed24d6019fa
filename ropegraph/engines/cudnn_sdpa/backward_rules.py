"""The rules of the backward alone."""

from __future__ import annotations

from collections.abc import Iterator

from ropegraph.engines.cudnn_sdpa.facts import Facts
from ropegraph.engines.cudnn_sdpa.forward_rules import is_packed, multiplier
from ropegraph.engines.cudnn_sdpa.rules import Rule


def sizes(f: Facts) -> Iterator[str]:
    if f.s_q == 1 and f.s_kv == 1:
        yield "s_q = s_kv = 1 has no backward"


def head_dims(f: Facts) -> Iterator[str]:
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
    if f.major == 9 and f.since(91100) and f.before(91300) and is_mixed:
        if d_qk != 192 and d_v != 128:
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
    if f.is_ragged and f.major in (8, 12):
        yield f"a deterministic backward of ragged tensors on {f.device}"


def ragged(f: Facts) -> Iterator[str]:
    if not f.is_ragged:
        return
    h_q, h_k, h_v = f.heads
    if f.major in (8, 12) and f.value("stats").ragged_offset is not None:
        yield f"ragged stats on {f.device}; use [b, h, s, 1] beside ragged q, k, v"
    if f.before(90600) and (h_q != h_k or h_q != h_v):
        yield "ragged tensors with grouped heads need cuDNN 9.6 or newer"
    if f.has("sink_token") and f.before(92600):
        yield "ragged tensors with sink_token need cuDNN 9.26 or newer"
    if f.has("dBias") and f.major == 10:
        yield f"dBias of ragged tensors on {f.device}"


def bias(f: Facts) -> Iterator[str]:
    if not f.has("dBias"):
        return
    if f.before(90500) and f.attrs.padding:
        yield "dBias with padding needs cuDNN 9.5 or newer"
    if f.before(90500) and (f.s_q % 64 or f.s_kv % 64):
        yield f"dBias before cuDNN 9.5 needs s_q={f.s_q}, s_kv={f.s_kv} divisible by 64"


def stats_layout(f: Facts) -> Iterator[str]:
    if f.before(92600) and not is_packed(f.value("stats")):
        yield "stats must be packed [b, h, s, 1] before cuDNN 9.26"


BACKWARD: tuple[Rule, ...] = (
    sizes, head_dims, deterministic, ragged, bias, stats_layout, multiplier,
)  # fmt: skip
