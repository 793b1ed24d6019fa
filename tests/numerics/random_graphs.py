"""Random graphs as plain data: drawn by hypothesis, recorded, and evaluated by the oracle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from hypothesis import strategies as st
from torch import Tensor

import ropegraph
from ropegraph.testing import oracle
from ropegraph.testing.inputs import Layout, normal

LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd", "packed_qkv", "gapped", "odd_size_1")


@dataclass(frozen=True)
class Turn:
    """The attributes of one rope node."""

    rope_dim: int
    rope_offset: int
    interleaved: bool
    interleaved_output: bool
    inverse: bool
    table_layout: str
    output_scale: float
    attention_factor: float


@dataclass(frozen=True)
class Branch:
    """An input, maybe scaled, maybe rotated, maybe scaled again: what an attention reads.

    Branches that begin alike share those nodes: a rope may feed several scales, a scale several
    ropes.  sees: which stages are bound by the caller, of "before", "turn" and "after".
    """

    name: str
    source: str
    before: float | None
    turn: Turn | None
    after: float | None
    sees: frozenset[str]


@dataclass(frozen=True)
class Attend:
    """One sdpa node over branches q and k and input v."""

    q: str
    k: str
    v: str
    attn_scale: float | None
    band: tuple[int | None, int | None, bool]
    bias: tuple[int, int, int, int] | None
    softcap: float | None
    has_sink: bool
    has_alibi: bool
    is_log2: bool
    after: float | None


@dataclass(frozen=True)
class Problem:
    """A whole graph: sizes, inputs by name, branches and attentions."""

    dtype: torch.dtype
    dims: Mapping[str, tuple[int, int, int, int]]
    layouts: Mapping[str, Layout]
    branches: tuple[Branch, ...]
    attends: tuple[Attend, ...]
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None
    table_per_batch: bool

    def dim(self, branch: str) -> tuple[int, int, int, int]:
        return self.dims[next(b.source for b in self.branches if b.name == branch)]

    @property
    def outputs(self) -> list[str]:
        return [f"o{i}" for i in range(len(self.attends))]

    @property
    def leaves(self) -> list[str]:
        """The inputs that have a gradient."""
        extra = [(f"bias{i}", a.bias) for i, a in enumerate(self.attends)]
        extra += [(f"sink{i}", a.has_sink) for i, a in enumerate(self.attends)]
        used = {b.source for b in self.branches} | {a.v for a in self.attends}
        return [*sorted(used), *(name for name, given in extra if given)]


# Scales, 0 and negative ones and those where there is nothing to fold among them.
SCALES = st.sampled_from([None, 0.3, 0.125, 1.0, 1.7, -0.5, 0.0])
FACTORS = st.sampled_from([None, None, 0.5, -1.3, 2.0])
SEES = st.sampled_from(
    [frozenset[str]()] * 6 + [frozenset({x}) for x in ("before", "turn", "after")]
)


@st.composite
def turns(draw: Callable[..., Any], d: int) -> Turn:
    r = 2 * draw(st.integers(1, d // 2))
    return Turn(
        rope_dim=r,
        rope_offset=draw(st.integers(0, d - r)),
        interleaved=draw(st.booleans()),
        interleaved_output=draw(st.booleans()),
        inverse=draw(st.booleans()),
        table_layout=draw(st.sampled_from(["first_half", "pairs"])),
        output_scale=draw(st.sampled_from([1.0, 1.0, 3.0, -0.5])),
        attention_factor=draw(st.sampled_from([1.0, 1.0, 1.2])),
    )


@st.composite
def problems(draw: Callable[..., Any], dtype: torch.dtype = torch.float64) -> Problem:
    b, h_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    h_q = h_k * group
    s_q = draw(st.integers(1, 6))
    s_kv = draw(st.sampled_from([s_q, draw(st.integers(1, 7))]))
    d, d_v = draw(st.sampled_from([2, 4, 6, 10])), draw(st.integers(1, 5))
    n_q, n_k, n_v = (draw(st.integers(1, 2)) for _ in range(3))
    h_v = draw(st.sampled_from([n for n in range(1, h_q + 1) if h_q % n == 0]))
    dims = {f"q{i}": (b, h_q, s_q, d) for i in range(n_q)}
    dims |= {f"k{i}": (b, h_k, s_kv, d) for i in range(n_k)}
    dims |= {f"v{i}": (b, h_v, s_kv, d_v) for i in range(n_v)}
    # Q and K usually turn alike, as in a model; then they may share one launch.
    common = draw(turns(d))
    before = {name: draw(FACTORS) for name in dims}
    branches: list[Branch] = []
    for kind in "qk":
        for i in range(draw(st.integers(1, 2))):
            source = draw(st.sampled_from([n for n in dims if n[0] == kind]))
            angle = draw(st.sampled_from(["common", "common", "common", "own", "none"]))
            turn = {"common": common, "own": draw(turns(d)), "none": None}[angle]
            sees = draw(SEES)
            branches.append(
                Branch(f"{kind}_rot{i}", source, before[source], turn, draw(FACTORS), sees)
            )
    lengths = None
    if draw(st.integers(0, 3)) == 0:
        lengths = tuple(tuple(draw(st.integers(0, s)) for _ in range(b)) for s in (s_q, s_kv))
    names = {kind: [x.name for x in branches if x.source[0] == kind] for kind in "qk"}
    values = [n for n in dims if n[0] == "v"]
    can_be_both = h_q == h_k and s_q == s_kv
    attends: list[Attend] = []
    for _ in range(draw(st.integers(1, 2))):
        k = draw(st.sampled_from(names["k"]))
        is_both = can_be_both and draw(st.integers(0, 3)) == 0
        attends.append(
            Attend(
                q=k if is_both else draw(st.sampled_from(names["q"])),
                k=k,
                v=draw(st.sampled_from(values)),
                attn_scale=draw(SCALES),
                band=draw(
                    st.sampled_from(
                        [(None, None, False), (None, 0, False), (None, 0, True), (2, 1, True)]
                    )
                ),
                bias=draw(st.sampled_from([None, None, (1, h_q, 1, s_kv), (b, 1, s_q, s_kv)])),
                softcap=draw(st.sampled_from([None, None, 1.5])),
                has_sink=draw(st.integers(0, 3)) == 0,
                has_alibi=draw(st.integers(0, 3)) == 0,
                is_log2=draw(st.integers(0, 5)) == 0,
                after=draw(st.sampled_from([None, None, None, 0.7])),
            )
        )
    used = {a.q for a in attends} | {a.k for a in attends}
    kept = tuple(x for x in branches if x.name in used)
    read = {x.source for x in kept} | {a.v for a in attends}
    return Problem(
        dtype=dtype,
        dims={n: dim for n, dim in dims.items() if n in read},
        layouts={n: draw(st.sampled_from(LAYOUTS)) for n in dims},
        branches=kept,
        attends=tuple(attends),
        lengths=lengths,
        table_per_batch=draw(st.booleans()),
    )


def data(p: Problem, seed: int = 0) -> dict[str, Tensor]:
    """Every input by name, and ``do<i>`` for every output."""
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    found = {
        name: normal(dim, p.dtype, p.layouts[name], seed + i)
        for i, (name, dim) in enumerate(p.dims.items())
    }
    for branch in p.branches:
        if branch.turn is not None:
            found[_table_name(branch)] = _table(p, branch, seed)
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


def _table_name(branch: Branch) -> str:
    """Equal rotations of one input read one table."""
    return f"freqs_{branch.source}_{_digest(branch.turn)}"


def _digest(value: object) -> str:
    """A short name for a value, the same in every process."""
    return f"{crc32(repr(value).encode()):08x}"


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
        table, turn = self.t[_table_name(branch)], dict(vars(branch.turn))
        return self.g.rope(x, table, name=f"rope_{name_of(stage)}", **turn)


def stages(branch: Branch) -> list[tuple[Any, ...]]:
    """What identifies each node of a branch: the source and every attribute up to it."""
    found: list[tuple[Any, ...]] = []
    path: tuple[Any, ...] = (branch.source,)
    for stage in ("before", "turn", "after"):
        given = getattr(branch, stage)
        if given is not None:
            path = (*path, given, stage)
            found.append(path)
    return found


def name_of(stage: tuple[Any, ...]) -> str:
    return f"{stage[0]}_{stage[-1]}_{_digest(stage)}"


def read_by_attention(p: Problem) -> list[str]:
    """The names of the rotated or scaled values that attentions read."""
    return sorted({name_of(stages(b)[-1]) for b in p.branches if stages(b)})


def seen(p: Problem) -> set[str]:
    """The names of the values inside branches that the caller binds."""
    return {name_of(s) for b in p.branches for s in stages(b) if s[-1] in b.sees}


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
    table = given[_table_name(branch)][: x.shape[2]]
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
