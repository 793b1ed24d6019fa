"""What sdpa means in torch: choose between torch's fused kernel and the blockwise path."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, cast

import torch

from ropegraph.dtypes import DType, wider
from ropegraph.engines.torch_executor.band import band_of
from ropegraph.engines.torch_executor.blockwise import Forward, forward
from ropegraph.engines.torch_executor.flash import fits, flash_forward, is_causal, takes_scale
from ropegraph.engines.torch_executor.logits import Logits
from ropegraph.engines.torch_executor.problem import Shape
from ropegraph.ir.ops import Attention, Sdpa
from ropegraph.lowering.engine import Executable, Step

LN2 = log(2.0)


def compile_sdpa(step: Step) -> Executable:
    """The executable of an sdpa step."""
    attrs = cast(Sdpa, step.node.attrs)
    shape = shape_of(step)
    compute = compute_dtype(step)
    scale = scale_reader(step)
    slots = tuple(step.slot(port) for port in ("q", "k", "v", "O"))
    q_slot, k_slot, v_slot, o_slot = slots
    stats_slot = step.slot("Stats")
    band = band_of(attrs, shape.s_q, shape.s_kv)
    causal = is_causal(band)
    use_flash = fits(shape, step.value("q").dim[3], step.value("v").dim[3], band)

    def run(env: Sequence[Any], stream: int) -> None:
        q, k, v, o = env[q_slot], env[k_slot], env[v_slot], env[o_slot]
        stats = env[stats_slot] if stats_slot >= 0 else None
        a = scale(env)
        if use_flash and causal is not None and takes_scale(a, causal, compute):
            if flash_forward(q, k, v, o, stats, a, causal, compute):
                return
        forward(Forward(shape, compute, Logits(a, band), q, k, v, o, stats))

    return run


def shape_of(step: Step) -> Shape:
    q, k, v = (step.value(port).dim for port in ("q", "k", "v"))
    return Shape(q[0], q[1], k[1], v[1], q[2], k[2])


def compute_dtype(step: Step) -> torch.dtype:
    """fp32, or fp64 where the node says so or a tensor is fp64."""
    attrs = cast(Attention, step.node.attrs)
    dtypes = [step.value(port).dtype for port in ("q", "k", "v")]
    return torch.float64 if wider(*dtypes, attrs.compute) is DType.DOUBLE else torch.float32


def scale_reader(step: Step):
    attrs = cast(Attention, step.node.attrs)
    unit = LN2 if attrs.softmax_input_is_log2 else 1.0
    if attrs.attn_scale is not None:
        fixed = attrs.attn_scale * unit
        return lambda env: fixed
    slot = step.slot("attn_scale")
    return lambda env: float(env[slot]) * unit
