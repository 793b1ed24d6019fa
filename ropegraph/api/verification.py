"""verify(): every launch of a graph beside the same operation in fp64, on the caller's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from ropegraph.engines import manifest
from ropegraph.execution.run import Runnable
from ropegraph.ir.ops import Attention
from ropegraph.lowering.engine import Device, Step

# A right result is off by less than one rounding of its type in the 16-bit types and by a few in
# fp32, where sums over thousands of keys round as well.
TOLERANCE = 32.0


@dataclass(frozen=True)
class OutputCheck:
    """One output of one launch.

    max_ulp, rms_ulp: the error in units of eps * max(|exact|, rms of exact), the largest and the
    root mean square.  nonfinite: elements that are NaN or Inf where the exact ones are not.
    unchecked: why there is nothing to compare with, else "".
    """

    node: str
    engine: str
    output: str
    max_ulp: float = 0.0
    rms_ulp: float = 0.0
    nonfinite: int = 0
    unchecked: str = ""

    @property
    def is_ok(self) -> bool:
        """True unless it was compared and found wrong."""
        return bool(self.unchecked) or (self.nonfinite == 0 and self.rms_ulp <= TOLERANCE)


@dataclass(frozen=True)
class Verification:
    """What verify() found.  faults: what kernels noticed of index tensors they read."""

    checks: tuple[OutputCheck, ...]
    faults: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        return not self.faults and all(c.is_ok for c in self.checks)

    @property
    def first_bad(self) -> OutputCheck | None:
        """The first wrong output in the order of the launches: the ones behind it inherit it."""
        return next((c for c in self.checks if not c.is_ok), None)

    def __str__(self) -> str:
        wide = max([24, *(len(f"{c.node}: {c.output}") for c in self.checks)])
        lines = [f"{'launch: output':<{wide}} {'engine':<12} {'max ulp':>9} {'rms ulp':>9}"]
        for c in self.checks:
            figures = c.unchecked or f"{c.max_ulp:9.3g} {c.rms_ulp:9.3g}"
            if c.nonfinite:
                figures += f"  {c.nonfinite} NaN or Inf"
            mark = "" if c.is_ok else "  WRONG"
            lines.append(f"{f'{c.node}: {c.output}':<{wide}} {c.engine:<12} {figures}{mark}")
        return "\n".join([*lines, *(f"fault: {text}" for text in self.faults)])


def verify(runnable: Runnable, buffers: Mapping[str, Any]) -> Verification:
    """Run every launch on the buffers, and beside it the same operation in fp64.

    On torch's current stream. Each is compared on the inputs that it really had, so an error is
    told where it arises.
    """
    stream = runnable.current_stream
    env = runnable.environment(buffers, stream)
    checks: list[OutputCheck] = []
    faults: list[str] = []
    with torch.inference_mode():
        for step, executable in zip(runnable.plan.steps, runnable.executables, strict=True):
            why = _unchecked(step, runnable.plan.device)
            exact = list(env) if why else _exact(step, runnable.plan.device, env, stream)
            executable(env, stream)
            found: Any = getattr(executable, "faults", tuple)
            faults += [f"{step.name}: {text}" for text in found()]
            for value in step.node.outputs.values():
                slot = step.slots[value]
                about = OutputCheck(step.name, step.engine, value, unchecked=why)
                checks.append(about if why else _compare(about, env[slot], exact[slot]))
    runnable.touch(env)
    return Verification(tuple(checks), tuple(faults))


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


def _compare(about: OutputCheck, got: Tensor, exact: Tensor) -> OutputCheck:
    if not got.numel():
        return about
    if exact.dtype is torch.uint8:
        off = 0.0 if torch.equal(got.view(torch.uint8), exact) else inf
        return OutputCheck(about.node, about.engine, about.output, off, off)
    finite = exact.isfinite()
    nonfinite = int((finite & ~got.isfinite()).sum())
    a, b = got.double()[finite], exact[finite]
    if not b.numel():
        return about
    unit = torch.finfo(got.dtype).eps * b.abs().clamp_min(float(b.square().mean().sqrt()))
    # An exact row of zeros is compared as it is: any error there is infinitely many roundings.
    off = torch.where(a == b, 0.0, (a - b).abs() / unit)
    largest, mean = float(off.max()), sqrt(float(off.square().mean()))
    if nonfinite:
        largest = mean = inf
    return OutputCheck(about.node, about.engine, about.output, largest, mean, nonfinite)
