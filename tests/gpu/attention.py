"""Attention problems on a GPU: a step by hand, run by an engine, beside the fp64 reference."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ropegraph.dtypes import as_dtype
from ropegraph.engines.cudnn_sdpa.version import installed
from ropegraph.engines.reference import Reference
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Engine, Executable, Step

BF16, F64 = torch.bfloat16, torch.float64
# Error of a whole tensor, ||x - ref|| / ||ref||. One rounding of the result is 1.7e-3 in bf16 and
# 2.1e-4 in fp16; the kernels round the weights as well, before each product.
LIMITS = {torch.bfloat16: (3.4e-3, 5e-3), torch.float16: (4.3e-4, 6.4e-4)}
STATS_LIMIT = 2e-6


def here() -> Device:
    """The current GPU as the lowering sees it."""
    major, minor = torch.cuda.get_device_capability()
    index = torch.cuda.current_device()
    return Device("cuda", index, sm=10 * major + minor, cudnn=installed())


@dataclass(frozen=True)
class Ragged:
    """How a THD buffer is declared: dims, strides, and the name of its offsets."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: str


@dataclass
class Problem:
    """Inputs of an attention by port, and what is common to both directions."""

    inputs: dict[str, Tensor]
    attrs: dict[str, Any]
    ragged: dict[str, Ragged] = field(default_factory=dict[str, Ragged])
    loose: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def rand(*dim: int, dtype: torch.dtype = BF16) -> Tensor:
    """[b, h, s, d] normal numbers, [b, s, h, d] in memory."""
    b, h, s, d = dim
    return torch.randn(b, s, h, d, device="cuda").to(dtype).transpose(1, 2)


def problem(
    *, b: int = 2, h_q: int = 4, h_k: int = 2, h_v: int = 2, s_q: int = 200, s_kv: int = 264,
    d_qk: int = 64, d_v: int = 64, dtype: torch.dtype = BF16, attn_scale: float = 0.125,
    extra: Mapping[str, Tensor] | None = None, **attrs: Any,
) -> Problem:  # fmt: skip
    inputs = {
        "q": rand(b, h_q, s_q, d_qk, dtype=dtype),
        "k": rand(b, h_k, s_kv, d_qk, dtype=dtype),
        "v": rand(b, h_v, s_kv, d_v, dtype=dtype),
        **(extra or {}),
    }
    return Problem(inputs, {"attn_scale": attn_scale, **attrs})


