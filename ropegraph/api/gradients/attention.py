"""The gradients of sdpa."""

from __future__ import annotations

from typing import cast

from ropegraph.api.gradients.forward import Forward
from ropegraph.api.gradients.tape import Tape
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Sdpa, SdpaBackward, shared

_GRADS = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink_token": "dSink_token"}


def needs(_: Forward, node: RecordedNode) -> list[Tensor]:
    """All that it read, O and Stats."""
    if "Stats" not in node.outputs:
        raise GraphError(
            f"backward_graph: sdpa {node.name!r} gives no Stats; record it with generate_stats=True"
        )
    return [*node.inputs.values(), *node.outputs.values()]


def record(tape: Tape, node: RecordedNode) -> None:
    """dQ, dK, dV, dBias and dSink_token, those that are wanted."""
    attrs = cast(Sdpa, node.attrs)
    _refuse(tape, node, attrs)
    ports = {p: tape.copy(node.inputs[p]) for p in ("q", "k", "v")}
    ports["o"] = tape.copy(node.outputs["O"])
    ports["dO"] = tape.gradient(node.outputs["O"])
    ports["stats"] = tape.copy(node.outputs["Stats"])
    optional = [p for p in node.inputs if p not in ports]
    ports |= {p: tape.copy(node.inputs[p]) for p in optional}
    tape.differentiate(node, SdpaBackward(**shared(attrs)), ports, _GRADS)


def _refuse(tape: Tape, node: RecordedNode, attrs: Sdpa) -> None:
    for port, tensor in node.inputs.items():
        if tape.is_wanted(tensor) and port not in _GRADS:
            raise GraphError(
                f"backward_graph: sdpa {node.name!r}: {port} {tensor.get_name()!r} has no "
                f"gradient; inputs that have one are {', '.join(_GRADS)}"
            )
    if attrs.max_seq_len_kv is not None:
        raise GraphError(
            f"backward_graph: sdpa {node.name!r} reads paged k and v, which have no gradient"
        )
    if tape.has_gradient(node.outputs.get("Stats")):
        raise GraphError(
            f"backward_graph: Stats of sdpa {node.name!r} has no gradient; ask for O only"
        )
