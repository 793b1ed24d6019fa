"""rope(Q), rope(K), sdpa and its gradients as a graph and as the oracle, from one description."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ropegraph
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Attention, RopePair, Rotation, Scale
from ropegraph.testing import oracle
from ropegraph.testing.inputs import Layout, normal, poisoned

# fold, fold_log2: every row of the fold table, and auto, which picks the rows of q.
FOLDS = (
    ("off", False),
    ("q", False),
    ("symmetric", False),
    ("q", True),
    ("symmetric", True),
    ("auto", False),
    ("auto", True),
)


@dataclass(frozen=True)
class Case:
    """One attention with a rotated Q and K. r = 0 rotates the whole head."""

    b: int = 2
    h_q: int = 6
    h_k: int = 2
    h_v: int = 3
    s_q: int = 5
    s_kv: int = 7
    d_qk: int = 8
    d_v: int = 6
    r: int = 0
    rope_offset: int | None = None
    dtype: torch.dtype = torch.float64
    layout: Layout = "bhsd"
    attn_scale: float | None = 0.3
    q_scale: float = 1.0
    k_scale: float = 1.0
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    bias: tuple[int, int, int, int] | None = None
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def rope_dim(self) -> int:
        return self.r or self.d_qk

    @property
    def angles(self) -> Tensor:
        return oracle.angles(max(self.s_q, self.s_kv), self.rope_dim)


def data(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Every input of the forward, and ``do``, by name."""
    c = case
    wide = torch.float64 if c.dtype == torch.float64 else torch.float32
    dims = {
        "q": (c.b, c.h_q, c.s_q, c.d_qk),
        "k": (c.b, c.h_k, c.s_kv, c.d_qk),
        "v": (c.b, c.h_v, c.s_kv, c.d_v),
    }
    found = {n: normal(dim, c.dtype, c.layout, seed + i) for i, (n, dim) in enumerate(dims.items())}
    half = c.angles.reshape(-1, 1, 1, c.rope_dim // 2)
    found["freqs"] = torch.cat([half, torch.full_like(half, torch.nan)], dim=3)
    if c.bias is not None:
        found["bias"] = normal(c.bias, wide, seed=seed + 3)
    if c.sink:
        found["sink"] = normal((1, c.h_q, 1, 1), wide, seed=seed + 4)
    if c.lengths is not None:
        for name, lengths in zip(("len_q", "len_kv"), c.lengths, strict=True):
            found[name] = torch.tensor(lengths, dtype=torch.int32).reshape(-1, 1, 1, 1)
    found["do"] = normal((c.b, c.h_q, c.s_q, c.d_v), c.dtype, seed=seed + 5)
    return found


def forward(case: Case, given: Mapping[str, Tensor], **settings: Any) -> ropegraph.pygraph:
    """The graph, recorded and not yet built: outputs ``o`` and ``stats``, nodes named below."""
    g = ropegraph.pygraph(io_data_type=case.dtype, **settings)
    t = {name: g.tensor_like(x, name=name) for name, x in given.items() if name != "do"}
    common = {"rope_dim": case.r, "rope_offset": case.rope_offset}
    q = g.rope(t["q"], t["freqs"], case.q_scale, name="rope_q", **common).set_name("q_rot")
    k = g.rope(t["k"], t["freqs"], case.k_scale, name="rope_k", **common).set_name("k_rot")
    o, stats = g.sdpa(q, k, t["v"], name="attn", generate_stats=True, **attention(case, t))
    o.set_output(True).set_name("o")
    stats.set_output(True).set_name("stats")
    return g


def attention(case: Case, t: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that sdpa and sdpa_backward share."""
    return {
        "attn_scale": case.attn_scale,
        "bias": t.get("bias"),
        "sink_token": t.get("sink"),
        "softcap": case.softcap,
        "use_alibi_mask": case.alibi,
        "use_padding_mask": case.lengths is not None,
        "seq_len_q": t.get("len_q"),
        "seq_len_kv": t.get("len_kv"),
        "diagonal_band_left_bound": case.left,
        "diagonal_band_right_bound": case.right,
        "diagonal_alignment": "BOTTOM_RIGHT" if case.bottom_right else "TOP_LEFT",
    }


def differentiable(case: Case) -> list[str]:
    return ["q", "k", "v", *(["bias"] if case.bias else []), *(["sink"] if case.sink else [])]


def execute(graph: ropegraph.pygraph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Build and run on NaN buffers; returns every output and saved tensor by name."""
    ir = graph.plan.graph
    outputs = {}
    for name in ir.outputs:
        value = ir.values[name]
        dtype = getattr(torch, value.dtype.torch_name)
        outputs[name] = poisoned(value.dim, dtype, stride=value.stride)
    bound = {name: _laid_out(given[name], ir.values[name]) for name in ir.inputs if name in given}
    graph.execute({**bound, **outputs}, poisoned((graph.get_workspace_size(),), torch.uint8))
    return outputs


def _laid_out(x: Tensor, value: Value) -> Tensor:
    """The gradient of an output takes the strides of that output; what fits stays as it is."""
    is_gradient = value.name.startswith("do")
    return poisoned(value.dim, x.dtype, stride=value.stride).copy_(x) if is_gradient else x


def run(case: Case, given: Mapping[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    """Forward and derived backward: o, stats, and d<x> of everything that has a gradient."""
    g = forward(case, given, **settings)
    backward = g.backward_graph(["o"], differentiable(case))
    results = execute(g, given)
    return results | execute(backward, {**given, **results})


def expected(case: Case, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by the oracle, gradients by autograd through it."""
    leaves = {name: oracle.leaf(given[name]) for name in differentiable(case)}
    bias = leaves.get("bias")
    if case.alibi:
        slopes = oracle.alibi(case.h_q, case.s_q, case.s_kv)
        bias = slopes if bias is None else bias + slopes
    cap = case.softcap
    o, stats = oracle.attention(
        turned(case, leaves["q"], case.q_scale),
        turned(case, leaves["k"], case.k_scale),
        leaves["v"],
        attn_scale=1.0 if case.attn_scale is None else case.attn_scale,
        keep=kept(case),
        bias=bias,
        sink=leaves.get("sink"),
        score_mod=None if cap is None else lambda x: cap * torch.tanh(x / cap),
    )
    grads = oracle.gradients(o, tuple(leaves.values()), given["do"])
    if case.lengths is not None:
        # A row past its length belongs to no sequence: it has no sink either.
        for i, rows in enumerate(case.lengths[0]):
            stats.data[i, :, rows:] = -torch.inf
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"o": o.detach(), "stats": stats.detach(), **named}


def turned(case: Case, x: Tensor, output_scale: float) -> Tensor:
    angles = case.angles[: x.shape[2]]
    return oracle.rope(x, angles, rope_offset=case.rope_offset, output_scale=output_scale)


def kept(case: Case) -> Tensor:
    len_q, len_kv = case.lengths or (None, None)
    return oracle.band(
        case.s_q,
        case.s_kv,
        left=case.left,
        right=case.right,
        bottom_right=case.bottom_right,
        len_q=len_q,
        len_kv=len_kv,
    )


def scales(graph: ropegraph.pygraph) -> dict[str, Any]:
    """Node name -> its scale after lowering; (attn_scale, softmax_input_is_log2) of attention."""
    found: dict[str, Any] = {}
    for node in graph.plan.graph.nodes:
        match node.attrs:
            case RopePair(parts):
                names = node.name.split("+")
                found |= {n: p.output_scale for n, p in zip(names, parts, strict=True)}
            case Rotation() as attrs:
                found[node.name] = attrs.output_scale
            case Scale(factor):
                found[node.name] = factor
            case Attention() as attrs:
                found[node.name] = (attrs.attn_scale, attrs.softmax_input_is_log2)
            case _:
                pass
    return found
