"""The device that a command runs on."""

from __future__ import annotations

import torch

from ropegraph.cli.refusal import Refusal


def chosen(wish: str | None, command: str) -> str:
    """The wish, or a GPU if there is one.  Raises Refusal if a GPU is wished for but missing."""
    has_gpu = torch.cuda.is_available()
    if wish == "cuda" and not has_gpu:
        raise Refusal(f"{command}: torch sees no CUDA device; use --device cpu")
    return wish or ("cuda" if has_gpu else "cpu")
