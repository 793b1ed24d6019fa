"""The gradients of what is linear and needs little of the forward: scale, matmul, split_qkv."""

from __future__ import annotations

from typing import cast

from ropegraph.api.gradients.forward import Forward
from ropegraph.api.gradients.tape import Tape
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.ir.ops import JoinQkv, Matmul, SplitQkv


def nothing(*_: object) -> list[Tensor]:
    """What the gradient of a scale or a split reads of the forward."""
    return []


def factors(forward: Forward, node: RecordedNode) -> list[Tensor]:
    """The factor that each wanted factor of a matmul was multiplied by."""
    other = {"A": "B", "B": "A"}
    return [node.inputs[other[p]] for p in other if node.inputs[p] in forward.wanted]


def scale(tape: Tape, node: RecordedNode) -> None:
    """The same factor."""
    grad = tape.gradient(node.outputs["output"])
    tape.differentiate(node, node.attrs, {"input": grad}, {"input": "output"})


def matmul(tape: Tape, node: RecordedNode) -> None:
    """dA = dC B^T and dB = A^T dC, summed over the batch for a matrix that all entries use."""
    grad, wide = tape.gradient(node.outputs["C"]), node.outputs["C"].get_dim()[0]
    for port in ("A", "B"):
        tensor = node.inputs[port]
        if not tape.is_wanted(tensor):
            continue
        is_shared = tensor.get_dim()[0] == 1 and wide > 1
        if port == "A":
            attrs = Matmul(transpose_B=True, sum_batch=is_shared)
            ports = {"A": grad, "B": tape.copy(node.inputs["B"])}
        else:
            attrs = Matmul(transpose_A=True, sum_batch=is_shared)
            ports = {"A": tape.copy(node.inputs["A"]), "B": grad}
        tape.differentiate(node, attrs, ports, {port: "C"}, f"_backward_{port}")


def split(tape: Tape, node: RecordedNode) -> None:
    """The gradients of the parts, joined; those that nobody gave are zero."""
    attrs, whole = cast(SplitQkv, node.attrs), node.inputs["qkv"]
    joined = JoinQkv(attrs.split, attrs.by_groups, tuple(whole.get_dim()))
    tape.differentiate(node, joined, tape.gradients(node), {"qkv": "qkv"})
