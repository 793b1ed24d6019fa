"""Which steps of multi-latent attention the kernels of mla.cu take."""

from __future__ import annotations

from ropegraph.dtypes import short
from ropegraph.engines.cuda_rope.mla import PLACES, TABLES, Mode, mode_of, task_of
from ropegraph.engines.cuda_rope.mla_shape import cut_of, vector_of
from ropegraph.engines.cuda_rope.rules import not_served, too_large
from ropegraph.engines.cuda_rope.shape import MAX_X
from ropegraph.lowering.engine import Step


def why_not_mla(step: Step) -> list[str]:
    """Every rule of the kernel, beyond those of the device, that the step breaks."""
    broken: list[str] = []
    mode = mode_of(step)
    places = PLACES[mode]
    given = {port: step.value(port) for port in places.values() if step.has(port)}
    first = next(iter(given.values()))
    for port, value in given.items():
        is_data = mode is not Mode.MXFP8 or port in ("kv", "k_rope")
        if is_data and (unserved := not_served(port, value.dtype)):
            broken += unserved
        elif is_data and value.dtype is not first.dtype:
            broken.append(f"{port} is {short(value.dtype)} where others are {short(first.dtype)}")
        broken += too_large(port, value)
    hosts = [port for port in (*given, *TABLES) if step.value(port).is_host]
    broken += [f"{port} is passed by value" for port in hosts]
    if not broken:
        task = task_of(step)
        if not task.is_empty and any(cut_of(task, v).grid[0] > MAX_X for v in (1, vector_of(task))):
            broken.append("more tokens times heads than one grid holds")
    return broken
