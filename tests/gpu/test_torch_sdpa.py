"""The attention of the torch executor on a GPU: row blocks, for torch's own kernel is for CPUs."""

import pytest
import torch
from torch import Tensor

from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.ir.score_mod import softcap
from ropegraph.testing.budget import assert_within
from tests.engines.sdpa_cases import Case, backward, expected, forward
from tests.engines.steps import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAUSAL = {"right_bound": 0}
CASES: dict[str, Case] = {
    "causal": Case(attrs=CAUSAL, scale_port=True),
    "wide": Case(b=1, s_q=300, s_kv=400, attrs={"left_bound": 90, "right_bound": 3}),
    "padding, sink, bias": Case(len_q=[5, 7], len_kv=[3, 9], sink=True, bias=(1, 4, 7, 9)),
    "softcap, alibi": Case(
        score_mod=softcap(0.7),
        score_fn=lambda s: 0.7 * torch.tanh(s / 0.7),
        attrs={**CAUSAL, "alibi": True},
    ),
    "heads": Case(h_q=6, h_k=2, h_v=3, d_v=3, attrs={**CAUSAL, "bottom_right": True}),
}


def on_gpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {port: x.cuda() for port, x in tensors.items()}


def run_on_gpu(case: Case) -> dict[str, Tensor]:
    inputs = on_gpu(case.inputs())
    shapes = {"O": (case.b, case.h_q, case.s_q, case.d_v), "Stats": (case.b, case.h_q, case.s_q, 1)}
    outputs = {p: torch.full(dim, torch.nan, dtype=torch.float64) for p, dim in shapes.items()}
    got = run(Sdpa(**case.op()), inputs, on_gpu(outputs), TorchExecutor())
    given = {**inputs, "o": got["O"], "dO": case.d_o().cuda(), "stats": got["Stats"]}
    names = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink_token": "dSink_token"}
    grads = {
        port: torch.full_like(inputs[n], torch.nan) for n, port in names.items() if n in inputs
    }
    return got | run(SdpaBackward(**case.op()), given, grads, TorchExecutor())


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str) -> None:
    case = CASES[name]
    got = run_on_gpu(case)
    for port, value in expected(case, case.inputs(), case.d_o()).items():
        assert_within(got[port].cpu(), value, 1e-11, port)


def test_dropout_draws_the_same_mask_as_on_a_cpu() -> None:
    case = Case(dropout_p=0.4, attrs=CAUSAL)
    got = run_on_gpu(case)
    inputs, d_o = case.inputs(), case.d_o()
    want = forward(case, inputs)
    want |= backward(case, inputs, want["O"], want["Stats"], d_o)
    for port, value in want.items():
        assert_within(got[port].cpu(), value, 1e-11, port)


def test_nan_that_nobody_sees() -> None:
    case = Case(attrs=CAUSAL)
    inputs = on_gpu(case.inputs())
    want = run_on_gpu(case)
    inputs["v"][:, :, 8:] = torch.nan
    inputs["k"][:, :, 8:] = torch.nan
    outputs = {"O": torch.full_like(want["O"], torch.nan)}
    got = run(Sdpa(**case.op()), inputs, outputs, TorchExecutor())
    assert_within(got["O"].cpu(), want["O"].cpu(), 1e-11)
