"""Steps built by hand, and a dense fp64 attention written from the rules alone."""

from __future__ import annotations

from typing import Any

import torch

from ropegraph.dtypes import DType, as_dtype
from ropegraph.ir.graph import Node, Value
from ropegraph.lowering.engine import Step

INF = float("inf")


def step_of(
    attrs: Any,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    values: dict[str, Any] | None = None,
) -> tuple[Step, list[Any]]:
    """A step whose ports are values of the same name, and its environment."""
    bound = {**inputs, **outputs}
    made: dict[str, Value] = {}
    for name, x in bound.items():
        if isinstance(x, torch.Tensor):
            made[name] = Value(name, tuple(x.shape), tuple(x.stride()), as_dtype(x.dtype))
        else:
            made[name] = Value(name, (1, 1, 1, 1), (1, 1, 1, 1), DType.INT64, is_host=True)
    made.update(values or {})
    node = Node("attn", attrs, {n: n for n in inputs}, {n: n for n in outputs})
    slots = {name: i for i, name in enumerate(bound)}
    return Step(node, made, "torch", slots), list(bound.values())
