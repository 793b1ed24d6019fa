"""Random rotary attentions whose q_rot, k_rot and stats were made by hand, rightly or wrongly."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.api.scale_fit import rounding
from ropegraph.testing import oracle

Wrong = Literal["", "q", "k", "split", "stats", "both"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"fold": "off"},
    {"fold": "q"},
    {"fold": "symmetric"},
    {"fold": "q", "fold_log2": True},
    {"fold": "symmetric", "fold_log2": True},
)
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"right": 0},
    {"right": 0, "left": 4},
    {"right": 0, "bottom_right": True},
)
INV_LN2 = 1 / math.log(2)


@dataclass(frozen=True)
class Case:
    """One attention: its backward graph, and how to make what that reads."""

    dtype: torch.dtype
    settings: dict[str, Any]
    b: int
    h_q: int
    h_kv: int
    s_q: int
    s_kv: int
    d: int
    rotated: int
    attn_scale: float
    mask: dict[str, Any]
    forward: rg.pygraph
    backward: rg.pygraph
    freqs: Tensor

    @property
    def unit(self) -> float:
        return rounding(self.dtype)

    @property
    def scales(self) -> tuple[float, float]:
        """What q_rot and k_rot carry, worked out by hand from the fold table."""
        a = self.attn_scale
        root = math.sqrt(a)
        q, k = {"off": (1.0, 1.0), "q": (a, 1.0), "symmetric": (root, root)}[self.settings["fold"]]
        return (q * INV_LN2 if self.settings.get("fold_log2") else q), k

    def keep(self) -> Tensor | None:
        return oracle.band(self.s_q, self.s_kv, **self.mask) if self.mask else None

    def made_by_engine(self, rng: random.Random) -> tuple[Any, Any, Any]:
        """The forward's pack, executed, the backward's pack of its results, and raw q and k."""
        pack, raw = self.pack(rng, "", 0.0)
        ahead = {"q": raw["q_rot"], "k": raw["k_rot"], "v": pack["v"], "freqs": self.freqs}
        made = ("o", "stats", "q_rot", "k_rot")
        ahead |= {name: torch.full_like(pack[name], torch.nan) for name in made}
        self.forward.execute(ahead)
        return ahead, pack | {name: ahead[name] for name in made}, raw

    def pack(self, rng: random.Random, wrong: Wrong, delta: float) -> tuple[Any, Any]:
        """The backward's variant pack, and raw q and k.  delta: by how much a scale is off."""
        gen = torch.Generator().manual_seed(rng.randrange(2**31))

        def normal(*dim: int) -> Tensor:
            x = torch.randn(dim, generator=gen, dtype=torch.float64)
            return x.to(torch.float32).to(self.dtype)

        q = normal(self.b, self.h_q, self.s_q, self.d)
        k = normal(self.b, self.h_kv, self.s_kv, self.d)
        v = normal(self.b, self.h_kv, self.s_kv, self.d)
        up, down = 1 + delta, 1 / (1 + delta)
        on_q, on_k = {"q": (up, 1.0), "k": (1.0, up), "split": (up, down), "both": (up, 1.0)}.get(
            wrong, (1.0, 1.0)
        )
        half = self.freqs[:, 0, 0, : self.rotated // 2]
        scale_q, scale_k = self.scales
        turned_q = oracle.rope(q, half[: self.s_q], output_scale=scale_q * on_q).to(self.dtype)
        turned_k = oracle.rope(k, half[: self.s_kv], output_scale=scale_k * on_k).to(self.dtype)
        # "both": the forward attended with the wrong rows, so stats agree with them.
        true_q, true_k = turned_q, turned_k
        if wrong in ("q", "k"):
            true_q = oracle.rope(q, half[: self.s_q], output_scale=scale_q).to(self.dtype)
            true_k = oracle.rope(k, half[: self.s_kv], output_scale=scale_k).to(self.dtype)
        rest = 1.0 if self.settings["fold"] != "off" else self.attn_scale
        o, stats = oracle.attention(
            true_q,
            true_k,
            v,
            attn_scale=rest * (up if wrong == "stats" else 1.0),
            keep=self.keep(),
            softmax_input_is_log2=self.settings.get("fold_log2", False),
        )
        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        pack = {
            "q_rot": turned_q,
            "k_rot": turned_k,
            "v": v,
            "o": o.to(self.dtype),
            "stats": stats.to(wide),
            "do": normal(*o.shape),
            "freqs": self.freqs,
        }
        grads = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        pack = {name: x for name, x in pack.items() if name in self.backward.saved or name == "do"}
        return pack | grads, {"q_rot": q, "k_rot": k}


def random_case(rng: random.Random) -> Case:
    dtype = rng.choice(DTYPES)
    settings = rng.choice(SETTINGS)
    is_wide = dtype in (torch.float32, torch.float64)
    h_kv = rng.choice((1, 2, 3))
    h_q = h_kv * rng.choice((1, 2, 3))
    d = rng.choice((8, 12, 16, 32))
    rotated = rng.choice((d, d // 2))
    rows = 900 if is_wide else 150
    s_q, s_kv = rng.randint(5, 24), rng.randint(5, 24)
    b = max(1, -(-rows // (h_q * s_q)))
    mask = rng.choice(
        ({}, {"right": 0}, {"right": 0, "left": 4}, {"right": 0, "bottom_right": True})
    )
    attn_scale = d**-0.5 * math.exp(rng.uniform(-0.5, 1.2))
    g = rg.pygraph(io_data_type=dtype, **settings)
    q = g.tensor((b, h_q, s_q, d), name="q")
    k, v = (g.tensor((b, h_kv, s_kv, d), name=n) for n in "kv")
    s = max(s_q, s_kv)
    freqs = g.tensor((s, 1, 1, rotated), data_type=torch.float32, name="freqs")
    options: dict[str, Any] = {}
    if "right" in mask:
        options["diagonal_band_right_bound"] = mask["right"]
    if "left" in mask:
        options["diagonal_band_left_bound"] = mask["left"]
    if "bottom_right" in mask:
        options["diagonal_alignment"] = rg.diagonal_alignment.BOTTOM_RIGHT
    o, stats = g.sdpa(
        g.rope(q, freqs, rope_dim=rotated, name="rope_q").set_name("q_rot"),
        g.rope(k, freqs, rope_dim=rotated, name="rope_k").set_name("k_rot"),
        v,
        attn_scale=attn_scale,
        name="attn",
        **options,
    )
    o.set_output(True).set_name("o")
    stats.set_name("stats")
    backward = g.backward_graph(outputs=[o], inputs=[q, k, v])
    half = oracle.angles(s, rotated, start=rng.randrange(1000))
    table = torch.cat([half, half], dim=1)[:, None, None, :]
    sizes = (b, h_q, h_kv, s_q, s_kv, d, rotated)
    return Case(dtype, settings, *sizes, attn_scale, mask, g, backward, table)


def random_delta(rng: random.Random, case: Case) -> float:
    """More than four roundings, up or down, most of them only just."""
    while True:
        size = case.unit * math.exp(rng.uniform(math.log(4.0), math.log(4000.0)))
        delta = min(size, 1.5) if rng.random() < 0.5 else -min(size, 0.8)
        off = abs(Fraction(1 + delta) - 1)
        if off > 4 * Fraction(case.unit) and 1 + delta != 1:
            return delta
