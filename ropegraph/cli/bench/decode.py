"""A decoding step: Q turned, K turned into its cache, V into its own, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench.rotation import rotation
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import Call
from ropegraph.cli.bench.work import Handles, Work, ratio
from ropegraph.cli.bench.workload import H_KV, D, half_angles, heads, separate_heads

# Such a launch takes as long as launches do, whatever it moves.
AS_LAUNCH = 1.25


def positions(b: int, room: int, device: str = "cuda") -> Tensor:
    """Where each sequence is: in the first half of its cache."""
    return torch.arange(b, device=device, dtype=torch.int32) * (room // (2 * b))


def step(b: int, s: int, room: int, order: str, device: str = "cuda") -> Work:
    """The new rows of b sequences, into caches of ``room`` rows in this order of memory."""
    caches = {f"{n}_cache": heads((b, H_KV, room, D), order, device) for n in "kv"}
    x = separate_heads(b, s, device)
    given = {"freqs": half_angles(room, device), "at": positions(b, room, device)}

    def record(g: rg.pygraph, t: Handles) -> None:
        turn: dict[str, Any] = {"freqs": t["freqs"], "start_positions": t["at"], "half_width": True}
        q = g.rope(t["q"], **turn)
        q.set_output(True).set_name("q_rot").set_stride(x["q"].stride())
        g.rope(t["k"], **turn, cache=t["k_cache"], cache_positions=t["at"])
        g.cache_write(t["v"], cache=t["v_cache"], cache_positions=t["at"])

    return Work("a decoding step", {**x, **given, **caches}, record, changed=tuple(caches))


def alone(b: int, s: int, room: int, device: str = "cuda") -> Work:
    """Q and K turned at the same positions, and no more."""
    given = {"freqs": half_angles(room, device), "start_positions": positions(b, room, device)}
    return rotation(separate_heads(b, s, device), given, half_width=True)


def by_torch(turn: Work, v: Tensor, caches: tuple[Tensor, Tensor]) -> Call:
    """The rotation, then K and V into caches [b, h, room, D] by torch's writes at an index."""
    b, _, s, _ = v.shape
    at, device = turn.inputs["start_positions"], v.device
    entry = torch.arange(b, device=device)[:, None]
    index = at.long()[:, None] + torch.arange(s, device=device)

    def run() -> None:
        turn()
        for cache, x in zip(caches, (turn.pack["k_rot"], v), strict=True):
            cache[entry, :, index] = x.transpose(1, 2)

    return run


def rows(b: int = 64, room: int = 2048, device: str = "cuda") -> list[Row]:
    """One new row, and four, in caches of both orders."""
    found: list[Row] = []
    for s in (1, 4):
        for order in ("bshd", "bhsd"):
            work, turn = step(b, s, room, order, device), alone(b, s, room, device)
            caches = (work.inputs["k_cache"], work.inputs["v_cache"])
            works = {
                "ours": work,
                "rope alone": turn,
                "rope, then torch's writes": by_torch(turn, work.inputs["v"], caches),
            }
            name = f"rope Q+K, K and V into {order} caches of {room} rows, beside rope, b{b} s{s}"
            found.append(ratio(name, works, AS_LAUNCH))
    return found
