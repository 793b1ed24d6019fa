"""Training steps through autograd, by ropegraph.functional: time and memory on a GPU."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.cli.bench import peers
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import Call, captured, device_in_turn, host_us
from ropegraph.cli.bench.workload import H_Q, SPLIT, D, angles, heads, separate_heads, tables
from ropegraph.functional import attention, qkv_attention


def rows() -> list[Row]:
    """Steps from separate heads and from packed QKV."""
    found: list[Row] = []
    for b, s, target in ((1, 512, 150.0), (1, 2048, 430.0)):
        ours, others = _steps(b, s, angles(s))
        nothing = others["a Function that does nothing"]
        for name, step in ours.items():
            beside = {
                "in the calling thread": _host_us(step, threads=False),
                "captured by torch.cuda.graph": _host_us(captured(step)[0].replay),
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


def _steps(b: int, s: int, freqs: Tensor) -> tuple[dict[str, Call], dict[str, Call]]:
    """Our steps, and others."""
    q, k, v = (x.requires_grad_() for x in separate_heads(b, s).values())
    packed = heads((b, sum(SPLIT), s, D)).transpose(1, 2).requires_grad_()
    do = heads((b, H_Q, s, D))
    cos, sin = tables(freqs)

    def apart() -> object:
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

    ours: dict[str, Call] = {
        "separate heads": apart,
        "packed": whole,
        "packed, rotated again": again,
    }
    others: dict[str, Call] = {"F.sdpa alone": plain, "a Function that does nothing": nothing}
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


def _host_us(step: Call, threads: bool = True) -> float:
    """Wall time of a step with the wait for the device.

    threads: False keeps autograd in the calling thread, as a training loop may.
    """
    with torch.autograd.set_multithreading_enabled(threads):
        return host_us(lambda _: _waited(step))


def _waited(step: Call) -> None:
    step()
    torch.cuda.synchronize()


def _mib(step: Call) -> float:
    """The peak of one step over what was allocated before it."""
    _waited(step)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _waited(step)
    return (torch.cuda.max_memory_allocated() - before) / 2**20
