"""Q and K turned in one launch, beside a copy and what else is installed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench import peers
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import device_in_turn, device_us
from ropegraph.cli.bench.work import Handles, Work, copy_of
from ropegraph.cli.bench.workload import angles, packed_views, separate_heads, tables


def rotation(
    x: Mapping[str, Tensor], given: Mapping[str, Tensor], op: str = "rope", **attributes: object
) -> Work:
    """Q and K through rope or rope_backward.  given: angles and positions, by rope's keywords."""

    def record(g: rg.pygraph, t: Handles) -> None:
        for n in "qk":
            turned = getattr(g, op)(t[n], **{p: t[p] for p in given}, **attributes)
            turned.set_output(True).set_name(f"{n}_rot").set_stride(x[n].stride())

    return Work(f"{op} of Q and K", {n: x[n] for n in "qk"} | {**given}, record)


def in_place(work: Work) -> Work:
    """The same, from now on over its Q and K."""
    work.pack |= {f"{n}_rot": work.pack[n] for n in "qk"}
    return work


def rows() -> list[Row]:
    """Three sizes; the first of them also within packed QKV."""
    found: list[Row] = []
    for b, s, target in ((2, 8192, 91), (1, 131_072, 655), (1, 2048, 17)):
        found += _both_ways(b, s, target)
        if (b, s) == (2, 8192):
            us = device_us(in_place(rotation(packed_views(b, s), {"freqs": angles(s)})))
            work = f"rope Q+K in place in packed QKV, b{b} s{s}"
            found.append(Row.of_time(work, us, target))
    return found


def _both_ways(b: int, s: int, target: float) -> list[Row]:
    x, freqs = separate_heads(b, s), angles(s)
    work = rotation(x, {"freqs": freqs})
    others = device_in_turn({"ours": work, "copy": copy_of(work)})
    us = others.pop("ours")
    cos, sin = tables(freqs)
    back = device_us(rotation(x, {"freqs": freqs}, "rope_backward"))
    # After ours: Liger turns Q and K themselves.
    for name, turn in peers.rotations().items():
        others[name] = device_us(lambda turn=turn: turn(x["q"], x["k"], cos, sin))
    return [
        Row.of_time(f"rope Q+K, b{b} s{s}", us, target, others),
        Row.of_time(f"rope_backward Q+K, b{b} s{s}", back, target),
    ]
