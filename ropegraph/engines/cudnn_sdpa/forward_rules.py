"""The rules of the forward alone."""

from __future__ import annotations

from collections.abc import Iterator

from ropegraph.engines.cudnn_sdpa.facts import Facts
from ropegraph.engines.cudnn_sdpa.rules import Rule
from ropegraph.ir.graph import Value


def head_dims(f: Facts) -> Iterator[str]:
    """The cap of older releases, by architecture."""
    cap = 0
    if f.major == 8 and f.before(90901):
        cap = 128
    elif f.major == 9 and f.before(90901):
        cap = 256
    elif f.major == 10 and f.before(90900):
        cap = 128
    for name, d in (("d_qk", f.d_qk), ("d_v", f.d_v)):
        if cap and d > cap:
            yield f"{name}={d} is above {cap}, the most for {f.device} in {f.cudnn_name}"


def decode(f: Facts) -> Iterator[str]:
    """One row a sequence."""
    if f.s_q != 1:
        return
    if f.has("sink_token"):
        yield "sink_token with s_q=1"
    if f.before(90901) and f.attrs.right_bound is not None:
        yield "s_q=1 with a right bound needs a cuDNN newer than 9.9"
    if f.before(90901) and f.major == 10 and max(f.d_qk, f.d_v) > 128:
        yield f"s_q=1 with head dims above 128 on {f.device} needs a cuDNN newer than 9.9"


def paging(f: Facts) -> Iterator[str]:
    """In decoding only."""
    if not f.is_paged:
        return
    if f.s_q != 1:
        # Measured on sm_90 with 9.19: NaN in the rest of a page reaches O, except in decoding.
        yield f"paged k and v with s_q={f.s_q}: past seq_len_kv a page leaks unless s_q=1"
    if not f.attrs.padding:
        yield "paged k and v need padding with seq_len_q and seq_len_kv"
    if f.before(90901) and max(f.d_qk, f.d_v) > 128:
        yield "paged k and v with head dims above 128 need a cuDNN newer than 9.9"
    if f.before(90700):
        yield "paged k and v beside padded or ragged q need cuDNN 9.7 or newer"


def stats_layout(f: Facts) -> Iterator[str]:
    """Packed before 9.12."""
    if f.has("Stats") and f.before(91200) and not is_packed(f.value("Stats")):
        yield "Stats must be packed [b, h, s, 1] before cuDNN 9.12"


def is_packed(value: Value) -> bool:
    """True for a dense row-major tensor; an axis of length 1 may have any stride."""
    if value.ragged_offset is not None:
        return True
    expected = 1
    for n, stride in zip(reversed(value.dim), reversed(value.stride), strict=True):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


FORWARD: tuple[Rule, ...] = (head_dims, decode, paging, stats_layout)
