"""The engine ``reference``: every op in dense fp64, the oracle of the tests and of verify().

Whatever the io types are, inputs are taken exactly to fp64, the whole op is computed there, and
each output is rounded once. It holds the s_q x s_kv matrix: meant for small problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from ropegraph.dtypes import DType
from ropegraph.engines.reference.buffers import gather, scatter
from ropegraph.engines.reference.cache import RunCacheWrite, cache_starts
from ropegraph.engines.reference.mla import RunMla, RunMlaBackward
from ropegraph.engines.reference.norm import RunNorm, RunNormBackward
from ropegraph.engines.reference.packed import RunPacked
from ropegraph.engines.reference.rope import RunRope, why_not_rope
from ropegraph.engines.reference.sdpa import RunSdpa, RunSdpaBackward
from ropegraph.ir.graph import singles
from ropegraph.ir.norm import unfused
from ropegraph.ir.ops import (
    NAMES,
    CacheWrite,
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
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    RopePair,
    Scale,
    Sdpa,
    SdpaBackward,
    SplitQkv,
    Sum,
)
from ropegraph.lowering.engine import Device, Executable, Step


class Reference:
    """Plain fp64 torch, on any device torch has: no fast path, no blocks, no shared formulas."""

    name = "reference"
    ops: tuple[type[Op], ...] = tuple(NAMES)

    def why_not(self, step: Step, device: Device) -> tuple[str, ...]:
        match step.node.attrs:
            case RopePair(parts):
                turned = [part for part in parts if not isinstance(part, CacheWrite)]
                return tuple(dict.fromkeys(r for part in turned for r in why_not_rope(part)))
            case Rope() | RopeBackward() | RopeFreqsGrad() as attrs:
                return why_not_rope(attrs)
            case NormRope() | NormRopeBackward() as attrs:
                return why_not_rope(attrs.rope)
            case NormRopePair(parts):
                return tuple(dict.fromkeys(r for part in parts for r in why_not_rope(part.rope)))
            case _:
                return ()

    def compile(self, step: Step, device: Device) -> Executable:
        match step.node.attrs:
            case Rope() | RopeBackward() | RopeFreqsGrad() as attrs:
                return RunRope(step, attrs)
            case RopePair() | NormRopePair():
                parts = tuple(replace(step, node=single) for single in singles(step.node))
                return RunAll(parts, tuple(self.compile(part, device) for part in parts))
            case CacheWrite():
                return RunCacheWrite(step)
            case Sdpa() as attrs:
                return RunSdpa(step, attrs)
            case SdpaBackward() as attrs:
                return RunSdpaBackward(step, attrs)
            case Scale(factor):
                return RunScale(step, factor)
            case Sum():
                return RunSum(step)
            case Matmul() as attrs:
                return RunMatmul(step, attrs)
            case SplitQkv() | JoinQkv() as attrs:
                return RunPacked(step, attrs)
            case MlaKvRope() as attrs:
                return RunMla(step, attrs)
            case MlaKvRopeBackward() as attrs:
                return RunMlaBackward(step, attrs)
            case RmsNorm() as attrs:
                return RunNorm(step, attrs)
            case RmsNormBackward() as attrs:
                return RunNormBackward(step, attrs)
            case NormRope() | NormRopeBackward():
                return self._chain(step)

    def _chain(self, step: Step) -> RunChain:
        """The parts of a fused node, with fp64 between."""
        nodes, between = unfused(cast(Any, step.node), step.values, DType.DOUBLE)
        # Behind the values comes the scratch memory.
        slots = {v.name: len(step.slots) + 1 + i for i, v in enumerate(between)}
        values = {**step.values, **{v.name: v for v in between}}
        inner = replace(step, values=values, slots={**step.slots, **slots})
        parts = (self.compile(replace(inner, node=node), Device()) for node in nodes)
        return RunChain(tuple(parts), len(step.slots) + 1, tuple(v.dim for v in between))


@dataclass(frozen=True)
class RunChain:
    """Parts one after another; the tensors between them come behind the first ``count``."""

    parts: tuple[Executable, ...]
    count: int
    between: tuple[tuple[int, ...], ...]

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        own = [*env, *[env[0]] * (self.count - len(env))]
        device = env[0].device
        own += (torch.empty(dim, dtype=torch.float64, device=device) for dim in self.between)
        for part in self.parts:
            part(own, stream)


@dataclass(frozen=True)
class RunAll:
    """The parts of one launch, one after the other, once all know where they write."""

    steps: tuple[Step, ...]
    parts: tuple[Executable, ...]

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        for step in self.steps:
            if step.has("cache"):
                cache_starts(step, env)
        for part in self.parts:
            part(env, stream)


@dataclass(frozen=True)
class RunScale:
    """output = factor * input."""

    step: Step
    factor: float

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        scatter(self.step, "output", env, self.factor * gather(self.step, "input", env).double())


@dataclass(frozen=True)
class RunSum:
    """output = the sum of every input."""

    step: Step

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        terms = [gather(self.step, port, env).double() for port in self.step.node.inputs]
        scatter(self.step, "output", env, reduce(torch.add, terms))


@dataclass(frozen=True)
class RunMatmul:
    """C = A B, each summed over the batch where asked for."""

    step: Step
    attrs: Matmul

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        a, b = (gather(self.step, port, env).double() for port in ("A", "B"))
        a = a.transpose(1, 2) if self.attrs.transpose_A else a
        b = b.transpose(1, 2) if self.attrs.transpose_B else b
        c = a @ b
        scatter(self.step, "C", env, c.sum(0, keepdim=True) if self.attrs.sum_batch else c)