def lengths(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda").reshape(-1, 1, 1, 1)


def poisoned(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A buffer of the same layout, NaN all over."""
    made = torch.empty_strided(
        like.shape, like.stride(), dtype=dtype or like.dtype, device=like.device
    )
    return made.fill_(torch.nan)


def step_of(
    op: Any, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], given: Problem
) -> tuple[Step, list[Tensor]]:
    bound = {**inputs, **outputs, **given.loose}
    values: dict[str, Value] = {}
    for name, x in bound.items():
        dim, stride, offsets = tuple(x.shape), tuple(x.stride()), None
        declared = given.ragged.get({"o": "O", "dO": "O", "stats": "Stats", "dQ": "q", "dK": "k",
                                     "dV": "v"}.get(name, name))  # fmt: skip
        if declared is not None:
            dim, stride, offsets = declared.dim, declared.stride, declared.offsets
        is_host = x.device.type == "cpu"
        values[name] = Value(name, dim, stride, as_dtype(x.dtype), None, offsets, 1, is_host)
    node = Node("attn", op, {n: n for n in inputs}, {n: n for n in outputs})
    return Step(node, values, "", {n: i for i, n in enumerate(bound)}), list(bound.values())


def compiled(
    engine: Engine, op: Any, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor],
    given: Problem,
) -> tuple[Executable, list[Tensor]]:  # fmt: skip
    """An executable and its environment.  The engine must have no reason against the step."""
    step, env = step_of(op, inputs, outputs, given)
    assert engine.why_not(step, here()) == ()
    return WithScratch(engine.compile(step, here())), env


class WithScratch:
    """An executable with scratch memory of its own for each thread and stream, behind the env."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.local = executable, threading.local()
        self.size = getattr(executable, "workspace_bytes", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        by_stream = self.local.__dict__.setdefault("by_stream", {})
        if stream not in by_stream:
            by_stream[stream] = torch.empty(self.size, dtype=torch.uint8, device="cuda")
        self.executable([*env, by_stream[stream]], stream)


def run(
    engine: Engine, op: Any, inputs: Mapping[str, Tensor], outputs: dict[str, Tensor],
    given: Problem,
) -> dict[str, Tensor]:  # fmt: skip
    """Run once on the current stream; inputs must come out of it as they went in."""
    executable, env = compiled(engine, op, inputs, outputs, given)
    before = {name: x.clone() for name, x in inputs.items()}
    executable(env, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for name, x in inputs.items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0, equal_nan=True, msg=name)
    return outputs


def forward(engine: Engine, given: Problem, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """O and Stats over NaN; in fp64 for the reference."""
    q, v = given.inputs["q"], given.inputs["v"]
    wide = torch.float32 if dtype is None else dtype
    if "O" in given.ragged:
        o = poisoned(q.new_empty(*q.shape[:-1], v.shape[-1]), dtype)
        b, h, s, _ = given.ragged["O"].dim
    else:
        b, h, s, _ = q.shape
        o = torch.empty(b, s, h, v.shape[3], dtype=dtype or q.dtype, device="cuda").fill_(torch.nan)
        o = o.transpose(1, 2)
    shape = (q.shape[0], h) if "Stats" in given.ragged else (b, h, s, 1)
    stats = torch.full(shape, torch.nan, dtype=wide, device="cuda")
    op = Sdpa(**given.attrs)
    return run(engine, op, given.inputs, {"O": o, "Stats": stats}, given)


def backward(
    engine: Engine, given: Problem, saved: Mapping[str, Tensor], d_o: Tensor,
    more: Sequence[str] = (), dtype: torch.dtype | None = None, **attrs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients over NaN, from O and Stats of a forward."""
    inputs = {**given.inputs, "o": saved["O"], "dO": d_o, "stats": saved["Stats"]}
    outputs = {f"d{n.upper()}": poisoned(inputs[n], dtype) for n in "qkv"}
    sources = {"dBias": "bias", "dSink_token": "sink_token"}
    outputs |= {name: poisoned(inputs[sources[name]], dtype) for name in more}
    op = SdpaBackward(**given.attrs, **attrs)
    return run(engine, op, inputs, outputs, given)


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| where want is finite; elsewhere both must be the same."""
    a, b = got.double(), want.double()
    finite = torch.isfinite(b)
    assert torch.equal(a[~finite], b[~finite]), "infinities differ"
    assert torch.isfinite(a[finite]).all(), f"{int((~torch.isfinite(a[finite])).sum())} not finite"
    size = b[finite].norm()
    distance = (a - b)[finite].norm()
    return float(distance / size) if size > 0 else float(distance)


def check(got: Mapping[str, Tensor], want: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Every output within its limit."""
    for name, x in got.items():
        limit = LIMITS[dtype][name != "O"]
        if name == "Stats":
            limit = STATS_LIMIT
        elif name == "dSink_token":
            limit = 2e-2  # a sum of b * s_q products that cancel, each with the error of O
        found = error(x, want[name])
        assert found <= limit, f"{name}: {found:.2e} is above {limit:.2e}"


def both_ways(engine: Engine, given: Problem, more: Sequence[str] = (), **attrs: Any) -> None:
    """Forward and backward of an engine against the reference, each from the engine's own O."""
    dtype = given.inputs["q"].dtype
    got = forward(engine, given)
    want = forward(Reference(), given, F64)
    check(got, want, dtype)
    d_o = torch.randn(got["O"].shape, device="cuda").to(dtype)
    d_o = torch.empty_like(got["O"]).copy_(d_o)
    check(
        backward(engine, given, got, d_o, more, **attrs),
        backward(Reference(), given, got, d_o, more, F64),
        dtype,
    )
