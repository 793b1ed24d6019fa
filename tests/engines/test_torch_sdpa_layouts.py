"""sdpa in torch on every layout a caller may hand in: strides change where numbers lie, no bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.testing.budget import assert_within
from ropegraph.testing.inputs import LAYOUTS, Layout, placed, poisoned
from tests.engines.sdpa_cases import Case, backward, contiguous, expected, forward
from tests.engines.steps import run

CAUSAL = {"right_bound": 0}
# The first two run on torch's own kernel, the third on row blocks.
PATHS: dict[str, dict[str, Any]] = {
    "flash": {"attrs": CAUSAL, "h_q": 2},
    "flash, groups": {"h_q": 6},
    "blocks": {"attrs": {"left_bound": 4}, "sink": True},
}


def same(a: Tensor, b: Tensor, what: str) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=what)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", PATHS)
def test_any_layout(path: str, layout: Layout, dtype: torch.dtype) -> None:
    sizes = {"s_q": 1, "b": 1, "s_kv": 1} if layout == "odd_size_1" else {}
    case = Case(**{**PATHS[path], **sizes}, layout=layout, dtype=dtype)
    inputs, d_o = case.inputs(), case.d_o()
    out: Layout = "gapped" if layout == "expanded" else layout
    got = forward(case, inputs, out)
    plain = forward(replace(case, layout="bhsd"), contiguous(inputs))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    want = expected(case, inputs, d_o)
    assert_within(got["O"], want["O"], tolerance, "O")
    # BLAS may order a sum by the row stride of q, k and v; of o, dO and stats it may not.
    torch.testing.assert_close(got["O"], plain["O"], rtol=1e-5, atol=1e-5)
    stats = placed(got["Stats"], layout)
    grads = backward(case, inputs, got["O"], stats, d_o)
    rows = [x.clone(memory_format=torch.contiguous_format) for x in (got["O"], stats, d_o)]
    for port, grad in backward(case, inputs, *rows).items():
        same(grads[port], grad, port)
        assert_within(grad, want[port], 10 * tolerance, port)


@pytest.mark.parametrize("path", PATHS)
def test_d_o_of_a_sum_and_of_a_transpose(path: str) -> None:
    case = Case(**PATHS[path], dtype=torch.float32)
    inputs = case.inputs()
    got = forward(case, inputs)
    b, h, s, d = got["O"].shape
    one = torch.ones(1).expand(b, h, s, d)
    turned = torch.randn(b, s, h, d).transpose(1, 2)
    last = torch.randn(b, h, d, s).transpose(2, 3)
    # Stats of a kernel that stores [b, s, h].
    stats = got["Stats"].squeeze(-1).transpose(1, 2).contiguous().transpose(1, 2).unsqueeze(-1)
    for d_o in (one, turned, last):
        a = backward(case, inputs, got["O"], stats, d_o)
        for port, grad in backward(case, inputs, got["O"], got["Stats"], d_o.contiguous()).items():
            same(a[port], grad, port)


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_no_matrix_product_takes(path: str) -> None:
    """Keys repeated by a stride of 0, overlapping rows, channels apart, axes reversed."""
    case = Case(**PATHS[path], s_q=9)
    inputs, d_o = case.inputs(), case.d_o()
    forms = {
        "repeated": lambda x: x[:, :, :1].expand(x.shape),
        "overlapping": lambda x: torch.randn(64 * x.numel(), dtype=x.dtype).as_strided(
            x.shape, (50, 20, 1, 1)
        ),
        "apart": lambda x: placed(x.transpose(2, 3), "bhsd").transpose(2, 3),
        "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    }
    for name, form in forms.items():
        for ports in ("q", "k", "v", "qkv"):
            given = {p: form(x) if p in ports else x for p, x in inputs.items()}
            got = forward(case, given)
            want = expected(case, given, d_o)
            assert_within(got["O"], want["O"], 1e-12, f"{name} {ports}")
            assert_within(got["Stats"], want["Stats"], 1e-12, f"{name} {ports}")
            for port, grad in backward(case, given, got["O"], got["Stats"], d_o).items():
                assert_within(grad, want[port], 1e-11, f"{name} {ports} {port}")


def test_strides_of_size_1_mean_nothing() -> None:
    """C12: the forms in which a length of 1 hides a stride that is wrong everywhere else."""
    for path in PATHS.values():
        for b, h_q, h, s in ((3, 4, 2, 1), (1, 4, 2, 8), (1, 2, 1, 1), (2, 3, 1, 5)):
            fields = {**path, "b": b, "h_q": h_q, "h_k": h, "h_v": h, "s_q": s, "s_kv": s}
            case = Case(**fields, d_qk=8, d_v=8)
            inputs, d_o = case.inputs(), case.d_o()
            want = expected(case, inputs, d_o)
            for fake in (0, 1, 7, 1 << 40):
                odd = {p: _fake(x, fake) for p, x in inputs.items() if x.dim() == 4}
                got = forward(case, odd)
                assert_within(got["O"], want["O"], 1e-12)
                grads = backward(
                    case, odd, _fake(got["O"], fake), _fake(got["Stats"], fake), _fake(d_o, fake)
                )
                for port, grad in grads.items():
                    assert_within(grad, want[port], 1e-12, port)


def _fake(x: Tensor, stride: int) -> Tensor:
    """``x`` with this stride on every axis of length 1."""
    return x.as_strided(
        x.shape, [stride if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    )


@pytest.mark.parametrize("axis", ["b", "h", "s_q", "s_kv", "d_qk", "d_v", "b s_q", "s_q s_kv"])
@pytest.mark.parametrize(
    "attrs", [{}, CAUSAL, {"left_bound": 2, "bottom_right": True}, {"alibi": True}], ids=str
)
def test_zero_sizes(axis: str, attrs: dict[str, Any]) -> None:
    fields: dict[str, Any] = {}
    for name in axis.split():
        fields |= dict.fromkeys(("h_q", "h_k", "h_v"), 0) if name == "h" else {name: 0}
    for case in (Case(**fields, attrs=attrs), Case(**fields, attrs=attrs, sink=True)):
        inputs, d_o = case.inputs(), case.d_o()
        got = forward(case, inputs)
        grads = backward(case, inputs, got["O"], got["Stats"], d_o)
        if 0 in (case.b, case.h_q):
            assert all(x.numel() == 0 or not x.any() for x in (*got.values(), *grads.values()))
            continue
        if case.s_kv == 0:
            lse = inputs["sink_token"] if case.sink else torch.tensor(-torch.inf)
            assert not got["O"].any()
            torch.testing.assert_close(got["Stats"], lse.double().expand(got["Stats"].shape))
            assert not any(grads[p].any() for p in ("dQ", "dK", "dV"))
            continue
        want = expected(case, inputs, d_o)
        for port, value in (got | grads).items():
            assert_within(value, want[port], 1e-12, port)


def test_inputs_that_alias_each_other() -> None:
    x = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    case = Case(h_q=2, s_q=6, s_kv=6, d_qk=4, d_v=4, attrs=CAUSAL)
    inputs = {"q": x, "k": x, "v": x}
    got = forward(case, inputs)
    separate = {p: t.clone() for p, t in inputs.items()}
    same(got["O"], forward(case, separate)["O"], "O")
    outputs = {p: poisoned(x.shape, x.dtype) for p in ("dQ", "dK", "dV")}
    given = {**inputs, "o": got["O"], "dO": got["O"], "stats": got["Stats"]}
    grads = run(SdpaBackward(**case.op()), given, outputs, TorchExecutor())
    want = expected(case, separate, got["O"])
    for port, grad in grads.items():
        assert_within(grad, want[port], 1e-12, port)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes(mode: Any) -> None:
    from ropegraph.ir.score_mod import softcap

    case = Case(score_mod=softcap(0.7), score_fn=lambda s: 0.7 * torch.tanh(s / 0.7), attrs=CAUSAL)
    with mode():
        inputs, d_o = case.inputs(), case.d_o()
        got = run(Sdpa(**case.op()), inputs, ["O", "Stats"], TorchExecutor())
        given = {**inputs, "o": got["O"], "dO": d_o, "stats": got["Stats"]}
        grads = run(SdpaBackward(**case.op()), given, ["dQ", "dK", "dV"], TorchExecutor())
    with torch.inference_mode(mode=False):
        plain = {p: x.clone() for p, x in inputs.items()}
        want = expected(case, plain, d_o.clone())
    for port, value in (got | grads).items():
        assert_within(value, want[port], 1e-12, port)


def test_deterministic_algorithms_can_be_demanded() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for path in PATHS.values():
            case = Case(**path, dtype=torch.float32)
            inputs, d_o = case.inputs(), case.d_o()
            got = forward(case, inputs)
            first = backward(case, inputs, got["O"], got["Stats"], d_o)
            for port, grad in backward(case, inputs, got["O"], got["Stats"], d_o).items():
                same(first[port], grad, port)
    finally:
        torch.use_deterministic_algorithms(False)
