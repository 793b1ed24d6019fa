"""Steps of norm and rotation for the kernel tests, their tensors, and what fp64 makes of them."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropegraph.dtypes import DType
from ropegraph.engines.reference import Reference
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import (
    NormRope,
    NormRopeBackward,
    NormRopePair,
    RmsNorm,
    RmsNormBackward,
    Rope,
    RopeBackward,
)
from ropegraph.lowering.engine import Device, Step
from ropegraph.testing.budget import rounding
from ropegraph.testing.inputs import Layout, normal, placed, poisoned
from tests.kernels.cases import Case, compare, offset_by, value_of, widened
from tests.kernels.test_host import DTYPES, LAYOUTS, PAIRS, rotation, seeded, table

# Tables and integers are read as they are; everything else is taken to fp64.
EXACT = ("freqs", "cos", "sin", "cos_sin", "inv_freq", "position_ids", "start_positions")
EXACT += ("cu_seqlens",)
Fused = NormRope | NormRopeBackward
Ports = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """What a case is like; the rest follows from ``number``.

    r, d: rotated channels, all channels.  source: of angles.  positions: read for each token.
    """

    number: int
    backward: bool = False
    norm_first: bool = True
    whole: bool = False
    r: int = 64
    d: int = 64
    source: str = "freqs"
    positions: str = "rows"
    shift: int = 0
    dim: tuple[int, int, int] = (2, 3, 5)
    mixed: bool = False


def case(op: Fused | NormRopePair, inputs: Ports, outputs: Ports) -> Case:
    """A step whose ports are bound to tensors."""
    ports = inputs | outputs
    values: dict[str, Value] = {port: value_of(port, t) for port, t in ports.items()}
    slots = {name: i for i, name in enumerate(values)}
    node = Node[Any]("fused", op, {p: p for p in inputs}, {p: p for p in outputs})
    return Case(Step(node, values, "cuda.rope", slots), list(ports.values()))


def pair(first: Case, second: Case) -> Case:
    """Both in one step."""
    cases = (first, second)
    ins = {f"{p}{i}": c.at(p) for i, c in enumerate(cases) for p in c.step.node.inputs}
    outs = {f"{p}{i}": c.at(p) for i, c in enumerate(cases) for p in c.step.node.outputs}
    parts: Any = tuple(c.step.node.attrs for c in cases)
    return case(NormRopePair(parts, ("a", "b")), ins, outs)


def made(plan: Plan) -> Case:
    """The case of a plan."""
    rng = random.Random(plan.number)
    i = plan.number
    rope = rotation(rng, plan.r, plan.d, PAIRS[i % 4], full=i % 3 == 0 and plan.source == "freqs")
    rope = replace(rope, angles=plan.source)
    if plan.source != "freqs":
        rope = replace(rope, table_layout="first_half", half_width=plan.source == "inv_freq")
    dtypes = [DTYPES[(i + (k if plan.mixed else 0)) % 3] for k in range(3)]
    weight = DTYPES[i // 2 % 3] if i % 2 else torch.float32
    if plan.mixed:
        weight = torch.float32
    b, h, s = plan.dim
    dim = (b, h, s, plan.d)

    def data(dtype: torch.dtype) -> Tensor:
        layout: Layout = rng.choice(LAYOUTS)
        return offset_by(placed(normal(dim, dtype, seed=rng.randrange(999)), layout), plan.shift)

    def out(dtype: torch.dtype) -> Tensor:
        return offset_by(poisoned(dim, dtype, rng.choice(LAYOUTS)), plan.shift)

    heads = h if plan.whole else 1
    scale = torch.randn((1, heads, 1, plan.d), generator=seeded(rng)) * 0.5 + 1
    ports: Ports = {"input": data(dtypes[0]), "scale": offset_by(scale.to(weight), plan.shift)}
    ports |= tables(rng, rope, plan)
    epsilon, centred = rng.choice((1e-6, 1e-2)), bool(i % 5 == 0)
    norm = RmsNorm(centred, epsilon=epsilon)
    spread = torch.full((b, 1 if plan.whole else h, s, 2), torch.nan)
    inverse = spread[..., :1]
    forward = NormRope(norm, rope, plan.norm_first, ("norm", "rope"))
    if not plan.backward:
        outputs = {"output": out(dtypes[1])}
        return case(forward, ports, outputs | ({"inv_variance": inverse} if i % 4 else {}))
    done = case(forward, ports, {"output": poisoned(dim), "inv_variance": inverse})
    inverse.copy_(expected(done)["inv_variance"])
    op = NormRopeBackward(
        RmsNormBackward(centred), RopeBackward(**rope.__dict__), plan.norm_first, ("norm", "rope")
    )
    dscale = torch.full((1, heads, 1, 2 * plan.d), torch.nan, dtype=weight)[..., ::2]
    outputs = {"dX": out(dtypes[2]), "Dscale": dscale}
    if i % 7 == 3:
        del outputs["dX"]
    if i % 7 == 5:
        del outputs["Dscale"]
    return case(op, {"dY": data(dtypes[1]), "inv_variance": inverse, **ports}, outputs)


def tables(rng: random.Random, rope: Rope, plan: Plan) -> Ports:
    """Angles and positions."""
    b, _, s = plan.dim
    found: Ports = {}
    if plan.positions == "ids":
        found["position_ids"] = torch.randint(0, 9, (b, s), generator=seeded(rng))
    if plan.positions == "starts":
        found["start_positions"] = torch.randint(0, 4, (b,), generator=seeded(rng)).int()
    if plan.positions == "packed":
        found["cu_seqlens"] = torch.tensor([0, 2, 2, s - 1], dtype=torch.int32)
    rows, half = s + 9, rope.rope_dim // 2
    width = half if rope.half_width else 2 * half
    if plan.source == "freqs":
        return found | {"freqs": table(rng, rows, width, 1 if plan.positions == "packed" else b)}
    if plan.source == "inv_freq":
        return found | {"inv_freq": 10 ** -(4 * torch.rand(half, generator=seeded(rng)))}
    cos, sin = (torch.rand(rows, 1, 1, width, generator=seeded(rng)) * 2 - 1 for _ in range(2))
    return found | {"cos": cos.bfloat16(), "sin": sin.bfloat16()}


def expected(given: Case) -> Ports:
    """What the reference writes to each output, in fp64, from the same rounded inputs."""
    step = given.step
    is_exact = {name: name.rstrip("01") in EXACT for name in step.values}
    values = {
        name: value if is_exact[name] else replace(value, dtype=DType.DOUBLE)
        for name, value in step.values.items()
    }
    env = [
        given.env[slot] if is_exact[name] else widened(given.env[slot])
        for name, slot in step.slots.items()
    ]
    step = replace(step, values=values)
    Reference().compile(step, Device())(env, 0)
    return {port: env[step.slot(port)] for port in given.written}


def check(given: Case, want: Mapping[str, Tensor], what: str) -> None:
    """Every element within one rounding and a few units of fp32 at the size of its row."""
    compare(given, want, what, _allowed)


def _allowed(given: Case, port: str, want: Tensor) -> Tensor:
    size = torch.where(want.isfinite(), want.abs(), 0.0).amax(-1, keepdim=True)
    # Terms of a gradient are larger than their sums.
    units = 200 if port.startswith("Dscale") else 60
    return rounding(want, given.at(port).dtype) * (1 + 1e-6) + units * 2.0**-23 * size
