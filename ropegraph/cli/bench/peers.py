"""What else rotates Q and K, as far as it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench.timing import Call
from ropegraph.compile import device_of
from ropegraph.engines.cudnn_rope_sdpa.native import build

Turn = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rotations() -> dict[str, Turn]:
    """By name, (q, k, cos, sin) -> (q, k).

    q and k are [b, h, s, d]; cos and sin [s, d] in their dtype.
    """
    found: dict[str, Turn] = {}
    eager = _hugging_face()
    if eager is not None:
        found["HF eager"] = eager
        found["torch.compile"] = torch.compile(eager)
    liger = _liger()
    if liger is not None:
        found["Liger"] = liger
    return found


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own, causal."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def native(graph: rg.pygraph, pack: Mapping[str, Any]) -> Call | None:
    """The lowered graph as one graph of cuDNN's own rope and sdpa nodes; None before cuDNN 9.24.

    It writes every rotated tensor to a buffer, as cuDNN's nodes do.
    """
    if rg.backend_version() < 92400:
        return None
    lowered = graph.lowered.plan.graph
    written = frozenset(v for node in lowered.nodes for v in node.outputs.values())
    made = build(replace(lowered, saved=lowered.saved | written), device_of(torch.device("cuda")))
    buffers: dict[str, Any] = {n: pack[n] for n in made.graph.inputs}
    for name in made.graph.outputs:
        value = made.graph.values[name]
        dtype = getattr(torch, value.dtype.torch_name)
        own = torch.empty_strided(value.dim, value.stride, dtype=dtype, device="cuda")
        buffers[name] = pack.get(name, own)
    return lambda: made(buffers)


def _hugging_face() -> Turn | None:
    try:
        module: Any = import_module("transformers.models.llama.modeling_llama")
    except ImportError:
        return None
    return lambda q, k, cos, sin: module.apply_rotary_pos_emb(q, k, cos[None], sin[None])


def _liger() -> Turn | None:
    """Liger writes in place: it turns the same data further at every call."""
    try:
        module: Any = import_module("liger_kernel.ops.rope")
    except ImportError:
        return None

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        made = module.rope_forward(q, k, cos[None], sin[None])
        return made[0], made[1]

    return turn
