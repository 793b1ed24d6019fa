"""The rules that forward and backward share. Each yields one sentence for each way it is broken.

Sources: the support surface of cuDNN Frontend 1.32 (sdpa_support_surface.h and the backward node),
and what this package promises beyond it. A rule about versions is silent where there is no cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ropegraph.dtypes import DType, short
from ropegraph.engines.cudnn_sdpa.facts import OPERANDS, Facts, version_name

Rule = Callable[[Facts], Iterator[str]]
ALIGNMENT_BYTES = 16


def machine(f: Facts) -> Iterator[str]:
    if f.device.type != "cuda":
        yield f"needs a CUDA device, this is {f.device}"
        return
    if f.device.sm < 80:
        yield f"needs sm_80 or newer, this is {f.device}"
    if not f.device.cudnn:
        yield "needs cuDNN and nvidia-cudnn-frontend, which are not both installed"
    if f.before(90000):
        yield f"needs cuDNN 9.0 or newer, this is {version_name(f.device.cudnn)}"
    if f.device.cudnn in (91000, 91001):
        yield f"{f.cudnn_name} computes attention wrongly; 9.10.2 mends it"


def data_types(f: Facts) -> Iterator[str]:
    io = f.value("q").dtype
    if io not in (DType.HALF, DType.BFLOAT16):
        yield f"q is {short(io)}; cuDNN's attention reads fp16 and bf16"
    for port, value in f.present(OPERANDS):
        if value.dtype is not io:
            yield f"{port} is {short(value.dtype)} but q is {short(io)}; cuDNN wants one type"
    for port, value in f.present(("stats", "Stats", "sink_token", "dSink_token")):
        if value.dtype is not DType.FLOAT:
            yield f"{port} is {short(value.dtype)}; cuDNN holds it in fp32"
    tables = ("paged_attention_k_table", "paged_attention_v_table")
    for port, value in f.present(("seq_len_q", "seq_len_kv", *tables)):
        if value.dtype is not DType.INT32:
            yield f"{port} is {short(value.dtype)}; cuDNN reads int32"
    for port, value in f.present(("bias", "dBias")):
        if value.dtype not in (io, DType.FLOAT):
            yield f"{port} is {short(value.dtype)}; cuDNN takes {short(io)} or fp32"
    if f.attrs.compute is DType.DOUBLE:
        yield "it is to be computed in fp64; cuDNN computes in fp32"


def sizes(f: Facts) -> Iterator[str]:
    for port, value in f.present(("q", "k", "v")):
        if 0 in value.dim:
            yield f"{port} {list(value.dim)} is empty"
    for name, d in (("d_qk", f.d_qk), ("d_v", f.d_v)):
        if d % 8:
            yield f"{name}={d} is not a multiple of 8"
    h_q, h_k, h_v = f.heads
    for port, h in (("k", h_k), ("v", h_v)):
        if h and h_q % h:
            yield f"h_q={h_q} is not a multiple of the {h} heads of {port}"


def layout(f: Facts) -> Iterator[str]:
    for port, value in f.present((*OPERANDS, "bias", "dBias")):
        if value.dim[3] > 1 and value.stride[3] != 1:
            yield f"{port} has stride {value.stride[3]} along its last axis; cuDNN wants 1"
    for port, value in f.present(OPERANDS):
        for axis in range(3):
            step = value.stride[axis] * value.dtype.itemsize
            if value.dim[axis] > 1 and step % ALIGNMENT_BYTES:
                yield (
                    f"{port} has stride {value.stride[axis]} along axis {axis}: {step} bytes, "
                    f"not a multiple of {ALIGNMENT_BYTES}"
                )
    for port, value in f.present(("seq_len_q", "seq_len_kv")):
        if value.dim[0] > 1 and value.stride[0] != 1:
            yield f"{port} has stride {value.stride[0]}; cuDNN reads lengths side by side"
    for port, value in f.present(("sink_token", "dSink_token")):
        if value.dim[1] > 1 and value.stride[1] != 1:
            yield f"{port} has stride {value.stride[1]} along the heads; cuDNN wants 1"


def score_mod(f: Facts) -> Iterator[str]:
    if f.attrs.score_mod is not None:
        yield "score_mod is a traced program, which runs on the torch engine"


def band(f: Facts) -> Iterator[str]:
    a = f.attrs
    if a.right_bound is not None and a.right_bound < 0:
        yield f"right_bound={a.right_bound} is negative"
    if f.is_causal_bottom_right:
        yield from _bottom_right(f)
    if a.left_bound is not None:
        yield from _window(f, a.left_bound)


def _bottom_right(f: Facts) -> Iterator[str]:
    if not f.attrs.padding and f.s_q > f.s_kv:
        yield f"bottom-right causal with s_q={f.s_q} above s_kv={f.s_kv}"
    for word, present in (
        ("bias", f.has("bias")),
        ("ALiBi", f.attrs.alibi),
        ("dropout", f.has_dropout),
    ):
        if present:
            yield f"bottom-right causal together with {word}"
    if f.before(90600) and (f.s_q % 64 or f.s_kv % 64):
        yield f"bottom-right causal before cuDNN 9.6 needs s_q={f.s_q}, s_kv={f.s_kv} divisible by 64"


def _window(f: Facts, left: int) -> Iterator[str]:
    a = f.attrs
    if left <= 0 and (f.is_backward or f.before(91000)):
        yield f"left_bound={left} must be positive" + ("" if f.is_backward else " before cuDNN 9.10")
    if not a.padding and f.s_q > f.s_kv:
        yield f"a left bound with s_q={f.s_q} above s_kv={f.s_kv}"
    if f.before(91002):
        if a.right_bound is None:
            yield "a left bound before cuDNN 9.10.2 needs a right bound as well"
        if f.has_dropout or f.has("bias"):
            yield "a left bound before cuDNN 9.10.2 excludes dropout and bias"
    if f.before(90600) and f.is_causal_bottom_right and f.s_q != f.s_kv:
        yield f"a bottom-right window before cuDNN 9.6 needs s_q={f.s_q} equal to s_kv={f.s_kv}"
    if f.before(90901) and f.major == 9 and f.is_causal_bottom_right and f.s_q == f.s_kv:
        yield "a bottom-right window with s_q = s_kv on sm_90 needs a cuDNN newer than 9.9"
    if f.device.cudnn == 91400 and f.s_kv > 1024 and a.right_bound is None:
        yield f"cuDNN 9.14.0 computes a window over s_kv={f.s_kv} without a right bound wrongly"


def alibi(f: Facts) -> Iterator[str]:
    if f.attrs.alibi and f.attrs.right_bound != 0:
        yield f"ALiBi needs right_bound=0, this is {f.attrs.right_bound}"


def dropout(f: Facts) -> Iterator[str]:
    p = f.attrs.dropout_p
    if p is not None and not 0.0 <= p < 1.0:
        yield f"dropout probability {p} is outside [0, 1)"


def sink(f: Facts) -> Iterator[str]:
    if f.has("sink_token") and f.before(91300):
        yield f"sink_token needs cuDNN 9.13 or newer, this is {version_name(f.device.cudnn)}"


def ragged(f: Facts) -> Iterator[str]:
    if not f.is_ragged:
        return
    if not f.attrs.padding:
        yield "ragged tensors need padding with seq_len_q and seq_len_kv"
    if 0 < f.device.sm < 90 and f.before(91801):
        yield f"ragged tensors on {f.device} need cuDNN 9.18.1 or newer"


COMMON: tuple[Rule, ...] = (
    machine, data_types, sizes, layout, score_mod, band, alibi, dropout, sink, ragged,
)  # fmt: skip
