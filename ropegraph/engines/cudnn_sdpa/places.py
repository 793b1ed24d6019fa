"""Where each pointer of a plan comes from, and how the workspace is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ropegraph.dtypes import torch_dtype
from ropegraph.engines.cudnn_sdpa.operands import Operand
from ropegraph.engines.cudnn_sdpa.recipe import Recipe
from ropegraph.lowering.memory import aligned


@dataclass(frozen=True)
class Places:
    """(place, source) of every pointer; the place is an index into the plan's pointers.

    buffers: from a slot of the environment.  offsets: made here, once.  host_scale: a number that
    is converted on its way.  in_scratch: at a byte of the workspace, behind cuDNN's own part.
    copies: port -> the byte at which repair.py puts a mended copy of it.
    """

    buffers: tuple[tuple[int, int], ...]
    offsets: tuple[tuple[int, torch.Tensor], ...]
    host_scale: tuple[int, int] | None
    in_scratch: tuple[tuple[int, int], ...]
    copies: dict[str, int]
    workspace_bytes: int


def places_of(recipe: Recipe, uids: Sequence[int], cudnn_bytes: int) -> Places:
    """uids: in the order of the pointers; what FE left out of its graph is not among them."""
    order = {uid: i for i, uid in enumerate(uids)}
    buffers: list[tuple[int, int]] = []
    offsets: list[tuple[int, torch.Tensor]] = []
    in_scratch: list[tuple[int, int]] = []
    host_scale: tuple[int, int] | None = None
    copies: dict[str, int] = {}
    size = aligned(max(cudnn_bytes, 1))
    for uid, operand, slot in recipe:
        place = order.get(uid)
        if place is None:
            continue
        if operand.every is not None:
            offsets.append((place, _offsets(operand, recipe.device.index)))
        elif operand.port == "attn_scale" and operand.is_host:
            host_scale = (place, slot)
        elif operand.spare_bytes:
            in_scratch.append((place, size))
            size += aligned(operand.spare_bytes)
        elif copied := recipe.copied_bytes(operand):
            copies[operand.port] = size
            in_scratch.append((place, size))
            size += aligned(copied)
        else:
            buffers.append((place, slot))
    return Places(tuple(buffers), tuple(offsets), host_scale, tuple(in_scratch), copies, size)


def _offsets(operand: Operand, index: int) -> torch.Tensor:
    counted = [i * (operand.every or 0) for i in range(operand.dim[0])]
    # A copy from pageable memory has arrived when it returns: any stream may read it.
    return torch.tensor(counted, dtype=torch_dtype(operand.dtype)).to(f"cuda:{index}")
