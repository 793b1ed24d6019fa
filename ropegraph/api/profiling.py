"""profile(): every launch of a graph timed by itself, beside what limits it on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.api.limits import Clock
from ropegraph.api.profile import Profile, StepProfile
from ropegraph.engines.reference.sdpa import lengths_of
from ropegraph.execution.run import Runnable
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import Attention, op_name
from ropegraph.lowering.engine import Executable, Step
from ropegraph.lowering.work import Lengths, work_of


def profile(runnable: Runnable, buffers: Mapping[str, Any], seconds: float) -> Profile:
    """Time every launch in its turn, so that each reads what the ones before it wrote.

    Inputs that the graph writes into are used as copies. A launch that writes where it reads gets
    the old contents back before each repetition, untimed.
    """
    plan = runnable.plan
    graph, stream = plan.graph, runnable.current_stream
    copies = {name: _copy(buffers[name]) for name in graph.rewritten if name in buffers}
    bound = {**buffers, **copies}
    env = runnable.environment(bound, stream)
    clock = Clock(runnable.device, seconds)
    rows: list[StepProfile] = []
    with torch.inference_mode(), torch.autocast(plan.device.type, enabled=False):
        sizes = _ragged_sizes(graph, plan.slots, env)
        for step, executable in zip(plan.steps, runnable.executables, strict=True):
            rows.append(_row(step, executable, graph, env, stream, sizes, clock))
        kept = [(x, _copy(buffers[name])) for name, x in copies.items()]
    whole = clock.measure(lambda: runnable(bound), lambda: _restore(kept))
    runnable.touch(env)
    name = torch.cuda.get_device_name(runnable.device) if clock.is_cuda else "cpu"
    return Profile(graph.name, name, tuple(rows), *whole)


def _row(
    step: Step,
    executable: Executable,
    graph: Graph,
    env: Sequence[Any],
    stream: int,
    sizes: Mapping[str, int],
    clock: Clock,
) -> StepProfile:
    kept = _kept(step, graph, env)
    device, host = clock.measure(lambda: executable(env, stream), lambda: _restore(kept))
    attrs = step.node.attrs
    lengths: Lengths | None = None
    if isinstance(attrs, Attention):
        lengths = lengths_of(step, attrs, cast("Sequence[Tensor]", env))
    work = work_of(step, graph, sizes, lengths)
    matmul = 0.0
    if work.flops:
        dtype = env[step.slots[next(iter(step.node.inputs.values()))]].dtype
        matmul = work.flops / clock.flops_per_second(dtype)
    return StepProfile(
        step.name,
        op_name(attrs),
        step.engine,
        device,
        host,
        work.bytes_read,
        work.bytes_written,
        work.flops,
        clock.copy_seconds(work.bytes_read + work.bytes_written),
        matmul,
    )


def _kept(step: Step, graph: Graph, env: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """What the step writes over what it reads, and a copy of it as it is now."""
    read = {graph.place(value) for value in step.node.inputs.values()}
    written = (v for v in step.node.outputs.values() if graph.place(v) in read)
    targets: list[Tensor] = [env[step.slots[v]] for v in written]
    return [(x, _copy(x)) for x in targets]


def _copy(x: Any) -> Tensor:
    """A copy with the same strides, gaps between elements included."""
    x = (x if isinstance(x, Tensor) else torch.from_dlpack(x)).detach()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _restore(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, before in kept:
        x.copy_(before)


def _ragged_sizes(graph: Graph, slots: Mapping[str, int], env: Sequence[Any]) -> dict[str, int]:
    """Elements of the sequences of each ragged value."""
    found: dict[str, int] = {}
    for name, value in graph.values.items():
        if value.ragged_offset is not None:
            offsets: Tensor = env[slots[value.ragged_offset]]
            flat = offsets.detach().reshape(-1)
            found[name] = (int(flat[-1]) - int(flat[0])) * value.ragged_multiplier
    return found
