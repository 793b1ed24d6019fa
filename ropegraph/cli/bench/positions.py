"""Pairs beside halves, and rows whose positions are packed or ranked beside a dense sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ropegraph.cli.bench.rotation import rotation
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.work import Work, ratio
from ropegraph.cli.bench.workload import half_angles, separate_heads

UNEVEN = (5000, 100, 3000, 1, 4096, 2000, 1500, 687)
EVEN = (64,) * 256
# "No slower": two runs of one kernel differ by as much.
AS_FAST = 1.005
AS_DENSE = 1.03


def dense(b: int, s: int, op: str = "rope", *, pairs: bool = False, device: str = "cuda") -> Work:
    """Row i at position i.  pairs: adjacent channels instead of halves."""
    x, freqs = separate_heads(b, s, device), half_angles(s, device)
    return rotation(x, {"freqs": freqs}, op, half_width=True, interleaved=pairs)


def packed(lengths: Sequence[int], ranks: int = 1, rank: int = 0, device: str = "cuda") -> Work:
    """Sequences side by side (THD), as many tokens as ``lengths`` adds up to.

    ranks: of context parallel, among which each sequence, now so many times longer, is divided;
    what does not divide becomes rows of no sequence.
    """
    chunks = 2 * ranks if ranks > 1 else 1
    whole = [n * ranks // chunks * chunks for n in lengths]
    bounds = torch.tensor([*accumulate(whole, initial=0)], dtype=torch.int32, device=device)
    given = {"freqs": half_angles(max(whole), device), "cu_seqlens": bounds}
    return _ranked(separate_heads(1, sum(lengths), device), given, ranks, rank)


def context_parallel(b: int, s: int, ranks: int = 2, rank: int = 1, device: str = "cuda") -> Work:
    """A rank's s rows of sequences of ranks s."""
    given = {"freqs": half_angles(ranks * s, device)}
    return _ranked(separate_heads(b, s, device), given, ranks, rank)


def _ranked(x: dict[str, Tensor], given: dict[str, Tensor], ranks: int, rank: int) -> Work:
    cp: dict[str, Any] = {"cp_size": ranks, "cp_rank": rank} if ranks > 1 else {}
    return rotation(x, given, half_width=True, **cp)


def rows(
    b: int = 2, s: int = 8192,
    uneven: Sequence[int] = UNEVEN, even: Sequence[int] = EVEN, device: str = "cuda",
) -> list[Row]:  # fmt: skip
    """Every kind of rows, in turn with what it is to be as fast as."""
    found: list[Row] = []
    for op in ("rope", "rope_backward"):
        works = {
            "pairs": dense(b, s, op, pairs=True, device=device),
            "halves": dense(b, s, op, device=device),
        }
        found.append(ratio(f"{op} Q+K of pairs, beside halves, b{b} s{s}", works, AS_FAST))
    works = {
        "context parallel": context_parallel(b, s, device=device),
        "dense": dense(b, s, device=device),
    }
    name = f"rope Q+K, context parallel, rank 1 of 2, beside dense, b{b} s{s}"
    found.append(ratio(name, works, AS_DENSE))
    for lengths in (uneven, even):
        beside = {"dense": dense(1, sum(lengths), device=device)}
        size = f"{len(lengths)} sequences, {sum(lengths)} tokens"
        for cp, ranks in (("", (1, 0)), (", context parallel, rank 1 of 2", (2, 1))):
            works = {"THD": packed(lengths, *ranks, device=device), **beside}
            found.append(ratio(f"rope Q+K, THD{cp}, beside dense, {size}", works, AS_DENSE))
    return found
