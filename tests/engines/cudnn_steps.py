"""Attention steps for the cuDNN engines, by their values alone: no tensor is made."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.engines.cudnn_sdpa.frontend import Frontend, load
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Step

H200 = Device("cuda", 0, sm=90, cudnn=92600)
B200 = Device("cuda", 0, sm=100, cudnn=92600)
A100 = Device("cuda", 0, sm=80, cudnn=92600)


def frontend() -> Frontend:
    """cuDNN Frontend. There is no wheel of it for macOS; everywhere else it must be installed."""
    if sys.platform == "darwin":
        pytest.skip("nvidia-cudnn-frontend has no wheel for macOS", allow_module_level=True)
    return load()


def on(device: Device, version: int) -> Device:
    """The same GPU with another cuDNN."""
    return Device("cuda", 0, sm=device.sm, cudnn=version)


def packed(name: str, dim: tuple[int, ...], dtype: DType = DType.BFLOAT16, **more: Any) -> Value:
    """A row-major value."""
    stride = tuple(prod(dim[i + 1 :]) for i in range(len(dim)))
    return Value(name, dim, more.pop("stride", stride), dtype, **more)


def scalar(name: str, dtype: DType, is_host: bool = False) -> Value:
    return packed(name, (1, 1, 1, 1), dtype, is_host=is_host)


def lengths(b: int, dtype: DType = DType.INT32) -> dict[str, Value]:
    return {name: packed(name, (b, 1, 1, 1), dtype) for name in ("seq_len_q", "seq_len_kv")}


def ragged(
    b: int, h: int, s: int, d: int, name: str, offsets: str, dtype: DType = DType.BFLOAT16
) -> Value:
    """[b, h, s, d] over a THD buffer."""
    return Value(name, (b, h, s, d), (s * h * d, d, h * d, 1), dtype, None, offsets)


def step(
    attrs: Any,
    *,
    b: int = 2,
    h_q: int = 4,
    h_k: int = 2,
    h_v: int = 2,
    s_q: int = 200,
    s_kv: int = 264,
    d_qk: int = 64,
    d_v: int = 64,
    dtype: DType = DType.BFLOAT16,
    extra: Mapping[str, Value] | None = None,
    values: Mapping[str, Value] | None = None,
    outputs: tuple[str, ...] = (),
) -> Step:
    """A step whose ports are values of the same name.

    extra: more input ports.  values: values that replace the ones made here, or that no port names.
    outputs: output ports beside the usual ones.
    """
    dims = {"q": (b, h_q, s_q, d_qk), "k": (b, h_k, s_kv, d_qk), "v": (b, h_v, s_kv, d_v)}
    out = (b, h_q, s_q, d_v)
    stats = (b, h_q, s_q, 1)
    inputs = {name: packed(name, dim, dtype) for name, dim in dims.items()}
    if isinstance(attrs, Sdpa):
        written = {"O": packed("O", out, dtype), "Stats": packed("Stats", stats, DType.FLOAT)}
    else:
        assert isinstance(attrs, SdpaBackward)
        inputs |= {name: packed(name, out, dtype) for name in ("o", "dO")}
        inputs["stats"] = packed("stats", stats, DType.FLOAT)
        written = {f"d{n.upper()}": packed(f"d{n.upper()}", dim, dtype) for n, dim in dims.items()}
    inputs |= extra or {}
    for port in outputs:
        source = inputs[{"dBias": "bias", "dSink_token": "sink_token"}[port]]
        written[port] = packed(port, source.dim, source.dtype)
    known = {**inputs, **written, **(values or {})}
    node = Node("attn", attrs, {n: n for n in inputs}, {n: n for n in written})
    return Step(node, known, "cudnn.sdpa", {name: i for i, name in enumerate(known)})
