"""Rope + causal sdpa by graphs, forward and backward, beside what else is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

import ropegraph as rg
from ropegraph.cli.bench import peers
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import device_in_turn, device_us
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
    """The forward and, if wanted, the backward graph of rope + sdpa on given buffers."""

    def __init__(
        self,
        x: Buffers,
        s: int,
        in_place: bool = False,
        grads: bool = False,
        rotated: bool = True,
    ) -> None:
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
        b, _, _, _ = x["q"].shape
        o.set_output(True).set_name("o").set_stride((s * H_Q * D, D, H_Q * D, 1))
        self.back = g.backward_graph(["o"], ["q", "k", "v"]) if grads else None
        g.build()
        self.forward = g
        self.pack = {**g.allocate(), **self.pack}
        self.back_pack: Buffers = {}
        if self.back is not None:
            self.back.build()
            self.back_pack = {n: self.pack[n] for n in self.back.saved}
            self.back_pack["do"] = torch.randn_like(self.pack["o"])
            self.back_pack |= {f"d{n}": x for n, x in packed_views(b, s).items()}

    def step(self) -> None:
        self.forward.execute(self.pack)
        cast(rg.pygraph, self.back).execute(self.back_pack)


def rows() -> list[Row]:
    """Two sizes; the first of them also from packed QKV, and with its gradient."""
    return [*_attention(2, 8192, 1995.0, 1915.0), *_attention(1, 2048, 101.0, None)]


def _attention(b: int, s: int, separate: float, packed: float | None) -> list[Row]:
    size = f"b{b} s{s}"
    x = separate_heads(b, s)
    alone = _sdpa_alone(x, s)
    cos, sin = tables(angles(s))
    others = {"SDPA alone": device_us(alone)}
    for name, turn in peers.rotations().items():
        others[f"{name} + F.sdpa"] = device_us(
            lambda turn=turn: peers.attention(*turn(x["q"], x["k"], cos, sin), x["v"])
        )
    ours = Attention(x, s)
    native = peers.native(ours.forward, ours.pack)
    if native is not None:
        others["cuDNN native"] = device_us(native)
    us = device_us(lambda: ours.forward.execute(ours.pack))
    found = [Row.of_time(f"rope + SDPA forward, {size}", us, separate, others)]
    if packed is not None:
        x = packed_views(b, s)
        ours = Attention(x, s)
        us = device_us(lambda: ours.forward.execute(ours.pack))
        found.append(Row.of_time(f"rope + SDPA forward from packed QKV, {size}", us, packed))
        ours = Attention(x, s, in_place=True)
        us = device_us(lambda: ours.forward.execute(ours.pack))
        work = f"rope in place + SDPA forward in packed QKV, {size}"
        found.append(Row.of_time(work, us, packed))
        found += _steps(x, s, size)
    return found


def _steps(x: Buffers, s: int, size: str) -> list[Row]:
    """Forward and backward graphs: all take turns, for the card slows down as it warms."""
    apart, in_place, alone = (
        Attention(x, s, grads=True),
        Attention(x, s, grads=True, in_place=True),
        Attention(x, s, grads=True, rotated=False),
    )
    works: dict[str, Callable[[], object]] = {
        "packed": apart.step,
        "packed, in place": in_place.step,
        "SDPA alone": alone.step,
    }
    back = peers.native(cast(rg.pygraph, apart.back), apart.back_pack)
    forward = peers.native(apart.forward, apart.pack)
    if forward is not None and back is not None:
        works["cuDNN native"] = lambda: (forward(), back())
    times = device_in_turn(works)
    ours = {name: times.pop(name) for name in ("packed", "packed, in place")}
    work = "forward + backward graph"
    return [Row.of_time(f"{work}, {n}, {size}", us, 7560.0, times) for n, us in ours.items()]


def _sdpa_alone(x: Buffers, s: int) -> Callable[[], object]:
    g = rg.pygraph(io_data_type=BF16)
    q, k, v = (g.tensor_like(x[n], name=n) for n in "qkv")
    o, _ = g.sdpa(q, k, v, D**-0.5, use_causal_mask=True)
    o.set_output(True).set_name("o").set_stride((s * H_Q * D, D, H_Q * D, 1))
    g.build()
    pack = {**{n: x[n] for n in "qkv"}, **g.allocate()}
    return lambda: g.execute(pack)
