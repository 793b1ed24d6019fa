"""The text the demo's model reads: characters as token numbers, and batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """A text as token numbers, [n] int64, and the characters they stand for."""

    tokens: Tensor
    alphabet: str

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet)


def king_james() -> Corpus:
    """Genesis and Exodus, which ship with the package (data/ORIGIN.md tells from where)."""
    data = resources.files("ropegraph.cli") / "data" / "king_james.txt"
    text = data.read_text(encoding="ascii")
    alphabet = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(alphabet)}
    return Corpus(torch.tensor([number[character] for character in text]), alphabet)


def batches(
    corpus: Corpus, batch: int, length: int, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``steps`` pairs (tokens, next tokens), [batch, length] each; same seed, same pairs."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    for _ in range(steps):
        starts = torch.randint(len(corpus.tokens) - length, (batch, 1), generator=generator)
        rows = corpus.tokens[starts + offsets]
        yield rows[:, :-1], rows[:, 1:]
