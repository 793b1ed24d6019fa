"""Joins the stages: a frozen graph, a device and the allowed engines give something that runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch

from ropegraph.engines import manifest
from ropegraph.engines.cudnn_sdpa.version import installed
from ropegraph.errors import GraphError, UnsupportedError
from ropegraph.execution.run import Runnable
from ropegraph.ir.contract import FoldContract
from ropegraph.ir.graph import Graph
from ropegraph.lowering.choose import Refused, choose, reasons, slots_of
from ropegraph.lowering.engine import Device, Engine, Executable, Step
from ropegraph.lowering.memory import place
from ropegraph.lowering.plan import Plan
from ropegraph.passes import pipeline
from ropegraph.passes.rewrite import Decision


@dataclass(frozen=True)
class Lowered:
    """A graph after the passes, with a plan for one device.

    refused: (node, engine) -> what an engine said when it was to compile the node.
    """

    trace: tuple[pipeline.Trace, ...]
    plan: Plan
    allowed: tuple[str, ...]
    refused: Refused

    @property
    def recorded(self) -> Graph:
        return self.trace[0].graph

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What each pass did or declined, in order."""
        return tuple(d for t in self.trace for d in t.decisions)

    @cached_property
    def contract(self) -> FoldContract:
        """What a backward graph must agree with."""
        return pipeline.contract_of(self.trace, {s.name: s.engine for s in self.plan.steps})

    def why_not(self, engine: str) -> dict[str, tuple[str, ...]]:
        """Node name -> every rule it breaks on ``engine``; nodes that could run are left out."""
        asked, plan = [manifest.load(engine)], self.plan
        found = {
            step.name: reasons(plan.graph, step, plan.device, asked, (engine,), self.refused)
            for step in plan.steps
        }
        return {name: broken[engine] for name, broken in found.items() if broken[engine]}

    def without(self, step: Step, error: UnsupportedError) -> Lowered:
        """The same with another engine for a step whose engine could not compile it.

        Raises UnsupportedError, caused by ``error``, if none is left.
        """
        refused = {**self.refused, (step.name, step.engine): tuple(str(error).splitlines())}
        plan = self.plan
        try:
            steps = choose(plan.graph, plan.device, _known(self.allowed), self.allowed, refused)
        except UnsupportedError as none_left:
            raise none_left from error
        return replace(self, plan=replace(plan, steps=steps), refused=refused)


def lower(graph: Graph, device: Device, engines: tuple[str, ...] | None) -> Lowered:
    """Run the passes and choose an engine for every node.

    Raises FoldContractError where a backward graph disagrees with its contract, UnsupportedError
    where no allowed engine takes a node.
    """
    allowed = manifest.DEFAULT if engines is None else engines
    trace = pipeline.run(graph)
    final = trace[-1].graph
    offsets, size = place(final)
    steps = choose(final, device, _known(allowed), allowed, {})
    return Lowered(trace, Plan(final, device, steps, slots_of(final), offsets, size), allowed, {})


def _known(allowed: tuple[str, ...]) -> list[Engine]:
    return [manifest.load(name) for name in dict.fromkeys((*manifest.DEFAULT, *allowed))]


def compile_plan(lowered: Lowered) -> tuple[Lowered, Runnable]:
    """Compile every step: the costly part, once per graph and device.

    A step that its engine cannot compile after all (cuDNN may find no plan) goes to the next
    allowed engine; the Lowered that comes back says so.
    """
    executables: list[Executable] = []
    while len(executables) < len(lowered.plan.steps):
        step = lowered.plan.steps[len(executables)]
        try:
            executables.append(manifest.load(step.engine).compile(step, lowered.plan.device))
        except UnsupportedError as error:
            lowered = lowered.without(step, error)
    return lowered, Runnable(lowered.plan, executables)


def engine_names(given: object) -> tuple[str, ...] | None:
    """Read ``engines=``: None for the default order, one name, or several."""
    if given is None:
        return None
    try:
        names = (given,) if isinstance(given, str) else tuple(cast("Iterable[str]", given))
    except TypeError:
        raise GraphError(
            f"engines={given!r}; use names out of {', '.join(manifest.ENGINES)}"
        ) from None
    if not names:
        raise GraphError(f"engines=() allows nothing; use some of {', '.join(manifest.ENGINES)}")
    for name in names:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"engines: {name!r:.60} is no name of an engine")
        manifest.load(name)
    return names


def device_of(where: torch.device) -> Device:
    """The Device of a torch device, its compute capability included."""
    if where.type != "cuda":
        return Device(where.type)
    index = torch.cuda.current_device() if where == torch.device("cuda") else where.index
    major, minor = torch.cuda.get_device_capability(index)
    return Device("cuda", index, sm=10 * major + minor, cudnn=installed())
