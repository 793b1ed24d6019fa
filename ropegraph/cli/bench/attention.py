"""Rope + causal sdpa by graphs, forward and backward, beside what else is installed."""

from __future__ import annotations

from typing import Any, cast

import torch

import ropegraph as rg
from ropegraph.cli.bench import peers
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import Call, device_in_turn, device_us
from ropegraph.cli.bench.workload import (
    BF16,
    H_Q,
    D,
    angles,
    packed_views,
    separate_heads,
    tables,
)

Buffers = dict[str, Any]


class Attention:
    """The forward and, if wanted, the backward graph of rope + sdpa on given buffers.

    x: q, k and v; packed_views() for grads.  in_place: Q and K turn where they lie.
    rotated: False leaves attention alone.
    """

    def __init__(
        self, x: Buffers, *, in_place: bool = False, grads: bool = False, rotated: bool = True
    ) -> None:
        b, _, s, _ = x["q"].shape
        g = rg.pygraph(io_data_type=BF16, fold="q")
        freqs = angles(s)
        t = {n: g.tensor_like(x[n], name=n) for n in "qkv"}
        f = g.tensor_like(freqs, name="freqs")
        self.pack: Buffers = {"freqs": freqs, **{n: x[n] for n in "qkv"}}
        for n in "qk" if rotated else "":
            t[n] = g.rope(t[n], f, name=f"rope_{n}").set_name(f"{n}_rot")
            if in_place:
                t[n].set_output(True).set_stride(x[n].stride())
                self.pack[f"{n}_rot"] = x[n]
        o, _ = g.sdpa(t["q"], t["k"], t["v"], D**-0.5, use_causal_mask=True, name="attn")
        o.set_output(True).set_name("o").set_stride((s * H_Q * D, D, H_Q * D, 1))
        self.back = g.backward_graph(["o"], ["q", "k", "v"]) if grads else None
        g.build()
        self.graph = g
        self.pack = {**g.allocate(), **self.pack}
        self.back_pack: Buffers = {}
        if self.back is not None:
            self.back.build()
            self.back_pack = {n: self.pack[n] for n in self.back.saved}
            self.back_pack["do"] = torch.randn_like(self.pack["o"])
            self.back_pack |= {f"d{n}": x for n, x in packed_views(b, s).items()}

    def forward(self) -> None:
        self.graph.execute(self.pack)

    def step(self) -> None:
        self.forward()
        cast(rg.pygraph, self.back).execute(self.back_pack)


def rows() -> list[Row]:
    """Two sizes; the first of them also from packed QKV, and with its gradient."""
    return [*_attention(2, 8192, 1995.0, 1915.0), *_attention(1, 2048, 101.0, None)]


def _attention(b: int, s: int, separate: float, packed: float | None) -> list[Row]:
    size = f"b{b} s{s}"
    x = separate_heads(b, s)
    cos, sin = tables(angles(s))
    others = {"SDPA alone": device_us(Attention(x, rotated=False).forward)}
    for name, turn in peers.rotations().items():
        others[f"{name} + F.sdpa"] = device_us(
            lambda turn=turn: peers.attention(*turn(x["q"], x["k"], cos, sin), x["v"])
        )
    ours = Attention(x)
    native = peers.native(ours.graph, ours.pack)
    if native is not None:
        others["cuDNN native"] = device_us(native)
    us = device_us(ours.forward)
    found = [Row.of_time(f"rope + SDPA forward, {size}", us, separate, others)]
    if packed is not None:
        x = packed_views(b, s)
        us = device_us(Attention(x).forward)
        found.append(Row.of_time(f"rope + SDPA forward from packed QKV, {size}", us, packed))
        us = device_us(Attention(x, in_place=True).forward)
        work = f"rope in place + SDPA forward in packed QKV, {size}"
        found.append(Row.of_time(work, us, packed))
        found += _steps(x, size)
    return found


def _steps(x: Buffers, size: str) -> list[Row]:
    """Forward and backward graphs: all take turns, for the card slows down as it warms."""
    apart, in_place, alone = (
        Attention(x, grads=True),
        Attention(x, grads=True, in_place=True),
        Attention(x, grads=True, rotated=False),
    )
    works: dict[str, Call] = {
        "packed": apart.step,
        "packed, in place": in_place.step,
        "SDPA alone": alone.step,
    }
    back = peers.native(cast(rg.pygraph, apart.back), apart.back_pack)
    forward = peers.native(apart.graph, apart.pack)
    if forward is not None and back is not None:
        works["cuDNN native"] = lambda: (forward(), back())
    times = device_in_turn(works)
    ours = {name: times.pop(name) for name in ("packed", "packed, in place")}
    work = "forward + backward graph"
    return [Row.of_time(f"{work}, {n}, {size}", us, 7560.0, times) for n, us in ours.items()]
