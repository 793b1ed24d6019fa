"""What every tensor and the machine must be. A rule yields a sentence for each way it is broken.

Sources: the support surface of cuDNN Frontend 1.32 (sdpa_support_surface.h and the backward node),
and what this package promises beyond it. A rule about versions is silent where there is no cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ropegraph.dtypes import DType, short
from ropegraph.engines.cudnn_sdpa.facts import OPERANDS, SCALARS, Facts, version_name

Rule = Callable[[Facts], Iterator[str]]
ALIGNMENT_BYTES = 16
# The y and z axes of a grid end here. Above it a kernel fails to start, or skips heads silently.
MOST_BLOCKS = 65535


def machine(f: Facts) -> Iterator[str]:
    """A GPU, and a cuDNN that is not known to be wrong."""
    if f.device.type != "cuda":
        yield f"needs a CUDA device, this is {f.device}"
        return
    if f.device.sm < 80:
        yield f"needs sm_80 or newer, this is {f.device}"
    if not f.device.cudnn:
        yield "needs cuDNN and nvidia-cudnn-frontend 1.32 or newer, which are not both installed"
    if f.before(90000):
        yield f"needs cuDNN 9.0 or newer, this is {version_name(f.device.cudnn)}"
    if f.device.cudnn in (91000, 91001):
        yield f"{f.cudnn_name} computes attention wrongly; 9.10.2 is right again"


def data_types(f: Facts) -> Iterator[str]:
    """16-bit operands of one type; what is held in fp32 and int32."""
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
    for port, name in f.step.node.inputs.items():
        if f.step.values[name].is_host and port not in SCALARS:
            yield f"{port} is passed by value; cuDNN reads it on the device"
    if f.attrs.compute is DType.DOUBLE:
        yield "it is to be computed in fp64; cuDNN computes in fp32"


def sizes(f: Facts) -> Iterator[str]:
    """No empty tensor, head dims in eights, whole groups of heads, a grid that a launch takes."""
    for port, value in f.present(("q", "k", "v")):
        if 0 in value.dim:
            yield f"{port} {list(value.dim)} is empty"
    for name, d in (("d_qk", f.d_qk), ("d_v", f.d_v)):
        if d % 8:
            yield f"{name}={d} is not a multiple of 8"
    h_q, h_k, h_v = f.heads
    for name, n in (("b", f.b), ("h_q", h_q)):
        if n > MOST_BLOCKS:
            yield f"{name}={n} is above {MOST_BLOCKS}, the most that a launch takes"
    for port, h in (("k", h_k), ("v", h_v)):
        if h and h_q % h:
            yield f"h_q={h_q} is not a multiple of the {h} heads of {port}"


def layout(f: Facts) -> Iterator[str]:
    """Contiguous channels, and rows that start where 16-byte loads may."""
    for port, value in f.present((*OPERANDS, "bias", "dBias")):
        if value.dim[3] > 1 and value.stride[3] != 1:
            yield f"{port} has stride {value.stride[3]} along its last axis; cuDNN wants 1"
    for port, value in f.present(OPERANDS):
        start = value.start * value.dtype.itemsize
        if start % ALIGNMENT_BYTES:
            yield (
                f"{port} starts {start} bytes into {value.within!r}, not a multiple of "
                f"{ALIGNMENT_BYTES}"
            )
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


TENSORS: tuple[Rule, ...] = (machine, data_types, sizes, layout)
