"""The GPU's rows: bf16, d 128, h 32 / 8, causal, beside what else is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

import ropegraph as rg
from ropegraph.cli.bench import autograd, peers
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import device_in_turn, device_us, host_us
from ropegraph.cli.bench.workload import BF16, H_KV, H_Q, SPLIT, D, angles, tables
from ropegraph.execution.replay import KEPT

Buffers = dict[str, Any]


def separate_heads(b: int, s: int) -> Buffers:
    """q, k and v as [b, h, s, d] views, each of a tensor [b, s, h, d] of its own."""
    return {
        n: torch.randn(b, s, h, D, device="cuda", dtype=BF16).transpose(1, 2)
        for n, h in zip("qkv", SPLIT, strict=True)
    }


def packed_views(b: int, s: int) -> Buffers:
    """The same as views of one tensor [b, s, h_q + 2 h_kv, d]."""
    qkv = torch.randn(b, s, sum(SPLIT), D, device="cuda", dtype=BF16).transpose(1, 2)
    return dict(zip("qkv", torch.split(qkv, list(SPLIT), dim=1), strict=True))


def rotation(op: str, x: Buffers, s: int) -> Callable[[], object]:
    """Q and K through rope or rope_backward: one launch."""
    g = rg.pygraph(io_data_type=BF16)
    freqs = angles(s)
    f = g.tensor_like(freqs, name="freqs")
    pack: Buffers = {"freqs": freqs}
    for n in "qk":
        turned = getattr(g, op)(g.tensor_like(x[n], name=n), f, name=f"{op}_{n}")
        turned.set_output(True).set_name(f"{n}_rot").set_stride(x[n].stride())
        pack |= {n: x[n], f"{n}_rot": x.get(f"{n}_rot", torch.empty_like(x[n]))}
    g.build()
    if len(g.plan.steps) != 1:
        raise AssertionError(f"Q and K took {len(g.plan.steps)} launches")
    return lambda: g.execute(pack)


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
    """Measure every row.  Raises AssertionError if a result is wrong."""
    torch.manual_seed(0)
    # First: torch.compile leaves worker processes behind, which take their share of the host.
    host = _host()
    found: list[Row] = []
    for b, s, target in ((2, 8192, 91), (1, 131_072, 655), (1, 2048, 17)):
        found += _rotations(b, s, target)
    found += _attention(2, 8192, 1995.0, 1915.0)
    found += _attention(1, 2048, 101.0, None)
    found += host
    found.append(_training_step(1, 512))
    found += autograd.rows()
    return found


def _rotations(b: int, s: int, target: float) -> list[Row]:
    x = separate_heads(b, s)
    _check(x, s)
    both = torch.randn(b * s * (H_Q + H_KV) * D, device="cuda", dtype=BF16)
    target_buffer = torch.empty_like(both)
    others = {"copy": device_us(lambda: target_buffer.copy_(both))}
    cos, sin = tables(angles(s))
    for name, turn in peers.rotations().items():
        others[name] = device_us(lambda turn=turn: turn(x["q"], x["k"], cos, sin))
    us = device_us(rotation("rope", x, s))
    found = [Row.of_time(f"rope Q+K, b{b} s{s}", us, target, others)]
    us = device_us(rotation("rope_backward", x, s))
    found.append(Row.of_time(f"rope_backward Q+K, b{b} s{s}", us, target))
    if (b, s) == (2, 8192):
        x = packed_views(b, s)
        x |= {"q_rot": x["q"], "k_rot": x["k"]}
        us = device_us(rotation("rope", x, s))
        found.append(Row.of_time(f"rope Q+K in place in packed QKV, b{b} s{s}", us, 91))
    return found


def _check(x: Buffers, s: int) -> None:
    """Relative error of the rotation against fp64, on the first rows and the last."""
    out = {f"{n}_rot": torch.full_like(x[n], torch.nan) for n in "qk"}
    rotation("rope", {**x, **out}, s)()
    for n in "qk":
        for rows in (slice(0, 64), slice(s - 64, s)):
            t = angles(s)[rows, 0, 0, : D // 2].double()
            a, b = x[n][:, :, rows].double().chunk(2, dim=-1)
            want = torch.cat((a * t.cos() - b * t.sin(), b * t.cos() + a * t.sin()), dim=-1)
            got = out[f"{n}_rot"][:, :, rows].double()
            error = float(torch.dist(got, want)) / float(torch.dist(want, torch.zeros_like(want)))
            if not error <= 1.70e-3:
                raise AssertionError(f"rope of {n}: relative error {error:.3g}")


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


def _host() -> list[Row]:
    """Host time of one execute of the forward graph: launches hidden, queue idle."""
    ours = Attention(separate_heads(1, 256), 256)
    x = ours.pack
    # More than captures are kept of: none of them is a replay.
    outputs = [torch.empty_like(x["o"]) for _ in range(KEPT + 20)]

    def other(i: int) -> None:
        ours.forward.execute({**x, "o": outputs[i % len(outputs)]})

    same = host_us(lambda _: ours.forward.execute(x))
    new = host_us(other)
    plain = host_us(lambda _: peers.attention(x["q"], x["k"], x["v"]))
    work = "host time of execute, b1 s256"
    return [
        Row.of_time(f"{work}, the same buffers", same, 8.0, {"F.sdpa alone": plain}),
        Row.of_time(f"{work}, new buffers", new, 22.0),
    ]


def _training_step(b: int, s: int) -> Row:
    """Wall time of forward and backward, the device waited for; the others by autograd."""
    ours = Attention(packed_views(b, s), s, grads=True)

    def step(_: int) -> None:
        ours.step()
        torch.cuda.synchronize()

    x = separate_heads(b, s)
    cos, sin = tables(angles(s))
    leaves = [x[n].detach().requires_grad_() for n in "qkv"]
    do = torch.randn(b, H_Q, s, D, device="cuda", dtype=BF16)

    def plain(turn: peers.Turn) -> None:
        q, k = turn(leaves[0], leaves[1], cos, sin)
        torch.autograd.grad(peers.attention(q, k, leaves[2]), leaves, do)
        torch.cuda.synchronize()

    # Liger's function here has no autograd of its own.
    turns = {n: t for n, t in peers.rotations().items() if n != "Liger"}
    others = {f"{n} + F.sdpa": host_us(lambda _, t=t: plain(t)) for n, t in turns.items()}
    us = host_us(step)
    return Row.of_time(f"wall time of a training step, packed, b{b} s{s}", us, 150.0, others)
