"""What else rotates Q and K, as far as it is installed: (q, k, cos, sin) -> (q, k)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Turn = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rotations() -> dict[str, Turn]:
    """By name.  q and k are [b, h, s, d]; cos and sin [s, d] in their dtype."""
    found: dict[str, Turn] = {}
    eager = _hugging_face()
    if eager is not None:
        found["HF eager"] = eager
        found["torch.compile"] = torch.compile(eager)
    liger = _liger()
    if liger is not None:
        found["Liger"] = liger
    return found


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
