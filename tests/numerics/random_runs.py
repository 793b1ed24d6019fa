"""A random graph recorded on pygraph, with its inputs, and evaluated by the oracle."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import ropegraph
from ropegraph.testing import oracle
from ropegraph.testing.inputs import normal
from tests.numerics.random_graphs import Branch, Problem, name_of, stages, table_name


def data(p: Problem, seed: int = 0) -> dict[str, Tensor]:
    """Every input by name, and ``do<i>`` for every output."""
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    found = {
        name: normal(dim, p.dtype, p.layouts[name], seed + i)
        for i, (name, dim) in enumerate(p.dims.items())
    }
    for branch in p.branches:
        if branch.turn is not None:
            found[table_name(branch)] = _table(p, branch, seed)
    for i, a in enumerate(p.attends):
        if a.bias is not None:
            found[f"bias{i}"] = normal(a.bias, wide, seed=seed + 20 + i)
        (b, h_q, s_q, _), d_v = p.dim(a.q), p.dims[a.v][3]
        if a.has_sink:
            found[f"sink{i}"] = normal((1, h_q, 1, 1), wide, seed=seed + 30 + i)
        found[f"do{i}"] = normal((b, h_q, s_q, d_v), p.dtype, "bshd", seed + 40 + i)
    if p.lengths is not None:
        for name, lengths in zip(("len_q", "len_kv"), p.lengths, strict=True):
            found[name] = torch.tensor(lengths, dtype=torch.int64).reshape(-1, 1, 1, 1)
    return found


def _table(p: Problem, branch: Branch, seed: int) -> Tensor:
    """A full-width table [s + 1, 1 or b, 1, r] whose unread columns are NaN."""
    assert branch.turn is not None
    b, _, s, _ = p.dims[branch.source]
    r = branch.turn.rope_dim
    rows = oracle.angles(s + 1, r).reshape(s + 1, 1, 1, r // 2)
    if p.table_per_batch:
        rows = rows + normal((1, b, 1, 1), seed=seed + 50)
    unread = torch.full_like(rows, torch.nan)
    if branch.turn.table_layout == "first_half":
        return torch.cat([rows, unread], dim=3)
    return torch.stack([rows, unread], dim=4).flatten(3)


def record(p: Problem, given: Mapping[str, Tensor], **settings: Any) -> ropegraph.pygraph:
    """The graph, not built yet: outputs o<i>, stats<i>, and what branches let the caller see."""
    g = ropegraph.pygraph(io_data_type=p.dtype, **settings)
    t = {n: g.tensor_like(x, name=n) for n, x in given.items() if not n.startswith("do")}
    nodes = _Nodes(g, t)
    made = {b.name: nodes.branch(b) for b in p.branches}
    for i, a in enumerate(p.attends):
        left, right, bottom_right = a.band
        o, stats = g.sdpa(
            made[a.q],
            made[a.k],
            t[a.v],
            attn_scale=a.attn_scale,
            name=f"attn{i}",
            generate_stats=True,
            diagonal_band_left_bound=left,
            diagonal_band_right_bound=right,
            diagonal_alignment="BOTTOM_RIGHT" if bottom_right else "TOP_LEFT",
            bias=t.get(f"bias{i}"),
            softcap=a.softcap,
            sink_token=t.get(f"sink{i}"),
            use_alibi_mask=a.has_alibi,
            softmax_input_is_log2=a.is_log2,
            use_padding_mask=p.lengths is not None,
            seq_len_q=t.get("len_q"),
            seq_len_kv=t.get("len_kv"),
        )
        if a.after is not None:
            o = g.scale(o, a.after, name=f"after{i}")
        o.set_output(True).set_name(f"o{i}")
        stats.set_output(True).set_name(f"stats{i}")
    return g


class _Nodes:
    """Records branches, each stage once however many branches begin with it."""

    def __init__(self, g: ropegraph.pygraph, t: Mapping[str, Any]) -> None:
        self.g, self.t = g, t
        self.made: dict[Any, Any] = {}

    def branch(self, branch: Branch) -> Any:
        x: Any = self.t[branch.source]
        for stage in stages(branch):
            if stage not in self.made:
                self.made[stage] = self._stage(stage, x, branch).set_name(name_of(stage))
            x = self.made[stage]
            if stage[-1] in branch.sees:
                x.set_output(True)
        return x

    def _stage(self, stage: tuple[Any, ...], x: Any, branch: Branch) -> Any:
        if stage[-1] != "turn":
            return self.g.scale(x, stage[-2], name=f"scale_{name_of(stage)}")
        assert branch.turn is not None
        table, turn = self.t[table_name(branch)], dict(vars(branch.turn))
        return self.g.rope(x, table, name=f"rope_{name_of(stage)}", **turn)


def evaluate(p: Problem, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """O and Stats by the oracle, and d<x> of every leaf and stage of a branch for given do<i>."""
    leaves = {n: oracle.leaf(given[n]) for n in p.leaves}
    inner: dict[Any, Tensor] = {}
    made = {b.name: _evaluate_branch(b, leaves[b.source], given, inner) for b in p.branches}
    found: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for i, a in enumerate(p.attends):
        left, right, bottom_right = a.band
        (_, h_q, s_q, _), s_kv = p.dim(a.q), p.dim(a.k)[2]
        len_q, len_kv = p.lengths or (None, None)
        bias = leaves.get(f"bias{i}")
        if a.has_alibi:
            slopes = oracle.alibi(h_q, s_q, s_kv)
            bias = slopes if bias is None else bias + slopes
        cap = a.softcap
        o, stats = oracle.attention(
            made[a.q],
            made[a.k],
            leaves[a.v],
            attn_scale=1.0 if a.attn_scale is None else a.attn_scale,
            keep=oracle.band(
                s_q,
                s_kv,
                left=left,
                right=right,
                bottom_right=bottom_right,
                len_q=len_q,
                len_kv=len_kv,
            ),
            bias=bias,
            score_mod=None if cap is None else lambda x, cap=cap: cap * torch.tanh(x / cap),
            sink=leaves.get(f"sink{i}"),
            softmax_input_is_log2=a.is_log2,
        )
        o = o if a.after is None else a.after * o
        found |= {f"o{i}": o, f"stats{i}": stats}
        total = total + (o * given[f"do{i}"].double()).sum()
    wanted = leaves | {name_of(stage): x for stage, x in inner.items()}
    grads = torch.autograd.grad(total, tuple(wanted.values()), materialize_grads=True)
    found |= {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def _evaluate_branch(
    branch: Branch, x: Tensor, given: Mapping[str, Tensor], made: dict[Any, Tensor]
) -> Tensor:
    for stage in stages(branch):
        if stage not in made:
            made[stage] = stage[-2] * x if stage[-1] != "turn" else _turned(branch, x, given)
        x = made[stage]
    return x


def _turned(branch: Branch, x: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    assert branch.turn is not None
    turn = branch.turn
    table = given[table_name(branch)][: x.shape[2]]
    half = turn.rope_dim // 2
    angles = table[..., :half] if turn.table_layout == "first_half" else table[..., ::2]
    return oracle.rope(
        x,
        angles.permute(1, 2, 0, 3),
        rope_offset=turn.rope_offset,
        interleaved=turn.interleaved,
        interleaved_output=turn.interleaved_output,
        output_scale=turn.output_scale,
        attention_factor=turn.attention_factor,
        inverse=turn.inverse,
    )
