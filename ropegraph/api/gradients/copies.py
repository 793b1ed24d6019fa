"""The tensors of the forward in its gradient graph: inputs there, or made there again."""

from __future__ import annotations

from typing import Any

from ropegraph.api.gradients.forward import Forward
from ropegraph.api.recording import RecordedNode, Recorder
from ropegraph.api.tensor import Tensor


class Copies:
    """What the backward reads of the forward, each tensor under its own name."""

    def __init__(self, forward: Forward, backward: Recorder) -> None:
        self.forward, self.backward = forward, backward
        self._inputs: dict[Tensor, Tensor] = {}
        self._splits: dict[str, dict[str, Tensor]] = {}
        self._repeated: dict[Tensor, Tensor] = {}

    @property
    def saved(self) -> list[str]:
        """The names of the tensors that the forward has to hand over."""
        return [self.forward.names[t] for t in self._inputs]

    def copy(self, tensor: Tensor) -> Tensor:
        """The forward's tensor: an input of the backward, or part of one that is packed."""
        split = self.forward.split_of(tensor)
        if split is not None and not tensor.is_real:
            return self._part(tensor, split)
        if tensor not in self._inputs:
            copy = self.backward.add_like(tensor, self.forward.names[tensor])
            copy.set_is_pass_by_value(tensor.get_is_pass_by_value())
            copy.spec.bound, copy.spec.constant = tensor.spec.bound, tensor.spec.constant
            self._inputs[tensor] = copy
            self.share_offset(copy, tensor)
        return self._inputs[tensor]

    def repeated(self, tensor: Tensor, rope: RecordedNode) -> Tensor:
        """What a rope of the forward made, by the same rope in the backward."""
        if tensor not in self._repeated:
            ports = {port: self.copy(t) for port, t in rope.inputs.items()}
            made = self.record(rope.attrs, rope.name, ports, "output")["output"]
            made.set_stride(tensor.get_stride()).set_data_type(tensor.get_data_type())
            self._repeated[tensor] = made.set_name(self.forward.names[tensor])
        return self._repeated[tensor]

    def share_offset(self, other: Tensor, tensor: Tensor) -> None:
        """Make a tensor of the backward ragged as one of the forward is."""
        offset = tensor.get_ragged_offset()
        if offset is not None:
            other.set_ragged_offset(self.copy(offset))
            other.set_ragged_offset_multiplier(tensor.get_ragged_offset_multiplier())

    def record(
        self, attrs: Any, name: str, inputs: dict[str, Tensor], *outputs: str
    ) -> dict[str, Tensor]:
        """Add a node to the backward: its outputs by port."""
        return self.backward.record(attrs, name, inputs, outputs)

    def _part(self, tensor: Tensor, split: RecordedNode) -> Tensor:
        """A part of a packed tensor of the forward, taken from that tensor again."""
        if split.name not in self._splits:
            whole = self.copy(split.inputs["qkv"])
            made = self.record(split.attrs, split.name, {"qkv": whole}, *split.outputs)
            for port, old in split.outputs.items():
                made[port].set_name(self.forward.names[old]).set_stride(old.get_stride())
            self._splits[split.name] = made
        part = tensor.spec.in_place_of or tensor
        return next(self._splits[split.name][p] for p, t in split.outputs.items() if t is part)
