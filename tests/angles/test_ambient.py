"""Whatever mode the caller is in, the bits of every type and table are the same."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from ropegraph import angles
from tests.ambient import default_dtype, matmul_precision
from tests.angles.test_formulas import LONGROPE, ORIGINAL

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast fp16": lambda: torch.autocast("cpu", torch.float16),
    "default bf16": lambda: default_dtype(torch.bfloat16),
    "default fp16": lambda: default_dtype(torch.float16),
    "default fp64": lambda: default_dtype(torch.float64),
    "tf32": lambda: matmul_precision("high"),
    "medium": lambda: matmul_precision("medium"),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
}


def everything() -> list[torch.Tensor]:
    seq_len = torch.tensor(5000)
    scaled: dict[str, Any] = {"head_dim": 24, "factor": 2.5}
    llama3 = {"rope_theta": 5e5, "low_freq_factor": 1, "high_freq_factor": 4}
    types = [
        angles.default(head_dim=24),
        angles.linear(**scaled),
        angles.dynamic(**scaled, max_position_embeddings=1000, seq_len=5000),
        angles.dynamic(**scaled, max_position_embeddings=1000, seq_len=seq_len),
        angles.yarn(head_dim=24, **ORIGINAL),
        angles.longrope(head_dim=24, **LONGROPE, seq_len=seq_len),
        angles.llama3(head_dim=24, **llama3, **ORIGINAL),
        angles.proportional(head_dim=24, rope_theta=1e6, partial_rotary_factor=0.5),
        angles.axial(head_dim=24),
        angles.mrope(angles.default(head_dim=24), [4, 4, 4], mrope_interleaved=True),
    ]
    at = torch.arange(65_530, 65_540)
    found: list[torch.Tensor] = []
    for a in types:
        rows = at if a.axes is None else at.expand(a.axis_count, -1)
        table = angles.freqs(a, rows)
        found += [a.inv_freq, table, *angles.cos_sin(table, attention_factor=1.1)]
        found += angles.cos_sin(table, torch.bfloat16, attention_factor=1.1)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits(mode: str) -> None:
    want = everything()
    with MODES[mode]():
        got = everything()
    for x, y in zip(got, want, strict=True):
        assert x.dtype is y.dtype
        assert torch.equal(x, y)


def test_large_positions_do_not_collapse_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        table = angles.freqs(torch.tensor([1.0, 0.01]), torch.arange(65_536, 65_540))
        cos, _ = angles.cos_sin(table)
    assert cos[:, 0, 0, 0].tolist() == pytest.approx([-0.7218, -0.9724, -0.3289, 0.6169], abs=1e-4)
