"""The protocols between the stages: what an engine offers, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import Op


@dataclass(frozen=True)
class Device:
    """Where a graph runs.  sm: compute capability as 90, 0 on a CPU.  cudnn: version or 0."""

    type: str = "cpu"
    index: int = 0
    sm: int = 0
    cudnn: int = 0

    def __str__(self) -> str:
        return f"sm_{self.sm}" if self.type == "cuda" else self.type


@dataclass(frozen=True)
class Step:
    """One launch: a node, the values it touches, and the engine that takes it.

    slots: value name -> index of its tensor in the list an Executable is called with.
    """

    node: Node[Op]
    values: Mapping[str, Value]
    engine: str
    slots: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.node.name

    def slot(self, port: str) -> int:
        """The slot of an input or output port, -1 if the port is unused."""
        value = self.node.inputs.get(port) or self.node.outputs.get(port)
        return -1 if value is None else self.slots[value]

    def value(self, port: str) -> Value:
        """The value at an input or output port that is known to be used."""
        return self.values[self.node.inputs.get(port) or self.node.outputs[port]]

    def has(self, port: str) -> bool:
        return port in self.node.inputs or port in self.node.outputs


class Executable(Protocol):
    """Runs one step on bound tensors, on the given CUDA stream (0 elsewhere). Checks nothing.

    env: a tensor per slot, and last the scratch memory, a uint8 tensor of at least what the
    executable's ``workspace_bytes`` asks for (no such attribute: none).
    An executable with ``launches_by_address = True`` only launches on the stream: it reads nothing
    on the host and allocates nothing, so that its launches may be captured once and replayed, and
    does the same in every mode of torch: gradients, autocast.
    One with ``needs_alignment = True`` wants its floating tensors at multiples of 16 bytes.
    """

    def __call__(self, env: Sequence[Any], stream: int) -> None: ...


class Engine(Protocol):
    """Takes steps.  why_not is cheap and imports nothing; compile is where the cost lies."""

    name: str
    ops: tuple[type[Op], ...]

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]: ...

    def compile(self, step: Step, device: Device) -> Executable: ...
