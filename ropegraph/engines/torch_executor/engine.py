"""The torch engine: every op, every device, every dtype. What it computes is what the ops mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropegraph.engines.torch_executor.exact import wide
from ropegraph.engines.torch_executor.matmul import MatmulStep
from ropegraph.engines.torch_executor.packed import JoinStep, SplitStep
from ropegraph.engines.torch_executor.sequences import parts
from ropegraph.ir.ops import (
    NAMES,
    JoinQkv,
    Matmul,
    MlaKvRope,
    MlaKvRopeBackward,
    NormRope,
    NormRopeBackward,
    NormRopePair,
    Op,
    RmsNorm,
    RmsNormBackward,
    Scale,
    Sdpa,
    SdpaBackward,
    SplitQkv,
    Sum,
)
from ropegraph.lowering.engine import Device, Executable, Step

if TYPE_CHECKING:
    from torch import Tensor


class TorchExecutor:
    """Plain torch: fast attention where that is exactly the same thing, blockwise elsewhere."""

    name = "torch"
    ops: tuple[type[Op], ...] = tuple(NAMES)

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]:
        """Every broken rule, none if it can."""
        return ()

    def compile(self, step: Step, device: Device) -> Executable:
        match step.node.attrs:
            case Sdpa():
                from ropegraph.engines.torch_executor.sdpa import compile_sdpa

                return compile_sdpa(step)
            case SdpaBackward():
                from ropegraph.engines.torch_executor.sdpa_backward import compile_sdpa_backward

                return compile_sdpa_backward(step)
            case Scale(factor):
                return _ScaleStep(step, factor)
            case Sum():
                return _SumStep(step)
            case Matmul() as attrs:
                return MatmulStep(step, attrs)
            case SplitQkv() as attrs:
                return SplitStep(step, attrs)
            case JoinQkv() as attrs:
                return JoinStep(step, attrs)
            case MlaKvRope() | MlaKvRopeBackward():
                from ropegraph.engines.torch_executor.mla import compile_mla

                return compile_mla(step)
            case RmsNorm() | RmsNormBackward() | NormRope() | NormRopeBackward() | NormRopePair():
                from ropegraph.engines.torch_executor.norm import compile_norm

                return compile_norm(step)
            case _:
                from ropegraph.engines.torch_executor.rope import compile_rope

                return compile_rope(step)


class _ScaleStep:
    """output = factor * input, computed in fp32 (fp64 for fp64 input) and rounded once."""

    def __init__(self, step: Step, factor: float) -> None:
        self.step, self.factor = step, factor

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        for out, x in parts(self.step, env, ("output", "input")):
            out.copy_(x.to(wide(x.dtype)) * self.factor)


class _SumStep:
    """output = the sum of all inputs in fp32 (fp64 for fp64 inputs), rounded once."""

    def __init__(self, step: Step) -> None:
        self.step, self.ports = step, ("output", *step.node.inputs)

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        for out, first, *others in parts(self.step, env, self.ports):
            dtype = wide(first.dtype)
            total = first.to(dtype)
            for term in others:
                total = total + term.to(dtype)
            out.copy_(total)
