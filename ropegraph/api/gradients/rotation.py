"""The gradients of rope: the adjoint rotation, and that of a table of angles."""

from __future__ import annotations

from typing import cast

from ropegraph.api.gradients.forward import Forward
from ropegraph.api.gradients.tape import Tape
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Rope, RopeBackward, RopeFreqsGrad, shared


def needs(forward: Forward, node: RecordedNode) -> list[Tensor]:
    """What carries angles and positions; the data only for the gradient of freqs."""
    tables = [t for port, t in node.inputs.items() if port != "input"]
    return [*tables, node.inputs["input"]] if node.inputs.get("freqs") in forward.wanted else tables


def record(tape: Tape, node: RecordedNode) -> None:
    """dX from dY by the same angles, and dfreqs where it is wanted."""
    _refuse(tape, node)
    attributes = shared(cast(Rope, node.attrs))
    grad = tape.gradient(node.outputs["output"])
    ports = {p: tape.copy(t) for p, t in node.inputs.items() if p != "input"}
    tape.differentiate(node, RopeBackward(**attributes), {"dY": grad} | ports, {"input": "dX"})
    if tape.is_wanted(node.inputs.get("freqs")):
        ports = {"input": tape.copy(node.inputs["input"]), "dY": grad} | ports
        backward = RopeFreqsGrad(**attributes)
        tape.differentiate(node, backward, ports, {"freqs": "dfreqs"}, "_backward_freqs")


def _refuse(tape: Tape, node: RecordedNode) -> None:
    """Of what a rotation reads, the data and freqs have a gradient."""
    where = f"backward_graph: rope {node.name!r}"
    for port, tensor in node.inputs.items():
        if tape.is_wanted(tensor) and port not in ("input", "freqs"):
            raise GraphError(
                f"{where}: {port} {tensor.get_name()!r} has no gradient; of what carries angles "
                "and positions only freqs has one"
            )
    is_ragged = node.inputs["input"].get_ragged_offset() is not None
    if is_ragged and tape.is_wanted(node.inputs.get("freqs")):
        raise GraphError(f"{where}: freqs has no gradient for a ragged input")
