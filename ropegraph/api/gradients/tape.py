"""Gradients on their way back: what each reader of a tensor gave, and the sum of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropegraph.api.gradients.copies import Copies
from ropegraph.api.gradients.forward import Forward
from ropegraph.api.recording import RecordedNode, Recorder
from ropegraph.api.tensor import Tensor
from ropegraph.ir.ops import Sum


class Tape(Copies):
    """The backward graph while it is recorded.  A rule reads gradients off it and adds others."""

    def __init__(self, forward: Forward, backward: Recorder) -> None:
        super().__init__(forward, backward)
        self._terms: dict[Tensor, list[Tensor]] = {}

    def is_wanted(self, tensor: Tensor | None) -> bool:
        """True if the gradient of a tensor of the forward leads to one that was asked for."""
        return tensor in self.forward.wanted

    def has_gradient(self, tensor: Tensor | None) -> bool:
        """True if some reader of the tensor gave a gradient."""
        return tensor in self._terms

    def start(self, tensor: Tensor, grad: Tensor) -> None:
        """The gradient of an output, which the caller gives."""
        self._terms[tensor] = [grad]

    def add(self, tensor: Tensor, grad: Tensor) -> None:
        """One more term of a tensor's gradient, laid out like the tensor."""
        if 0 not in tensor.get_stride():
            grad.set_stride(tensor.get_stride())
        grad.set_data_type(tensor.get_data_type())
        self.share_offset(grad, tensor)
        self._terms.setdefault(tensor, []).append(grad)

    def replace(self, tensor: Tensor, grad: Tensor) -> Tensor:
        """``grad`` in place of all the terms so far."""
        del self._terms[tensor]
        self.add(tensor, grad)
        return grad

    def gradient(self, tensor: Tensor) -> Tensor:
        """The whole gradient of a tensor: the sum of what its readers gave."""
        terms = self._terms[tensor]
        if len(terms) == 1:
            return terms[0]
        ports = {str(i): t for i, t in enumerate(terms)}
        made = self.record(Sum(), f"sum_d{self.forward.names[tensor]}", ports, "output")
        return self.replace(tensor, made["output"])

    def gradients(self, node: RecordedNode) -> dict[str, Tensor]:
        """Those of the outputs of a node that have one, by port."""
        return {p: self.gradient(t) for p, t in node.outputs.items() if self.has_gradient(t)}

    def differentiate(
        self,
        node: RecordedNode,
        backward: Any,
        ports: dict[str, Tensor],
        grads: Mapping[str, str],
        suffix: str = "_backward",
    ) -> None:
        """Record ``backward`` for a node, and add what it writes to the gradients.

        grads: port of the node -> the port of ``backward`` that writes its gradient; only those
        that are wanted are written.
        """
        wanted = {p: grad for p, grad in grads.items() if self.is_wanted(node.inputs.get(p))}
        if not wanted:
            return
        made = self.record(backward, f"{node.name}{suffix}", ports, *wanted.values())
        for port, grad in wanted.items():
            self.add(node.inputs[port], made[grad])
