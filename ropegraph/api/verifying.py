"""verify(): every launch of a graph beside the same operation in fp64, on the caller's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from ropegraph.api.contract_check import ScaleCheck, check_scales
from ropegraph.api.raw_rows import Raw, made_elsewhere, made_here
from ropegraph.api.rounding_noise import noise
from ropegraph.api.table_layout import suspicions
from ropegraph.api.verification import OutputCheck, Verification
from ropegraph.engines import manifest
from ropegraph.execution.run import Runnable
from ropegraph.ir.graph import Graph, singles
from ropegraph.ir.ops import Attention
from ropegraph.lowering.engine import Device, Step


def verify(
    runnable: Runnable, buffers: Mapping[str, Any], raw: Mapping[str, Tensor]
) -> Verification:
    """Run every launch on the buffers, and beside it the same operation in fp64.

    On torch's current stream. Each is compared on the inputs that it really had, so an error is
    told where it arises.  raw: rows before their rotation, by the name of a bound q or k.
    """
    plan, stream = runnable.plan, runnable.current_stream
    graph, device = plan.graph, plan.device
    env = runnable.environment(buffers, stream)
    checks: list[OutputCheck] = []
    scales: list[ScaleCheck] = []
    faults: list[str] = []
    warnings: dict[str, None] = {}
    rows: dict[str, Raw] = {}
    with torch.inference_mode():
        nonfinite = tuple(n for n in graph.inputs if _has_nonfinite(env[plan.slots[n]]))
        for step, executable in zip(plan.steps, runnable.executables, strict=True):
            warnings |= dict.fromkeys(suspicions(step, env))
            why = _unchecked(step, device)
            exact = list(env) if why else _exact(step, device, env, stream)
            floor = {} if why else noise(step, env)
            executable(env, stream)
            found: Any = getattr(executable, "faults", tuple)
            faults += [f"{step.name}: {text}" for text in found()]
            for value in step.node.outputs.values():
                slot = step.slots[value]
                about = OutputCheck(
                    step.name, step.engine, value, unchecked=why, origin=_origin(step, value)
                )
                if not why:
                    about = _compare(about, env[slot], exact[slot], floor.get(value, 0.0))
                    if _is_turned(graph, value):
                        rows[value] = made_here(step.node, value, exact[slot])
                checks.append(about)
            if isinstance(step.node.attrs, Attention):
                given = {
                    name: made_elsewhere(graph, step, side, env, raw[name])
                    for side in ("q", "k")
                    if (name := step.node.inputs[side]) in raw
                }
                scales += check_scales(step, env, {**rows, **given})
    runnable.touch(env)
    return Verification(tuple(checks), tuple(faults), tuple(scales), nonfinite, tuple(warnings))


def _has_nonfinite(x: Any) -> bool:
    is_float = isinstance(x, Tensor) and x.dtype.is_floating_point and x.element_size() > 1
    return is_float and not bool(x.isfinite().all())


def _is_turned(graph: Graph, value: str) -> bool:
    """True for the q and k of an attention."""
    return any(
        isinstance(node.attrs, Attention) and value in (node.inputs["q"], node.inputs["k"])
        for node in graph.reading(value)
    )


def _origin(step: Step, value: str) -> str:
    """The node that writes a value, in a merged launch one of its parts."""
    return next((s.name for s in singles(step.node) if value in s.outputs.values()), step.name)


def _unchecked(step: Step, device: Device) -> str:
    """Why a step has no exact twin, or ""."""
    attrs = step.node.attrs
    if (
        isinstance(attrs, Attention)
        and attrs.dropout_p
        and step.engine not in ("torch", "reference")
    ):
        return f"not compared: {step.engine} draws a dropout mask of its own"
    broken = manifest.load("reference").why_not(step, device)
    return f"not compared: {'; '.join(broken)}" if broken else ""


def _exact(step: Step, device: Device, env: list[Any], stream: int) -> list[Any]:
    """The environment after the step in fp64, its outputs in tensors of their own."""
    own = list(env)
    for value in step.node.outputs.values():
        x: Tensor = env[step.slots[value]]
        # MXFP8 is compared byte by byte, anything else in fp64.
        dtype = torch.uint8 if x.element_size() == 1 else torch.float64
        exact = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)
        own[step.slots[value]] = exact.fill_(0 if dtype is torch.uint8 else torch.nan)
    manifest.load("reference").compile(step, device)(own, stream)
    return own


def _compare(about: OutputCheck, got: Tensor, exact: Tensor, floor: float) -> OutputCheck:
    """Fill in the errors.  floor: an ulp is at least this, see rounding_noise."""
    if not got.numel():
        return about
    if exact.dtype is torch.uint8:
        off = 0.0 if torch.equal(got.view(torch.uint8), exact) else inf
        return replace(about, max_ulp=off, rms_ulp=off)
    finite = exact.isfinite()
    nonfinite = int((finite & ~got.isfinite()).sum())
    a, b = got.double()[finite], exact[finite]
    if not b.numel():
        return about
    info = torch.finfo(got.dtype)
    unit = info.eps * b.abs().clamp_min(float(b.square().mean().sqrt()))
    # Nothing lies between the smallest numbers of a type.
    unit = unit.clamp_min(max(info.smallest_normal * info.eps, floor))
    off = torch.where(a == b, 0.0, (a - b).abs() / unit)
    largest, mean = float(off.max()), sqrt(float(off.square().mean()))
    if nonfinite:
        largest = mean = inf
    return replace(about, max_ulp=largest, rms_ulp=mean, nonfinite=nonfinite)
