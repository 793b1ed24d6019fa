"""What a forward graph promises its backward graph: the fold, and all else that changes numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ropegraph.errors import FoldContractError
from ropegraph.ir.ops import Attention, Rotation

Fold = Literal["off", "q", "symmetric", "auto"]
INV_LN2 = 1.0 / math.log(2.0)
REL_TOL = 1e-12


def close(x: float | None, y: float | None) -> bool:
    """Scales compare to 1e-12 relative; a tensor (None) equals only a tensor."""
    return x == y if x is None or y is None else math.isclose(x, y, rel_tol=REL_TOL)


def fold_factors(fold: Fold, attn_scale: float) -> tuple[float, float]:
    """What folding multiplies onto the scales of Q and K; their product is attn_scale."""
    if fold == "q":
        return attn_scale, 1.0
    if fold == "symmetric":
        return math.sqrt(attn_scale), math.sqrt(attn_scale)
    return 1.0, 1.0


@dataclass(frozen=True)
class Turn:
    """One rotation of a chain.  positions: the ports that say which positions its rows have."""

    rotation: Rotation
    positions: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoldEntry:
    """One sdpa node of the forward graph, as recorded, and what folding made of it.

    attention: the recorded attributes.  fold, log2: what was folded.
    q_chain, k_chain: the rotations and host factors that make q and k, the last one first, as
    recorded.
    ports: the optional inputs (bias, sink_token, ...).  engine: who ran it, which decides the
    dropout mask.
    """

    node: str
    attention: Attention
    fold: Fold
    log2: bool
    q_chain: tuple[Turn | float, ...]
    k_chain: tuple[Turn | float, ...]
    ports: tuple[str, ...]
    engine: str

    @property
    def factors(self) -> tuple[float, float]:
        """What the fold multiplied onto the scales of Q and K, 1 / ln 2 included."""
        if self.fold == "off" and not self.log2:
            return 1.0, 1.0
        scale = self.attention.attn_scale
        q, k = fold_factors(self.fold, 1.0 if scale is None else scale)
        return (q * INV_LN2 if self.log2 else q), k


@dataclass(frozen=True)
class FoldContract:
    """The entries of a forward graph by the name of the sdpa node, and its fold settings."""

    entries: Mapping[str, FoldEntry]
    fold: Fold = "auto"
    fold_log2: bool = False

    def entry_for(self, node: str) -> FoldEntry:
        """The entry of the forward node that backward node ``node`` belongs to.

        Matched by equal name or ``<name>_backward``; a contract of one entry fits any name.
        """
        for name, entry in self.entries.items():
            if node in (name, f"{name}_backward"):
                return entry
        if len(self.entries) == 1:
            return next(iter(self.entries.values()))
        names = ", ".join(f"'{n}' or '{n}_backward'" for n in self.entries)
        raise FoldContractError(
            f"sdpa_backward {node!r}: the fold contract has no entry of that name; call it {names}"
        )
