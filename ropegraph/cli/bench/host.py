"""What the host takes: one execute on an idle queue, and a whole training step by graphs."""

from __future__ import annotations

import torch

from ropegraph.cli.bench import peers
from ropegraph.cli.bench.attention import Attention
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import host_us
from ropegraph.cli.bench.workload import (
    BF16,
    H_Q,
    D,
    angles,
    packed_views,
    separate_heads,
    tables,
)
from ropegraph.execution.replay import KEPT


def rows() -> list[Row]:
    """Host time of one execute of the forward graph: launches hidden, queue idle."""
    ours = Attention(separate_heads(1, 256))
    x = ours.pack
    # More than captures are kept of: none of them is a replay.
    outputs = [torch.empty_like(x["o"]) for _ in range(KEPT + 20)]

    def other(i: int) -> None:
        ours.graph.execute({**x, "o": outputs[i % len(outputs)]})

    same = host_us(lambda _: ours.graph.execute(x))
    new = host_us(other)
    plain = host_us(lambda _: peers.attention(x["q"], x["k"], x["v"]))
    work = "host time of execute, b1 s256"
    return [
        Row.of_time(f"{work}, the same buffers", same, 8.0, {"F.sdpa alone": plain}),
        Row.of_time(f"{work}, new buffers", new, 22.0),
    ]


def training_step(b: int, s: int) -> Row:
    """Wall time of forward and backward, the device waited for; the others by autograd."""
    ours = Attention(packed_views(b, s), grads=True)

    def step(_: int) -> None:
        ours.step()
        torch.cuda.synchronize()

    x = separate_heads(b, s)
    cos, sin = tables(angles(s))
    leaves = [x[n].detach().requires_grad_() for n in "qkv"]
    do = torch.randn(b, H_Q, s, D, device="cuda", dtype=BF16)

    def plain(turn: peers.Turn) -> None:
        q, k = turn(leaves[0], leaves[1], cos, sin)
        torch.autograd.grad(peers.attention(q, k, leaves[2]), leaves, do)
        torch.cuda.synchronize()

    # Liger's function here has no autograd of its own.
    turns = {n: t for n, t in peers.rotations().items() if n != "Liger"}
    others = {f"{n} + F.sdpa": host_us(lambda _, t=t: plain(t)) for n, t in turns.items()}
    us = host_us(step)
    return Row.of_time(f"wall time of a training step, packed, b{b} s{s}", us, 150.0, others)
