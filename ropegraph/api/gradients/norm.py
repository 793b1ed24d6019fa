"""The gradients of rmsnorm. What it normalised is made again by the rope before it, if any."""

from __future__ import annotations

from typing import cast

from ropegraph.api.gradients.forward import Forward
from ropegraph.api.gradients.tape import Tape
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import RmsNorm, RmsNormBackward


def needs(forward: Forward, node: RecordedNode) -> list[Tensor]:
    """Its input, or what makes that again; the weight and inv_variance."""
    if "inv_variance" not in node.outputs:
        raise GraphError(
            f"backward_graph: rmsnorm {node.name!r} gives no inv_variance; "
            "record it with norm_forward_phase.TRAINING"
        )
    x = node.inputs["input"]
    rope = forward.rope_to_repeat(x)
    kept = [x] if rope is None else list(rope.inputs.values())
    return [*kept, node.inputs["scale"], node.outputs["inv_variance"]]


def record(tape: Tape, node: RecordedNode) -> None:
    """DX and Dscale, those that are wanted."""
    attrs, statistics = cast(RmsNorm, node.attrs), node.outputs["inv_variance"]
    if tape.has_gradient(statistics):
        raise GraphError(
            f"backward_graph: inv_variance of rmsnorm {node.name!r} has no gradient; ask for Y only"
        )
    x = node.inputs["input"]
    rope = tape.forward.rope_to_repeat(x)
    ports = {
        "grad": tape.gradient(node.outputs["Y"]),
        "input": tape.copy(x) if rope is None else tape.repeated(x, rope),
        "scale": tape.copy(node.inputs["scale"]),
        "inv_variance": tape.copy(statistics),
    }
    backward = RmsNormBackward(attrs.zero_centered, attrs.compute)
    tape.differentiate(node, backward, ports, {"input": "DX", "scale": "Dscale"})
