"""The gradients of mla_kv_rope."""

from __future__ import annotations

from typing import cast

from ropegraph.api.gradients.forward import Forward
from ropegraph.api.gradients.tape import Tape
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import MlaKvRope, MlaKvRopeBackward


def needs(_: Forward, node: RecordedNode) -> list[Tensor]:
    """The tables."""
    return [node.inputs["cos"], node.inputs["sin"]]


def record(tape: Tape, node: RecordedNode) -> None:
    """dKV and dK_rope, those that are wanted."""
    attrs, where = cast(MlaKvRope, node.attrs), f"backward_graph: mla_kv_rope {node.name!r}"
    if attrs.quantize is not None:
        raise GraphError(
            f"{where}: what quantize={attrs.quantize!r} writes has no gradient; derive from a "
            "forward with quantize=None"
        )
    for port in ("cos", "sin"):
        if tape.is_wanted(node.inputs[port]):
            raise GraphError(f"{where}: {port} has no gradient; kv and k_rope have one")
    ports = {f"d{port.capitalize()}": grad for port, grad in tape.gradients(node).items()}
    ports |= {port: tape.copy(node.inputs[port]) for port in ("cos", "sin")}
    backward = MlaKvRopeBackward(attrs.nope_dim, node.inputs["kv"].get_dim()[3] - attrs.nope_dim)
    tape.differentiate(node, backward, ports, {"kv": "dKV", "k_rope": "dK_rope"})
