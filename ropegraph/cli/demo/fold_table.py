"""The fold table as the passes really left it, beside the table as it should be."""

from __future__ import annotations

import math
from typing import cast

import torch

from ropegraph.api.pygraph import pygraph
from ropegraph.cli.demo.accuracy import random_inputs
from ropegraph.cli.demo.graphs import SETTINGS, RotaryAttention, Setting, Sizes
from ropegraph.cli.demo.screen import table
from ropegraph.cli.demo.training import max_or_nan
from ropegraph.ir.ops import Attention, Rotation

COLUMNS = ("rope_q", "rope_k", "attn_scale", "is_log2", "rope_bwd_q", "rope_bwd_k")
INV_LN2 = 1 / math.log(2)


def expected(setting: Setting, a: float) -> tuple[float, ...]:
    """A row of the table, worked out by hand; False and True are 0 and 1."""
    q, k, rest = {
        "off": (1.0, 1.0, a),
        "q": (a, 1.0, 1.0),
        "symmetric": (math.sqrt(a), math.sqrt(a), 1.0),
    }[setting.fold]
    q *= INV_LN2 if setting.fold_log2 else 1.0
    return q, k, rest, float(setting.fold_log2), q, k


def found(graphs: RotaryAttention) -> tuple[float, ...]:
    """The same row, read off the lowered forward and backward graph."""
    ahead, back = _scales(graphs.forward), _scales(graphs.backward)
    if ahead["attention"] != back["attention_backward"]:
        return (math.nan,) * len(COLUMNS)
    attn_scale, is_log2 = ahead["attention"]
    (q, _), (k, _) = ahead["rope_q"], ahead["rope_k"]
    (q_back, _), (k_back, _) = back["rope_q_backward"], back["rope_k_backward"]
    return q, k, attn_scale, is_log2, q_back, k_back


def _scales(graph: pygraph) -> dict[str, tuple[float, float]]:
    """Node name -> its scale, and whether it reads base-2 logits; a pair's parts by themselves."""
    scales: dict[str, tuple[float, float]] = {}
    for node in graph.plan.graph.singles:
        attrs = node.attrs
        if isinstance(attrs, Rotation):
            scales[node.name] = attrs.output_scale, 0.0
        elif isinstance(attrs, Attention):
            scales[node.name] = cast(float, attrs.attn_scale), float(attrs.softmax_input_is_log2)
    return scales


def gap(graphs: RotaryAttention, setting: Setting) -> float:
    """The largest error of a scale in either lowered graph, relative where it is above 1."""
    right = expected(setting, graphs.sizes.attn_scale)
    return max_or_nan([abs(x - y) / max(y, 1.0) for x, y in zip(found(graphs), right, strict=True)])


def check(sizes: Sizes) -> tuple[str, float]:
    """Lower both graphs under every setting. Returns the table found, and its largest error."""
    freqs = random_inputs(sizes, torch.float32).freqs
    rows: list[tuple[str, ...]] = []
    gaps: list[float] = []
    for setting in SETTINGS:
        graphs = RotaryAttention(sizes, setting, freqs, torch.float32)
        gaps.append(gap(graphs, setting))
        launches = len(graphs.forward.plan.steps), len(graphs.backward.plan.steps)
        row = (f"{x:.6g}" for x in found(graphs))
        rows.append((setting.name, *row, "{} + {}".format(*launches)))
    return table(("fold", *COLUMNS, "launches"), rows), max_or_nan(gaps)
