"""Joins the stages: a frozen graph, a device and the allowed engines give something that runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch

from ropegraph.engines import manifest
from ropegraph.errors import GraphError
from ropegraph.execution.run import Runnable
from ropegraph.ir.contract import FoldContract
from ropegraph.ir.graph import Graph
from ropegraph.lowering.choose import choose, reasons, slots_of
from ropegraph.lowering.engine import Device
from ropegraph.lowering.memory import place
from ropegraph.lowering.plan import Plan
from ropegraph.passes import pipeline
from ropegraph.passes.rewrite import Decision


@dataclass(frozen=True)
class Lowered:
    """A graph after the passes, with a plan for one device."""

    trace: tuple[pipeline.Trace, ...]
    plan: Plan
    allowed: tuple[str, ...]

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
        asked = [manifest.load(engine)]
        found = {
            node.name: reasons(self.plan.graph, node, self.plan.device, asked, (engine,))[engine]
            for node in self.plan.graph.nodes
        }
        return {name: broken for name, broken in found.items() if broken}


def lower(graph: Graph, device: Device, engines: tuple[str, ...] | None) -> Lowered:
    """Run the passes and choose an engine for every node.

    Raises FoldContractError where a backward graph disagrees with its contract, UnsupportedError
    where no allowed engine takes a node.
    """
    allowed = manifest.DEFAULT if engines is None else engines
    trace = pipeline.run(graph)
    final = trace[-1].graph
    known = [manifest.load(name) for name in dict.fromkeys((*manifest.DEFAULT, *allowed))]
    offsets, size = place(final)
    steps = choose(final, device, known, allowed)
    plan = Plan(final, device, steps, slots_of(final), offsets, size)
    return Lowered(trace, plan, allowed)


def compile_plan(plan: Plan) -> Runnable:
    """Compile every step: the costly part, once per plan and device."""
    return Runnable(plan, [manifest.load(s.engine).compile(s, plan.device) for s in plan.steps])


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
        manifest.load(name)
    return names


def device_of(where: torch.device) -> Device:
    """The Device of a torch device, its compute capability included."""
    if where.type != "cuda":
        return Device(where.type)
    index = torch.cuda.current_device() if where == torch.device("cuda") else where.index
    major, minor = torch.cuda.get_device_capability(index)
    return replace(Device("cuda", index), sm=10 * major + minor)
