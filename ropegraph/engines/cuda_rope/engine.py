"""The engine: which steps the kernels take. Imports nothing of CUDA, touches no GPU."""

from __future__ import annotations

from ropegraph.engines.cuda_rope.mla_rules import why_not_mla
from ropegraph.engines.cuda_rope.norm_rules import why_not_norm
from ropegraph.engines.cuda_rope.rules import why_not_rope
from ropegraph.ir.ops import (
    CacheWrite,
    MlaKvRope,
    MlaKvRopeBackward,
    NormRope,
    NormRopeBackward,
    NormRopePair,
    Op,
    Rope,
    RopeBackward,
    RopePair,
)
from ropegraph.lowering.engine import Device, Executable, Step


class CudaRope:
    """Rotary kernels built by CuPy: every layout and stride, fp16, bf16 and fp32, sm_80 and newer.

    The parts of a RopePair take one launch, and so do the outputs of an MlaKvRope, and Q and K with
    a norm before or after the rotation. Where the gradient of a norm's weight is wanted, a second,
    small launch in the same step adds that up.
    """

    name = "cuda.rope"
    ops: tuple[type[Op], ...] = (
        Rope, RopeBackward, CacheWrite, RopePair, MlaKvRope, MlaKvRopeBackward,
        NormRope, NormRopeBackward, NormRopePair,
    )  # fmt: skip

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]:
        """Every broken rule, none if it can. Cheap: imports nothing, touches no GPU."""
        broken: list[str] = []
        if device.type != "cuda":
            broken.append(f"needs a CUDA device, this is {device}")
        elif device.sm < 80:
            broken.append(f"needs sm_80 or newer, this is sm_{device.sm}")
        match step.node.attrs:
            case MlaKvRope() | MlaKvRopeBackward():
                broken += why_not_mla(step)
            case NormRope() | NormRopeBackward() | NormRopePair():
                broken += why_not_norm(step)
            case _:
                broken += why_not_rope([step])
        return tuple(dict.fromkeys(broken))

    def compile(self, step: Step, device: Device) -> Executable:
        """Costly, once a step: the first place CuPy is imported."""
        match step.node.attrs:
            case MlaKvRope() | MlaKvRopeBackward():
                from ropegraph.engines.cuda_rope.mla_launch import build_mla as build
            case NormRope() | NormRopeBackward() | NormRopePair():
                from ropegraph.engines.cuda_rope.norm_launch import build_norm as build
            case _:
                from ropegraph.engines.cuda_rope.launch import build
        return build(step, device)
