"""The forward graph as its gradients see it: what is on the way, and where each tensor lies."""

from __future__ import annotations

from collections.abc import Iterable

from ropegraph.api.recording import RecordedNode, Recorder
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.ops import Rope, SplitQkv, op_name


class Forward:
    """A recorded forward graph.  wanted: tensors through which one of ``inputs`` passes on."""

    def __init__(self, recorder: Recorder, inputs: Iterable[Tensor]) -> None:
        self.recorder, self.nodes = recorder, recorder.nodes
        self.names = recorder.names()
        self.wanted = set(inputs)
        for node in self.nodes:
            if self.is_wanted(node):
                self.wanted |= set(node.outputs.values())

    def is_wanted(self, node: RecordedNode) -> bool:
        """True if the node is on the way from one of the inputs."""
        return any(t in self.wanted for t in node.inputs.values())

    def leading_to(self, outputs: Iterable[Tensor]) -> list[RecordedNode]:
        """The wanted nodes that the outputs depend on."""
        reaching = set(outputs)
        for node in reversed(self.nodes):
            if reaching & set(node.outputs.values()):
                reaching |= set(node.inputs.values())
        return [n for n in self.nodes if set(n.outputs.values()) & reaching and self.is_wanted(n)]

    def split_of(self, tensor: Tensor) -> RecordedNode | None:
        """The split that ``tensor`` comes from, directly or as what was rotated in its place."""
        node = self.recorder.producer(tensor.spec.in_place_of or tensor)
        return node if node is not None and isinstance(node.attrs, SplitQkv) else None

    def rope_to_repeat(self, tensor: Tensor) -> RecordedNode | None:
        """The rope that makes a tensor again sooner than it is kept: one nobody else sees."""
        if tensor.is_real or tensor.spec.is_saved or tensor.spec.in_place_of is not None:
            return None
        made = self.recorder.producer(tensor)
        return made if made is not None and isinstance(made.attrs, Rope) else None

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor in whose memory the forward leaves ``tensor``; itself, if it has its own.

        Raises GraphError if that is a cache, which the next call of the forward writes over.
        """
        maker = self.recorder.producer(tensor)
        if maker is not None and writes_cache(maker):
            raise through_cache(maker)
        if tensor.is_real:
            return tensor
        split = self.split_of(tensor)
        if split is None:
            return tensor
        part = tensor.spec.in_place_of or tensor
        is_overwritten = any(
            t.spec.in_place_of is part for n in self.nodes for t in n.outputs.values()
        )
        if is_overwritten and tensor is part:
            raise GraphError(
                f"backward_graph: {tensor.get_name()!r} is needed and was rotated in place; "
                "leave in_place out"
            )
        return self.whole(split.inputs["qkv"])


def through_cache(node: RecordedNode) -> GraphError:
    """The error for a gradient that would have to go through what ``node`` writes."""
    return GraphError(
        f"backward_graph: {op_name(node.attrs)} {node.name!r} writes into the cache "
        f"{node.inputs['cache'].get_name()!r}; no gradient goes through a cache write, so derive "
        "from a forward graph that leaves cache= out"
    )
