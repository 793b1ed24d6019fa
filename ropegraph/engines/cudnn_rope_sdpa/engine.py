"""The engine ``cudnn.rope_sdpa``: asked for by name only, and honest about what it cannot take.

cuDNN plans rotation and attention as one graph, and has no plan for a rotation alone. A step of
this package is one node, so no step is ever taken: ``why_not`` gives the reasons. The whole graph
runs through ``native.build``, outside of a plan.
"""

from __future__ import annotations

from ropegraph.engines.cudnn_rope_sdpa.rules import node_rules
from ropegraph.errors import UnsupportedError
from ropegraph.ir.ops import Op, Rope, RopeBackward, RopePair, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Executable, Step

WHOLE_GRAPHS = (
    "plans rope and sdpa as one graph and a step is one node; "
    "ropegraph.engines.cudnn_rope_sdpa.native.build runs the whole graph"
)


class CudnnRopeSdpa:
    """cuDNN 9.24's rope and sdpa nodes."""

    name = "cudnn.rope_sdpa"
    ops: tuple[type[Op], ...] = (Rope, RopeBackward, RopePair, Sdpa, SdpaBackward)

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]:
        """What keeps the node from the native graph, then what keeps any node from it."""
        return (*node_rules(step, device), WHOLE_GRAPHS)

    def compile(self, step: Step, device: Device) -> Executable:
        reasons = self.why_not(step, device)
        message = f"{self.name}, node {step.name!r}: {'; '.join(reasons)}"
        raise UnsupportedError(message, {self.name: reasons})
