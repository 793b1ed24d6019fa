"""The types that depend on the length: nothing is remembered, and a tensor is never read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ropegraph import angles
from tests.angles.test_formulas import LONGROPE

DYNAMIC = {"rope_type": "dynamic", "factor": 3.3, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE}
LENGTHS = (3, 1000, 1001, 1777, 4096, 4097, 100_000, 4096, 1000, 3)


def at(parameters: dict[str, Any], seq_len: Any, **keywords: Any) -> torch.Tensor:
    return angles.inv_freq(
        parameters, head_dim=24, max_position_embeddings=1000, seq_len=seq_len, **keywords
    ).inv_freq


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parameters", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_tensor_and_a_number_agree(parameters: dict[str, Any], dtype: torch.dtype) -> None:
    for seq_len in LENGTHS:
        want = at(parameters, seq_len, dtype=dtype)
        for given in (torch.tensor(seq_len), torch.tensor([seq_len], dtype=torch.int32)):
            assert torch.equal(at(parameters, given, dtype=dtype), want)


@pytest.mark.parametrize("parameters", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_short_again_is_short(parameters: dict[str, Any]) -> None:
    short = at(parameters, None)
    for seq_len in (torch.tensor(100_000), torch.tensor(3), 100_000, 3):
        is_short = int(seq_len) == 3
        assert torch.equal(at(parameters, seq_len), short) is is_short


def test_up_to_the_trained_length_dynamic_is_the_default() -> None:
    for factor in (1.1, 3.3, 8.3, 1e3 / 7):
        got = at(DYNAMIC | {"factor": factor}, torch.tensor(1000))
        assert torch.equal(got, angles.default(head_dim=24).inv_freq)


@pytest.mark.parametrize("parameters", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_tensor_is_not_read_on_the_host(parameters: dict[str, Any]) -> None:
    """A fake tensor has no value to read: .item() would raise."""
    with FakeTensorMode():
        got = at(parameters, torch.empty((), dtype=torch.int64, device="cuda"))
        assert got.device.type == "cuda"
        assert got.shape == (12,)


@pytest.mark.parametrize("parameters", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_one_trace_serves_every_length(parameters: dict[str, Any]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def call(seq_len: torch.Tensor) -> torch.Tensor:
        return at(parameters, seq_len)

    traced = torch.compile(call, backend=backend, fullgraph=True)
    for seq_len in LENGTHS:
        assert torch.equal(traced(torch.tensor(seq_len)), at(parameters, seq_len))
    assert len(graphs) == 1


def test_factors_that_are_tensors() -> None:
    made = {k: torch.tensor(LONGROPE[k]) for k in ("short_factor", "long_factor")}
    for seq_len in (10, 10_000):
        assert torch.equal(at(LONG | made, torch.tensor(seq_len)), at(LONG, seq_len))
