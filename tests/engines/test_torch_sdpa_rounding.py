"""Rounding of sdpa in torch: twice (torch's own error + one rounding), against fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ropegraph.ir.score_mod import softcap
from ropegraph.testing.budget import assert_within, budget
from tests.engines.sdpa_cases import Case, backward, expected, forward

CAUSAL = {"right_bound": 0}
SIZES = {"s_q": 130, "s_kv": 130, "d_qk": 24, "d_v": 24, "h_q": 4, "attn_scale": 0.31}
CASES: dict[str, Case] = {
    "causal": Case(**SIZES, attrs=CAUSAL),
    "causal, long": Case(**{**SIZES, "b": 1, "s_q": 900, "s_kv": 900}, attrs=CAUSAL),
    "dense": Case(**SIZES),
    "window": Case(**SIZES, attrs={"left_bound": 40, "right_bound": 7}),
    "padding": Case(**SIZES, attrs=CAUSAL, len_q=[130, 61], len_kv=[130, 67]),
    "bias": Case(**SIZES, attrs=CAUSAL, bias=(1, 4, 130, 130)),
    "widths differ": Case(**{**SIZES, "d_v": 40}, attrs=CAUSAL),
    "softcap": Case(
        **SIZES, score_mod=softcap(1.3), score_fn=lambda s: 1.3 * torch.tanh(s / 1.3), attrs=CAUSAL
    ),
}


def by_torch(case: Case, inputs: dict[str, Tensor], d_o: Tensor) -> dict[str, Tensor]:
    """The same by plain torch in the dtype under test."""
    names = [n for n in ("q", "k", "v", "bias") if n in inputs]
    leaf = {n: inputs[n].detach().clone().requires_grad_() for n in names}
    q, k, v = leaf["q"], leaf["k"], leaf["v"]
    keep = case.visible()
    if case.score_fn is None:
        mask = torch.zeros((), dtype=q.dtype).masked_fill(~keep, -torch.inf)
        mask = mask + leaf["bias"] if "bias" in leaf else mask
        # Zero channels change nothing, and let torch use the kernel whose backward reads o as ours.
        wide_q, wide_k = (F.pad(x, (0, case.d_v - case.d_qk)) for x in (q, k))
        o = F.scaled_dot_product_attention(
            wide_q, wide_k, v, mask, scale=case.attn_scale, enable_gqa=True
        ).nan_to_num(0)
        k = k.repeat_interleave(2, 1)
        logits = q.detach() @ k.detach().transpose(2, 3) * case.attn_scale + mask.detach()
    else:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        logits = case.score_fn(q @ k.transpose(2, 3) * case.attn_scale)
        logits = logits.masked_fill(~keep, -torch.inf)
        o = logits.softmax(-1) @ v
        logits = logits.detach()
    grads = torch.autograd.grad(o, list(leaf.values()), d_o)
    ports = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias"}
    made = {ports[n]: g for n, g in zip(leaf, grads, strict=True)}
    stats = logits.float().logsumexp(-1, keepdim=True)
    return {"O": o.detach(), "Stats": stats, **made}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_within_twice_the_error_of_torch(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    inputs, d_o = case.inputs(), case.d_o()
    got = forward(case, inputs)
    got |= backward(case, inputs, got["O"], got["Stats"], d_o)
    peer = by_torch(case, inputs, d_o)
    for port, want in expected(case, inputs, d_o).items():
        allowed = budget(want, peer[port], got[port].dtype)
        assert_within(got[port], want, allowed, port)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """The forward computes in fp32: no element is further off than one rounding and a little."""
    for case in (Case(**SIZES, attrs=CAUSAL, dtype=dtype), Case(**SIZES, sink=True, dtype=dtype)):
        inputs, d_o = case.inputs(), case.d_o()
        want = expected(case, inputs, d_o)
        got = forward(case, inputs)
        half = torch.finfo(dtype).eps / 2
        assert_within(got["O"], want["O"], half * 1.01 * want["O"].abs() + 1e-6, "O")
        assert_within(got["Stats"], want["Stats"], 1e-5, "Stats")
        exact = {p: want[p].to(got[p].dtype) for p in ("O", "Stats")}
        grads = backward(case, inputs, exact["O"], exact["Stats"], d_o)
        assert_within(grads["dV"], want["dV"], half * 1.01 * want["dV"].abs() + 1e-5, "dV")


def test_fp64_compute_on_fp32_inputs() -> None:
    from ropegraph.dtypes import DType

    case = Case(**SIZES, attrs={**CAUSAL, "compute": DType.DOUBLE}, dtype=torch.float32)
    inputs, d_o = case.inputs(), case.d_o()
    want = expected(replace(case, attrs=CAUSAL), inputs, d_o)
    got = forward(case, inputs)
    assert_within(got["O"], want["O"], 6.1e-8 * want["O"].abs() + 1e-15, "O")
    assert_within(got["Stats"], want["Stats"], 6.1e-8 * want["Stats"].abs() + 1e-15, "Stats")
