"""The dropout mask: Philox4x32-10 counted by (b, h, i, j), so no blocking and no order shows in it.

Weight (b, h, i, j) draws word j % 4 of the block
    counter = (j // 4, i, b * h_q + h, low half of offset)
    key     = (low half of seed, high half of seed xor high half of offset)
and is kept where that word, a 32-bit integer, is at least p * 2^32.  For padded and ragged batches
b is the sequence and i, j are positions in it.  Source: Salmon et al., SC11, and Random123.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ropegraph.engines.torch_executor.problem import Tile

Word = int | torch.Tensor

LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[Word, Word],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random words for each counter.  Words are 32 bits wide, held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps modulo 2^64, so both halves are those of the unsigned product.  c1 and c3 keep
        # whole products: their high halves fall away with the mask that ends the next round.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _mix(second, c1, k0), _mix(first, c3, k1)
        c1, c3 = second, first
        k0, k1 = (k0 + _WEYL[0]) & LOW, (k1 + _WEYL[1]) & LOW
    return c0, c1 & LOW, c2, c3 & LOW


def _mix(product: torch.Tensor, word: torch.Tensor, key: Word) -> torch.Tensor:
    """(high half of product) xor word xor key, 32 bits."""
    high = (product >> 32) ^ word
    high ^= key
    high &= LOW
    return high


@dataclass(frozen=True)
class Dropout:
    """p, and what the generator is keyed by.  seed, offset: numbers or one-element tensors."""

    p: float
    seed: Word
    offset: Word
    h_q: int
    batch0: int = 0

    @property
    def factor(self) -> float:
        """What a kept weight is multiplied by."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0

    def dropped(self, tile: Tile, device: torch.device) -> torch.Tensor:
        """True where the weight of a tile is dropped; [b, h, rows, columns]."""

        def count(start: int, stop: int, axis: int) -> torch.Tensor:
            line = torch.arange(start, stop, device=device)
            return line.view([-1 if a == axis else 1 for a in range(4)])

        first = tile.col0 // 4
        heads = count(tile.h.start, tile.h.stop, 1)
        batches = count(tile.b.start + self.batch0, tile.b.stop + self.batch0, 0)
        counter = (
            count(first, -(-tile.col1 // 4), 3),
            count(tile.row0, tile.row1, 2),
            (batches * self.h_q + heads) & LOW,
            torch.as_tensor(self.offset & LOW, device=device),
        )
        key = (self.seed & LOW, ((self.seed >> 32) ^ (self.offset >> 32)) & LOW)
        threshold = round(self.p * 2**32)
        words = [word < threshold for word in philox(counter, key)]
        mask = torch.stack(words, -1).flatten(-2)
        skip = tile.col0 - 4 * first
        return mask[..., skip : skip + tile.shape[3]]
