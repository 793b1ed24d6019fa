"""Small graphs that ask which engine serves what on this machine, and why others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import ropegraph as rg
from ropegraph.cli.doctor.facts import asked
from ropegraph.engines import manifest

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
B, H_Q, H_KV, S, D = 2, 4, 2, 128, 64


@dataclass(frozen=True)
class Served:
    """An operation in one type: the engine of each launch, and the reasons of the others.

    trouble: what went wrong, where nothing could be asked.
    """

    op: str
    dtype: str
    engines: tuple[str, ...] = ()
    why_not: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    trouble: str = ""


class Sketch:
    """A new graph in one type, with the tensors that the probes read."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.g = rg.pygraph("probe", io_data_type=dtype)

    def tensor(self, name: str, *dim: int, dtype: torch.dtype | None = None) -> rg.tensor:
        return self.g.tensor(dim, data_type=dtype, name=name)

    @property
    def freqs(self) -> rg.tensor:
        return self.tensor("freqs", S, 1, 1, D, dtype=torch.float32)

    @property
    def qkv(self) -> list[rg.tensor]:
        return [self.tensor(n, B, h, S, D) for n, h in (("q", H_Q), ("k", H_KV), ("v", H_KV))]

    def rope(self) -> None:
        self.g.rope(self.qkv[0], self.freqs).set_output(True)

    def rope_backward(self) -> None:
        self.g.rope_backward(self.qkv[0], self.freqs).set_output(True)

    def sdpa(self) -> None:
        o, _ = self.g.sdpa(*self.qkv, attn_scale=D**-0.5, use_causal_mask=True)
        o.set_output(True)

    def sdpa_backward(self) -> None:
        o, do = self.tensor("o", B, H_Q, S, D), self.tensor("do", B, H_Q, S, D)
        wide = torch.float64 if self.g.recorder.io is rg.data_type.DOUBLE else torch.float32
        stats = self.tensor("stats", B, H_Q, S, 1, dtype=wide)
        q, k, v = self.qkv
        grads = self.g.sdpa_backward(q, k, v, o, do, stats, use_causal_mask=True)
        for grad in grads:
            grad.set_output(True)

    def rope_pair(self) -> None:
        freqs, (q, k, _) = self.freqs, self.qkv
        for x in (q, k):
            self.g.rope(x, freqs).set_output(True)

    def qkv_rope(self) -> None:
        qkv = self.tensor("qkv", B, S, H_Q + 2 * H_KV, D)
        q, k, v = self.g.qkv_rope(qkv, freqs=self.freqs, split=[H_Q, H_KV, H_KV])
        self.g.sdpa(q, k, v, attn_scale=D**-0.5)[0].set_output(True)

    def norm_rope(self) -> None:
        scale = self.tensor("scale", 1, 1, 1, D)
        phase = rg.norm_forward_phase.INFERENCE
        normed, _ = self.g.rmsnorm(phase, self.qkv[0], scale, epsilon=1e-6)
        self.g.rope(normed, self.freqs).set_output(True)

    def cache_rope(self) -> None:
        x, cache = self.tensor("x", B, H_KV, 1, D), self.tensor("cache", B, H_KV, S, D)
        at = self.tensor("at", B, dtype=torch.int32)
        self.g.rope(x, self.freqs, start_positions=at, cache=cache, cache_positions=at)

    def mla_kv_rope(self) -> None:
        kv, k_rope = self.tensor("kv", B, H_Q, S, 192), self.tensor("k_rope", B, 1, S, D)
        cos, sin = (self.tensor(n, S, 1, 1, D, dtype=torch.float32) for n in ("cos", "sin"))
        for made in self.g.mla_kv_rope(kv, k_rope, cos, sin, nope_dim=64):
            made.set_output(True)


PROBES: dict[str, Callable[[Sketch], None]] = {
    "rope": Sketch.rope,
    "rope_backward": Sketch.rope_backward,
    "sdpa": Sketch.sdpa,
    "sdpa_backward": Sketch.sdpa_backward,
    "rope of Q and K": Sketch.rope_pair,
    "qkv_rope + sdpa": Sketch.qkv_rope,
    "rmsnorm + rope": Sketch.norm_rope,
    "rope into a cache": Sketch.cache_rope,
    "mla_kv_rope": Sketch.mla_kv_rope,
}


def probe(op: str, dtype: str) -> Served:
    """Build one probe; compiling may still move a node to the next engine."""
    found = asked(lambda: _built(op, dtype))
    return Served(op, dtype, trouble=found) if isinstance(found, str) else found


def _built(op: str, dtype: str) -> Served:
    sketch = Sketch(DTYPES[dtype])
    PROBES[op](sketch)
    graph = sketch.g
    graph.build()
    engines = tuple(dict.fromkeys(step.engine for step in graph.plan.steps))
    why_not: dict[str, Any] = {}
    for engine in manifest.DEFAULT:
        rules = (rule for found in graph.why_not(engine).values() for rule in found)
        # That an engine has other operations than this one explains nothing.
        broken = tuple(dict.fromkeys(r for r in rules if not r.startswith("has no ")))
        if broken and engine not in engines:
            why_not[engine] = broken
    return Served(op, dtype, engines, why_not)
