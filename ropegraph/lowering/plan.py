"""A plan: the launches in order, and where each value lives while they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ropegraph.ir.graph import Graph
from ropegraph.lowering.engine import Device, Step


@dataclass(frozen=True)
class Plan:
    """What build() decides.

    steps: one launch each.  slots: value name -> index in the list of bound tensors.
    workspace: byte offset of each virtual value.  workspace_bytes: the arena's size.
    """

    graph: Graph
    device: Device
    steps: tuple[Step, ...]
    slots: Mapping[str, int]
    workspace: Mapping[str, int]
    workspace_bytes: int

    def __str__(self) -> str:
        lines = [f"{step.name:<24} {step.engine}" for step in self.steps]
        return "\n".join([*lines, f"workspace {self.workspace_bytes} bytes on {self.device}"])
