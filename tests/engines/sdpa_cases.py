"""One sdpa problem with any mix of features, run forward and backward, beside the fp64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.ir.score_mod import ScoreProgram
from ropegraph.testing import oracle
from ropegraph.testing.inputs import Layout, normal, placed, poisoned
from tests.engines.steps import run

F64 = torch.float64
GRADS = ("dQ", "dK", "dV")


@dataclass
class Case:
    """Sizes, features and layout of a problem.  Every field left out is a feature left out."""

    b: int = 2
    h_q: int = 4
    h_k: int = 2
    h_v: int = 2
    s_q: int = 7
    s_kv: int = 9
    d_qk: int = 5
    d_v: int = 5
    attn_scale: float = 0.3
    attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    bias: tuple[int, int, int, int] | None = None
    sink: bool = False
    len_q: Sequence[int] | None = None
    len_kv: Sequence[int] | None = None
    score_mod: ScoreProgram | None = None
    score_fn: Callable[[Tensor], Tensor] | None = None
    dropout_p: float | None = None
    dtype: torch.dtype = F64
    layout: Layout = "bhsd"
    scale_port: bool = False
    seed: int = 0

    @property
    def wide(self) -> torch.dtype:
        return F64 if self.dtype == F64 else torch.float32

    def op(self) -> dict[str, Any]:
        made = dict(self.attrs)
        made["attn_scale"] = None if self.scale_port else self.attn_scale
        made["padding"] = self.len_q is not None
        made["score_mod"] = self.score_mod
        made["dropout_p"] = self.dropout_p
        return made

    def inputs(self) -> dict[str, Tensor]:
        sizes = {
            "q": (self.b, self.h_q, self.s_q, self.d_qk),
            "k": (self.b, self.h_k, self.s_kv, self.d_qk),
            "v": (self.b, self.h_v, self.s_kv, self.d_v),
        }
        made = {
            name: normal(dim, self.dtype, self.layout, self.seed + i)
            for i, (name, dim) in enumerate(sizes.items())
        }
        if self.bias is not None:
            made["bias"] = normal(self.bias, self.dtype, seed=self.seed + 11)
        if self.sink:
            made["sink_token"] = normal((1, self.h_q, 1, 1), self.wide, seed=self.seed + 12)
        if self.len_q is not None and self.len_kv is not None:
            made["seq_len_q"] = torch.tensor(self.len_q, dtype=torch.int32).view(-1, 1, 1, 1)
            made["seq_len_kv"] = torch.tensor(self.len_kv, dtype=torch.int64).view(-1, 1, 1, 1)
        if self.dropout_p is not None:
            made["seed"] = torch.tensor([[[[1234]]]], dtype=torch.int64)
            made["offset"] = torch.tensor([[[[5]]]], dtype=torch.int32)
        if self.scale_port:
            made["attn_scale"] = torch.tensor(self.attn_scale, dtype=self.wide)
        return made

    def d_o(self) -> Tensor:
        return normal((self.b, self.h_q, self.s_q, self.d_v), self.dtype, self.layout, 77)

    def visible(self) -> Tensor:
        """True where a query sees a key, [b, 1, s_q, s_kv]."""
        attrs = self.attrs
        return oracle.band(
            self.s_q,
            self.s_kv,
            left=attrs.get("left_bound"),
            right=attrs.get("right_bound"),
            bottom_right=attrs.get("bottom_right", False),
            len_q=self.len_q,
            len_kv=self.len_kv,
        ).expand(self.b, 1, self.s_q, self.s_kv)

    def live(self) -> Tensor:
        """True for rows that lie in a sequence, [b, 1, s_q, 1]."""
        lengths = torch.tensor(self.len_q if self.len_q is not None else [self.s_q] * self.b)
        return (torch.arange(self.s_q) < lengths[:, None])[:, None, :, None]


def forward(
    case: Case, inputs: dict[str, Tensor], layout: Layout | None = None
) -> dict[str, Tensor]:
    """O and Stats of the torch executor, written over NaN."""
    outputs = {
        "O": poisoned((case.b, case.h_q, case.s_q, case.d_v), case.dtype, layout or case.layout),
        "Stats": poisoned((case.b, case.h_q, case.s_q, 1), case.wide),
    }
    with torch.no_grad():
        return run(Sdpa(**case.op()), inputs, outputs, TorchExecutor())


def backward(
    case: Case, inputs: dict[str, Tensor], o: Tensor, stats: Tensor, d_o: Tensor
) -> dict[str, Tensor]:
    """Every gradient of the torch executor, written over NaN."""
    out = "gapped" if case.layout == "expanded" else case.layout
    outputs = {f"d{name.upper()}": poisoned(inputs[name].shape, case.dtype, out) for name in "qkv"}
    if case.bias is not None:
        outputs["dBias"] = poisoned(case.bias, case.dtype)
    if case.sink:
        outputs["dSink_token"] = poisoned((1, case.h_q, 1, 1), case.wide)
    given = {**inputs, "o": o, "dO": d_o, "stats": stats}
    with torch.no_grad():
        return run(SdpaBackward(**case.op()), given, outputs, TorchExecutor())


def expected(
    case: Case, inputs: dict[str, Tensor], d_o: Tensor, drop: Tensor | None = None
) -> dict[str, Tensor]:
    """What forward and backward should give, in fp64."""
    names = [n for n in ("q", "k", "v", "bias", "sink_token") if n in inputs]
    leaves = {name: oracle.leaf(inputs[name]) for name in names}
    bias = leaves.get("bias")
    added = torch.zeros(1, 1, 1, 1, dtype=F64) if bias is None else bias
    if case.attrs.get("alibi"):
        slopes = oracle.alibi(case.h_q, case.s_q, case.s_kv)
        added = added + slopes.reshape(1, case.h_q, case.s_q, case.s_kv)
    o, stats = oracle.attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        attn_scale=case.attn_scale,
        keep=case.visible(),
        bias=added,
        score_mod=case.score_fn,
        sink=leaves.get("sink_token"),
        drop=drop,
        softmax_input_is_log2=case.attrs.get("softmax_input_is_log2", False),
    )
    live = case.live()
    o = torch.where(live, o, 0.0)
    grads = oracle.gradients(o, list(leaves.values()), torch.where(live, d_o.double(), 0.0))
    port = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink_token": "dSink_token"}
    made = {port[name]: grad for name, grad in zip(leaves, grads, strict=True)}
    return {"O": o.detach(), "Stats": stats.detach().masked_fill(~live, -torch.inf), **made}


def both(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(what the executor gave, what it should have given), forward and backward."""
    inputs, d_o = case.inputs(), case.d_o()
    got = forward(case, inputs)
    got |= backward(case, inputs, got["O"], got["Stats"], d_o)
    return got, expected(case, inputs, d_o)


def contiguous(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers, row-major."""
    return {name: x.clone(memory_format=torch.contiguous_format) for name, x in inputs.items()}


__all__ = ["Case", "backward", "both", "contiguous", "expected", "forward", "placed"]
