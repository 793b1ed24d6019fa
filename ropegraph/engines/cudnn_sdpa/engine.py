"""The engine ``cudnn.sdpa``: which attention cuDNN takes, and why not the rest."""

from __future__ import annotations

from ropegraph.engines.cudnn_sdpa.backward_rules import BACKWARD
from ropegraph.engines.cudnn_sdpa.facts import Facts
from ropegraph.engines.cudnn_sdpa.forward_rules import FORWARD
from ropegraph.engines.cudnn_sdpa.mask_rules import MASKS
from ropegraph.engines.cudnn_sdpa.rules import TENSORS
from ropegraph.ir.ops import Op, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Executable, Step


class CudnnSdpa:
    """cuDNN's fused attention, forward and backward, fp16 and bf16, sm_80 and newer."""

    name = "cudnn.sdpa"
    ops: tuple[type[Op], ...] = (Sdpa, SdpaBackward)

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]:
        """Every broken rule, none if cuDNN can be asked for a plan."""
        facts = Facts(step, device)
        rules = (*TENSORS, *MASKS, *(BACKWARD if facts.is_backward else FORWARD))
        return tuple(dict.fromkeys(text for rule in rules for text in rule(facts)))

    def compile(self, step: Step, device: Device) -> Executable:
        """Record the node and build a plan.  Raises UnsupportedError if cuDNN has none."""
        from ropegraph.engines.cudnn_sdpa.launch import build

        return build(step, device)
