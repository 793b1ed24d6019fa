"""Packed QKV taken apart and put together, by slicing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropegraph.ir.ops import JoinQkv, SplitQkv
from ropegraph.lowering.engine import Step


@dataclass(frozen=True)
class RunPacked:
    """Copies every part that has memory of its own, from the whole or into it."""

    step: Step
    attrs: SplitQkv | JoinQkv

    @torch.no_grad()
    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        step = self.step
        whole: Tensor = env[step.slot("qkv")]
        place = step.value("qkv").within or step.value("qkv").name
        if whole.dim() == 3:
            b, s, width = whole.shape
            heads = sum(self.attrs.split)
            whole = whole.view(b, s, heads, width // heads)
        axis = 3 if self.attrs.by_groups else 2
        parts = torch.split(whole, list(self.attrs.split), axis)
        for port, part in zip("qkv", parts, strict=True):
            if not step.has(port):
                if isinstance(self.attrs, JoinQkv):
                    part.zero_()
                continue
            if step.value(port).within == place:
                continue  # it is this part
            own = env[step.slot(port)]
            packed = _as_packed(own, self.attrs.by_groups, part.shape)
            if isinstance(self.attrs, JoinQkv):
                part.copy_(packed)
            else:
                own.copy_(_as_part(part, self.attrs, own.shape))


def _as_part(part: Tensor, attrs: SplitQkv | JoinQkv, shape: torch.Size) -> Tensor:
    """[b, s, h, d], or [b, s, groups, n d], as [b, h, s, d] or [b, groups, n, s, d]."""
    if not attrs.by_groups:
        return part.transpose(1, 2)
    b, s, groups, width = part.shape
    d = attrs.split[1]
    return part.reshape(b, s, groups, width // d, d).permute(0, 2, 3, 1, 4).reshape(shape)


def _as_packed(own: Tensor, by_groups: bool, shape: torch.Size) -> Tensor:
    """The opposite of _as_part."""
    if not by_groups:
        return own.transpose(1, 2)
    b, s, groups, width = shape
    d = own.shape[-1]
    heads = own.reshape(b, groups, width // d, s, d)
    return heads.permute(0, 3, 1, 2, 4).reshape(shape)
