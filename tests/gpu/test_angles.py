"""Angles on a GPU: the caller's modes change no bit, and lengths stay on the device."""

from typing import Any

import pytest
import torch

from ropegraph import angles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DYNAMIC = {"rope_type": "dynamic", "factor": 3.3, "max_position_embeddings": 1000}
LENGTHS = (3, 1000, 1001, 100_000, 1000, 3)


def longrope() -> dict[str, Any]:
    short = torch.linspace(1, 2, 12, device="cuda")
    named = {"rope_type": "longrope", "short_factor": short, "long_factor": 9 * short}
    return named | {"original_max_position_embeddings": 1000, "factor": 4.0}


def tables() -> list[torch.Tensor]:
    one = angles.default(head_dim=24, device="cuda")
    axial = angles.axial(head_dim=24, device="cuda")
    at = torch.arange(65_530, 65_540, device="cuda")
    found = [angles.freqs(one, at), angles.freqs(axial, at.expand(2, -1))]
    return [one.inv_freq, *found, *angles.cos_sin(found[0], torch.bfloat16)]


def test_the_callers_modes_change_no_bit() -> None:
    want = tables()
    old = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cuda", torch.bfloat16):
            got = tables()
    finally:
        torch.set_float32_matmul_precision(old)
    for x, y in zip(got, want, strict=True):
        assert x.dtype is y.dtype
        assert torch.equal(x, y)


def test_a_table_is_that_of_the_cpu() -> None:
    inv_freq = angles.default(head_dim=128).inv_freq
    at = torch.tensor([-5, 0, 1, 65_537, 2**24 - 1])
    want = angles.freqs(inv_freq, at)
    assert torch.equal(angles.freqs(inv_freq.cuda(), at.cuda()).cpu(), want)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_captured_graph_follows_the_length(name: str) -> None:
    """No host reads the length, or the capture would fail; and it is right at every replay."""
    parameters = DYNAMIC if name == "dynamic" else longrope()
    positions = torch.zeros(64, dtype=torch.int64, device="cuda")

    def table() -> torch.Tensor:
        length = positions.max() + 1
        return angles.freqs(angles.inv_freq(parameters, head_dim=24, seq_len=length), positions)

    torch.cuda.set_sync_debug_mode("error")
    try:
        table()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = table()
    for length in LENGTHS:
        positions.copy_((length - 64 + torch.arange(64)).cuda())
        graph.replay()
        found = angles.inv_freq(parameters, head_dim=24, seq_len=length, device="cuda")
        want = angles.freqs(found, positions)
        assert torch.allclose(captured, want, rtol=1e-6, atol=0.0)
        assert torch.equal(captured, table())
