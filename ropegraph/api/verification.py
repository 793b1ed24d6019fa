"""verify(): every launch of a graph beside the same operation in fp64, on the caller's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from ropegraph.api.contract_check import ScaleCheck, check_scales
from ropegraph.api.raw_rows import Raw, made_elsewhere, made_here
from ropegraph.api.rounding_noise import noise
from ropegraph.api.table_layout import suspicions
from ropegraph.engines import manifest
from ropegraph.execution.run import Runnable
from ropegraph.ir.graph import Graph, singles
from ropegraph.ir.ops import Attention
from ropegraph.lowering.engine import Device, Step

# A right result is off by less than one rounding of its type in the 16-bit types and by a few in
# fp32, where sums over thousands of keys round as well.
TOLERANCE = 32.0


@dataclass(frozen=True)
class OutputCheck:
    """One output of one launch.

    node: the launch.  origin: the node of it that writes the output, where several are merged.
    max_ulp, rms_ulp: the error in units of eps * max(|exact|, rms of exact), where terms cancel of
    the rounding of these; the largest and the root mean square.
    nonfinite: elements that are NaN or Inf where the exact ones are not.
    unchecked: why there is nothing to compare with, else "".
    """

    node: str
    engine: str
    output: str
    max_ulp: float = 0.0
    rms_ulp: float = 0.0
    nonfinite: int = 0
    unchecked: str = ""
    origin: str = ""

    @property
    def is_ok(self) -> bool:
        """True unless it was compared and found wrong."""
        return bool(self.unchecked) or (self.nonfinite == 0 and self.rms_ulp <= TOLERANCE)


@dataclass(frozen=True)
class NodeError:
    """The error of a node over all its outputs, in ulp; a right node has nonfinite 0."""

    max_ulp: float
    rms_ulp: float
    nonfinite: int


@dataclass(frozen=True)
class Verification:
    """What verify() found.

    checks: the outputs, in the order of the launches.  scales: what q_rot, k_rot and stats say of
    the fold.  faults: what kernels noticed of index tensors they read.
    nonfinite_inputs: bound tensors that hold a NaN or Inf before anything runs.
    warnings: tables that do not look like their table_layout; they may still be meant.
    """

    checks: tuple[OutputCheck, ...]
    faults: tuple[str, ...] = ()
    scales: tuple[ScaleCheck, ...] = ()
    nonfinite_inputs: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """True if nothing was found wrong; ``unchecked`` tells what was not looked at."""
        return not self.faults and all(c.is_ok for c in (*self.checks, *self.scales))

    def __bool__(self) -> bool:
        return self.is_ok

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What there was nothing to compare with."""
        outputs = (f"{c.node}: {c.output}" for c in self.checks if c.unchecked)
        return (*outputs, *(f"{s.node}: {s.what}" for s in self.scales if s.unchecked))

    @property
    def first_bad(self) -> OutputCheck | None:
        """The first wrong output in the order of the launches: the ones behind it inherit it."""
        return next((c for c in self.checks if not c.is_ok), None)

    @property
    def wrong_scales(self) -> tuple[ScaleCheck, ...]:
        """The folds that the buffers do not bear out."""
        return tuple(s for s in self.scales if not s.is_ok)

    @property
    def nonfinite_origin(self) -> str:
        """Where the first NaN or Inf comes from: an input, the output of a launch, or ""."""
        if self.nonfinite_inputs:
            return f"input {self.nonfinite_inputs[0]!r}"
        made = next((c for c in self.checks if c.nonfinite), None)
        return "" if made is None else f"{made.origin}: {made.output}"

    @property
    def by_node(self) -> dict[str, NodeError]:
        """The error of each node that was compared, the parts of a merged launch by themselves."""
        found: dict[str, list[OutputCheck]] = {}
        for check in self.checks:
            if not check.unchecked:
                found.setdefault(check.origin, []).append(check)
        return {
            node: NodeError(
                max(c.max_ulp for c in own),
                max(c.rms_ulp for c in own),
                sum(c.nonfinite for c in own),
            )
            for node, own in found.items()
        }

    @property
    def verdict(self) -> str:
        """One sentence: the cause before what it leads to."""
        bad = self.first_bad
        if self.wrong_scales:
            first = self.wrong_scales[0]
            text = f"WRONG: {first.node}: {first.what}: " + (
                first.fault
                or f"{first.found:.3g} is carried where the graph wants {first.expected:.3g}"
            )
            text += "; what reads them inherits it"
        elif self.faults:
            text = f"WRONG: {self.faults[0]}"
        elif bad is not None:
            off = f"{bad.nonfinite} NaN or Inf" if bad.nonfinite else f"{bad.rms_ulp:.3g} ulp off"
            text = f"WRONG: {bad.node}: {bad.output}: {off}, {TOLERANCE:g} ulp (rms) are allowed"
        else:
            text = f"right: no output is more than {TOLERANCE:g} ulp (rms) off"
        if self.nonfinite_inputs:
            text += f"; NaN or Inf comes in by {', '.join(map(repr, self.nonfinite_inputs))}"
        return text + (f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else "")

    def __str__(self) -> str:
        wide = max([24, *(len(f"{c.node}: {c.output}") for c in self.checks)])
        lines = [
            self.verdict,
            f"{'launch: output':<{wide}} {'engine':<12} {'max ulp':>9} {'rms ulp':>9}",
        ]
        for c in self.checks:
            figures = c.unchecked or f"{c.max_ulp:9.3g} {c.rms_ulp:9.3g}"
            if c.nonfinite:
                figures += f"  {c.nonfinite} NaN or Inf"
            mark = "" if c.is_ok else "  WRONG"
            lines.append(f"{f'{c.node}: {c.output}':<{wide}} {c.engine:<12} {figures}{mark}")
        lines += [f"scale: {check}" for check in self.scales]
        if self.nonfinite_origin:
            lines.append(f"first NaN or Inf: {self.nonfinite_origin}")
        lines += [f"fault: {text}" for text in self.faults]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def verify(
    runnable: Runnable, buffers: Mapping[str, Any], raw: Mapping[str, Tensor]
) -> Verification:
    """Run every launch on the buffers, and beside it the same operation in fp64.

    On torch's current stream. Each is compared on the inputs that it really had, so an error is
    told where it arises.  raw: rows before their rotation, by the name of a bound q or k.
    """
    stream, graph = runnable.current_stream, runnable.plan.graph
    env = runnable.environment(buffers, stream)
    checks: list[OutputCheck] = []
    scales: list[ScaleCheck] = []
    faults: list[str] = []
    warnings: dict[str, None] = {}
    rows: dict[str, Raw] = {}
    with torch.inference_mode():
        nonfinite = tuple(n for n in graph.inputs if _has_nonfinite(env[runnable.plan.slots[n]]))
        for step, executable in zip(runnable.plan.steps, runnable.executables, strict=True):
            warnings |= dict.fromkeys(suspicions(step, env))
            why = _unchecked(step, runnable.plan.device)
            exact = list(env) if why else _exact(step, runnable.plan.device, env, stream)
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
                checks.append(about)
                if not why and _is_turned(graph, value):
                    rows[value] = made_here(step.node, value, exact[slot])
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
