"""Random graphs as plain data, drawn by hypothesis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from hypothesis import strategies as st

from ropegraph.testing.inputs import Layout

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


def table_name(branch: Branch) -> str:
    """Equal rotations of one input read one table."""
    return f"freqs_{branch.source}_{_digest(branch.turn)}"


def _digest(value: object) -> str:
    """A short name for a value, the same in every process."""
    return f"{crc32(repr(value).encode()):08x}"


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
