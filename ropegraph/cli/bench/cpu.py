"""The CPU's rows: rope + causal attention beside the usual formula and torch's own attention."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import paired
from ropegraph.functional import attention

PROCESSES = 5
PLAIN = "rotate-half + F.sdpa"


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as most model code does: one product with cos, one of the swapped halves with sin."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


@dataclass
class Case:
    """Inputs of one size, and both ways to rotate and attend; results are compared when made."""

    b: int
    h: int
    s: int
    d: int

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        shape = (self.b, self.h, self.s, self.d)
        self.q, self.k, self.v, self.do = (torch.randn(shape) for _ in range(4))
        rows = torch.arange(self.s, dtype=torch.float32)
        inv_freq = 10000.0 ** (-torch.arange(0, self.d, 2, dtype=torch.float32) / self.d)
        angles = torch.outer(rows, inv_freq).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.freqs = angles[:, None, None, :]

    def graph(self) -> rg.pygraph:
        """The forward graph, recorded but not built."""
        dim = [self.b, self.h, self.s, self.d]
        graph = rg.pygraph(io_data_type=torch.float32)
        q, k, v = (graph.tensor(dim, name=name) for name in "qkv")
        freqs = graph.tensor(self.freqs.shape, data_type=torch.float32, name="freqs")
        o, _ = graph.sdpa(
            q=graph.rope(q, freqs, name="rope_q"),
            k=graph.rope(k, freqs, name="rope_k"),
            v=v,
            attn_scale=self.d**-0.5,
            use_causal_mask=True,
            name="attn",
        )
        o.set_output(True).set_name("o")
        return graph

    def forward_pair(self) -> tuple[Callable[[], object], Callable[[], object]]:
        graph = self.graph()
        graph.build()
        o = torch.empty_like(self.q)
        pack = {"q": self.q, "k": self.k, "v": self.v, "freqs": self.freqs, "o": o}
        graph.execute(pack)
        torch.testing.assert_close(o, self.plain(self.q, self.k, self.v), atol=1e-5, rtol=1e-5)
        return lambda: graph.execute(pack), lambda: self.plain(self.q, self.k, self.v)

    def step_pair(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward and backward, ours by two graphs, theirs by autograd."""
        forward = self.graph()
        backward = forward.backward_graph(outputs=["o"], inputs=["q", "k", "v"])
        forward.build()
        backward.build()
        pack: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "freqs": self.freqs}
        pack |= forward.allocate()
        grads = {f"d{name}": torch.empty_like(self.q) for name in "qkv"}
        back = {**{name: pack[name] for name in backward.saved}, "do": self.do, **grads}

        def ours() -> None:
            forward.execute(pack)
            backward.execute(back)

        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]

        def plain() -> tuple[Tensor, ...]:
            return torch.autograd.grad(self.plain(*leaves), leaves, self.do)

        ours()
        for grad, want in zip(grads.values(), plain(), strict=True):
            torch.testing.assert_close(grad, want, atol=1e-4, rtol=1e-4)
        return ours, plain

    def autograd_pair(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """The same step through autograd on both sides, results and gradients allocated."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]

        def step(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(run(*leaves), leaves, self.do)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, self.freqs, is_causal=True)

        torch.testing.assert_close(step(ours), step(self.plain), atol=1e-4, rtol=1e-4)
        return lambda: step(ours), lambda: step(self.plain)

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (rotate_half(x, self.cos, self.sin) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rows(names: Sequence[str]) -> list[Row]:
    """Measure these groups in several fresh processes; each figure is the median over them.

    How the allocator places torch's temporaries differs from process to process, and moves the
    ratios by up to a tenth; within one process it stays as it is.
    """
    runs: list[list[Row]] = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for run in pool.imap(_rows_once, [names] * PROCESSES):
            runs.append(run)
            done = f"measured {', '.join(names)} in {len(runs)} of {PROCESSES} processes"
            print(done, file=sys.stderr, flush=True)
    return [_median(same) for same in zip(*runs, strict=True)]


def _median(same: Sequence[Row]) -> Row:
    """One row measured several times, as its medians."""
    first = same[0]
    return replace(
        first,
        ours_us=statistics.median(row.ours_us for row in same),
        value=statistics.median(row.value for row in same),
        others={n: statistics.median(row.others[n] for row in same) for n in first.others},
    )


def _rows_once(names: Sequence[str]) -> list[Row]:
    """The rows of these groups, in this process, with two threads."""
    torch.set_num_threads(2)
    return [row for name in names for row in GROUPS[name]()]


def _attention() -> list[Row]:
    found: list[Row] = []
    sizes = ((1024, "f32 b1 h8 s1024 d64", 30), (4096, "f32 b1 h8 s4096 d64", 5))
    for s, name, rounds in sizes:
        case = Case(1, 8, s, 64)
        if s == 1024:
            t = paired(*case.forward_pair(), rounds)
            work = f"rope + causal SDPA forward, {name}"
            found.append(Row(work, t.ours_us, t.ratio, 0.9, "x", {PLAIN: t.other_us}))
        t = paired(*case.step_pair(), rounds)
        work = f"forward + backward, {name}"
        found.append(Row(work, t.ours_us, t.ratio, 1.0, "x", {f"{PLAIN}, autograd": t.other_us}))
    return found


def _training() -> list[Row]:
    t = paired(*Case(1, 8, 1024, 64).autograd_pair(), 30)
    work = "training step by autograd, f32 b1 h8 s1024 d64"
    return [Row(work, t.ours_us, t.ratio, 0.95, "x", {f"{PLAIN}, autograd": t.other_us})]


def _host() -> list[Row]:
    t = paired(*Case(1, 1, 1, 8).forward_pair(), 30, calls=200)
    more = t.ours_us - t.other_us
    build_us = _build_us()
    return [
        Row("execute, b1 h1 s1 d8", t.ours_us, more, 60.0, "us more", {PLAIN: t.other_us}),
        Row("build of a forward graph", build_us, build_us / 1e3, 5.0, "ms"),
    ]


def _build_us() -> float:
    case = Case(1, 8, 1024, 64)
    times: list[float] = []
    for _ in range(50):
        start = time.perf_counter()
        case.graph().build()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "attention": _attention,
    "training": _training,
    "host": _host,
}
