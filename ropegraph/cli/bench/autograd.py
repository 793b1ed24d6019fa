"""Training steps through autograd, by ropegraph.functional: time and memory on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.cli.bench import peers
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import device_in_turn, host_us
from ropegraph.cli.bench.workload import BF16, H_Q, SPLIT, D, angles, tables
from ropegraph.functional import attention, qkv_attention

Step = Callable[[], object]


def rows() -> list[Row]:
    """Steps from separate heads and from packed QKV."""
    found: list[Row] = []
    for b, s, target in ((1, 512, 150.0), (1, 2048, 430.0)):
        ours, others = _steps(b, s, angles(s))
        nothing = others["a Function that does nothing"]
        for name, step in ours.items():
            beside = {
                "in the calling thread": _host_us(step, threads=False),
                "captured by torch.cuda.graph": _host_us(_captured(step)),
                "a Function that does nothing": _host_us(nothing),
            }
            us = _host_us(step)
            work = f"training step by autograd, {name}, b{b} s{s}"
            found.append(Row.of_time(work, us, target, beside))
    return found + _long(2, 8192)


def _long(b: int, s: int) -> list[Row]:
    """Steps that the device takes longest for, and their memory."""
    ours, others = _steps(b, s, angles(s))
    del others["a Function that does nothing"]
    memory = {name: _mib(step) for name, step in (ours | others).items()}
    times = device_in_turn(ours | others)
    beside = {name: times[name] for name in others}
    size = f"b{b} s{s}"
    found = [
        Row.of_time(f"training step by autograd, {n}, {size}", times[n], 7550.0, beside)
        for n in ours
    ]
    found += (
        Row(f"memory of that step, {name}, {size}", times[name], mib, None, "MiB")
        for name, mib in memory.items()
    )
    return found


def _steps(b: int, s: int, freqs: Tensor) -> tuple[dict[str, Step], dict[str, Step]]:
    """Our steps, and others."""

    def normal(h: int) -> Tensor:
        return torch.randn(b, s, h, D, device="cuda", dtype=BF16)

    q, k, v = (normal(h).transpose(1, 2).requires_grad_() for h in SPLIT)
    packed = normal(sum(SPLIT)).requires_grad_()
    do = normal(H_Q).transpose(1, 2)
    cos, sin = tables(freqs)

    def heads() -> object:
        o = attention(q, k, v, freqs, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(o, (q, k, v), do)

    def whole() -> object:
        o = qkv_attention(packed, freqs, split=SPLIT, is_causal=True)
        return torch.autograd.grad(o, packed, do)

    def again() -> object:
        o = qkv_attention(packed, freqs, split=SPLIT, is_causal=True, recompute_rope=True)
        return torch.autograd.grad(o, packed, do)

    def plain(turn: peers.Turn | None = None) -> object:
        q_rot, k_rot = (q, k) if turn is None else turn(q, k, cos, sin)
        return torch.autograd.grad(peers.attention(q_rot, k_rot, v), (q, k, v), do)

    def nothing() -> object:
        o = cast(Tensor, _Nothing.apply(q, k, v))
        return torch.autograd.grad(o, (q, k, v), do)

    ours: dict[str, Step] = {
        "separate heads": heads,
        "packed": whole,
        "packed, rotated again": again,
    }
    others: dict[str, Step] = {"F.sdpa alone": plain, "a Function that does nothing": nothing}
    eager = peers.rotations().get("HF eager")
    if eager is not None:
        others["HF eager + F.sdpa"] = lambda: plain(eager)
    return ours, others


class _Nothing(torch.autograd.Function):
    """What autograd itself takes: three inputs, three gradients, no launch."""

    @staticmethod
    def forward(ctx: Any, *heads: Any) -> Any:
        ctx.save_for_backward(*heads)
        return heads[0].view_as(heads[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, k, v = ctx.saved_tensors
        return grads[0], k, v


def _host_us(step: Step, threads: bool = True) -> float:
    """Wall time of a step with the wait for the device.

    threads: False keeps autograd in the calling thread, as a training loop may.
    """
    with torch.autograd.set_multithreading_enabled(threads):
        return host_us(lambda _: _waited(step))


def _captured(step: Step) -> Step:
    """The whole step, autograd included, as one CUDA graph: any loop may do so."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _waited(step: Step) -> None:
    step()
    torch.cuda.synchronize()


def _mib(step: Step) -> float:
    """The peak of one step over what was allocated before it."""
    _waited(step)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _waited(step)
    return (torch.cuda.max_memory_allocated() - before) / 2**20
