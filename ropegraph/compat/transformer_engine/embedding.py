"""RotaryPositionEmbedding: the module that makes tables of angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ropegraph import angles
from ropegraph.api.checks import as_count, as_flag, as_number
from ropegraph.errors import GraphError


class RotaryPositionEmbedding(nn.Module):
    """Angles for apply_rotary_pos_emb.  Arguments, buffer and results as in TransformerEngine.

    dim: channels of a head; rotary_percent: of them rotated, int(dim * rotary_percent), even.
    seq_len_interpolation_factor f and pretrained_max_position_embeddings p, only where both are
    given: positions are divided by f, or by max_seq_len / p once max_seq_len > p f.
    rotary_base: theta.  interleaved: columns t0 t0 t1 t1 instead of two equal halves.
    Unlike there, ``inv_freq`` stays fp32 through .half(), .bfloat16() and .double(), for fewer bits
    lose positions, and lives on the CPU where there is no GPU.
    Raises GraphError for numbers out of range.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        where = "RotaryPositionEmbedding"
        made = angles.default(
            head_dim=as_count(dim, f"{where}: dim", 1),
            rope_theta=as_number(rotary_base, f"{where}: rotary_base"),
            partial_rotary_factor=as_number(rotary_percent, f"{where}: rotary_percent"),
            device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu",
        )
        self.register_buffer("inv_freq", made.inv_freq)
        self.rotary_base = rotary_base
        self.interleaved = as_flag(interleaved, f"{where}: interleaved")
        given = {
            "seq_len_interpolation_factor": seq_len_interpolation_factor,
            "pretrained_max_position_embeddings": pretrained_max_position_embeddings,
        }
        for name, number in given.items():
            if number is not None and as_number(number, f"{where}: {name}") <= 0:
                raise GraphError(f"{where}: {name}={number}; use more than 0")
            setattr(self, name, number)

    def forward(self, max_seq_len: int, offset: int | Tensor = 0) -> Tensor:
        """Radians [max_seq_len, 1, 1, rotated], fp32: row i is position offset + i.

        offset: a number, or a tensor of one element on the device of inv_freq.
        Raises GraphError for anything else.
        """
        where = "RotaryPositionEmbedding"
        count = as_count(max_seq_len, f"{where}: max_seq_len")
        device = self.inv_freq.device
        if not isinstance(offset, Tensor):
            as_number(offset, f"{where}: offset")
        elif offset.numel() != 1 or offset.is_complex():
            raise GraphError(
                f"{where}: offset is {offset.dtype} {list(offset.shape)}; use one number"
            )
        positions = torch.arange(count, device=device, dtype=torch.float32) + offset
        pretrained: Any = self.pretrained_max_position_embeddings
        factor: Any = self.seq_len_interpolation_factor
        if pretrained is not None and factor is not None:
            is_longer = count > pretrained * factor
            positions = positions * (1 / (count / pretrained if is_longer else factor))
        if not self.interleaved:
            return angles.freqs(self.inv_freq, positions)
        return angles.freqs(self.inv_freq, positions, width="half").repeat_interleave(2, dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move, but do not cast: what model.to(...), .half() and their like call."""
        kept = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype is not kept.dtype:
            self.inv_freq = kept.to(self.inv_freq.device)
        return self
