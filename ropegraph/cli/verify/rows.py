"""Every row of the fold table, forward and backward, by each engine, measured against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch

from ropegraph.cli.demo import accuracy, fold_table
from ropegraph.cli.demo.accuracy import NAMES, Inputs, Results
from ropegraph.cli.demo.graphs import SETTINGS, RotaryAttention, Setting, Sizes
from ropegraph.cli.demo.training import max_or_nan

# No width is a power of four: a scale of 1/8, say, costs no rounding and would flatter "off".
CASES = {
    "full": Sizes(b=2, h_q=6, h_kv=2, s=80, d=48, rotated=48),
    "partial": Sizes(b=2, h_q=6, h_kv=3, s=72, d=96, rotated=64),
}
SETS: dict[str, tuple[str, ...]] = {
    "cudnn.sdpa, cuda.rope": ("cudnn.sdpa", "cuda.rope", "torch"),
    "cuda.rope, torch": ("cuda.rope", "torch"),
    "torch": ("torch",),
    "reference": ("reference",),
}
ON_CPU = ("torch", "reference")


@dataclass(frozen=True)
class Row:
    """One fold by one set of engines.

    ran: the engines that took the nodes of the bf16 run.  table_gap: the largest relative error of
    any scale in both lowered graphs.  f64, bf16: the largest error of o, stats, dq, dk, dv beside
    the formula in fp64, relative to the largest element of each.  unfused: that of fold "off".
    allowed: of bf16 twice (unfused + one rounding); for "off" itself plain torch's error counts.
    share: the largest part of it that any of the five uses.
    """

    engines: str
    rotation: str
    fold: str
    ran: tuple[str, ...]
    table_gap: float
    f64: float
    bf16: float
    unfused: float
    share: float

    @property
    def holds(self) -> bool:
        found = (self.table_gap, self.f64, self.bf16, self.share)
        return (
            all(map(isfinite, found))
            and self.table_gap <= accuracy.EXACT
            and self.f64 <= accuracy.EXACT
            and self.share <= 1.0
        )


def measure(device: torch.device) -> Iterator[Row]:
    """Run all of it on a device, row by row."""
    names = ON_CPU if device.type == "cpu" else tuple(SETS)
    for rotation, sizes in CASES.items():
        f64, bf16 = (accuracy.random_inputs(sizes, t) for t in (torch.float64, torch.bfloat16))
        exact, wanted = accuracy.by_formula(f64), accuracy.by_formula(bf16)
        plain = accuracy.errors(accuracy.by_torch(bf16), wanted)
        for name in names:
            unfused: dict[str, float] = {}
            for setting in SETTINGS:
                _, wide = _run(f64, exact, setting, SETS[name], device)
                graphs, found = _run(bf16, wanted, setting, SETS[name], device)
                limits = accuracy.limits(unfused or plain, torch.bfloat16)
                unfused = unfused or found
                yield Row(
                    engines=name,
                    rotation=rotation,
                    fold=setting.name,
                    ran=_engines_of(graphs),
                    table_gap=fold_table.gap(graphs, setting),
                    f64=max_or_nan(list(wide.values())),
                    bf16=max_or_nan(list(found.values())),
                    unfused=max(unfused.values()),
                    share=max_or_nan([found[x] / limits[x] for x in NAMES]),
                )


def _run(
    inputs: Inputs,
    wanted: Results,
    setting: Setting,
    engines: tuple[str, ...],
    device: torch.device,
) -> tuple[RotaryAttention, dict[str, float]]:
    """The graphs of a setting, and the errors of what they make of the inputs."""
    freqs = inputs.freqs.to(device)
    graphs = RotaryAttention(inputs.sizes, setting, freqs, inputs.q.dtype, engines=engines)
    handed = graphs.run_forward(*(x.to(device) for x in (inputs.q, inputs.k, inputs.v)))
    gradients = graphs.run_backward(inputs.do.to(device), handed)
    tensors = (handed["o"], handed["stats"], *gradients)
    found = {name: x.cpu() for name, x in zip(NAMES, tensors, strict=True)}
    return graphs, accuracy.errors(found, wanted)


def _engines_of(graphs: RotaryAttention) -> tuple[str, ...]:
    plans = (graphs.forward.plan, graphs.backward.plan)
    return tuple(dict.fromkeys(step.engine for plan in plans for step in plan.steps))
