"""What the caller's modes change: nothing. torch.compile, autocast, checkpoints, default types."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ropegraph.compat import nemo, neuron
from ropegraph.compat import transformer_engine as te
from tests.compat.te import BF16, F32, normal, table
from tests.engines.mla_cases import inputs

FREQS, ANGLES = table(6, 8), normal(2, 6, 3, seed=1, dtype=F32)
COS, SIN = (normal(128, 8, seed=i, dtype=F32) for i in (2, 3))
INV_FREQS, POSITIONS = normal(32, dtype=F32), torch.tensor([[4, 5], [0, 1]])

CALLS: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "rope": (
        normal(6, 2, 3, 8, dtype=F32), lambda x: te.apply_rotary_pos_emb(x, FREQS, fused=True),
    ),
    "unfused": (normal(6, 2, 3, 8, dtype=BF16), lambda x: te.apply_rotary_pos_emb(x, FREQS)),
    "qkv": (
        normal(6, 2, 3, 24, dtype=F32),
        lambda x: torch.cat(te.apply_fused_qkv_rotary_pos_emb(x, FREQS, FREQS, [8, 8, 8])),
    ),
    "nemo": (normal(2, 6, 3, 8, dtype=BF16), lambda x: nemo.apply_rope_triton(x, ANGLES)),
    "rope_hf": (
        normal(2, 3, 128, 8, dtype=F32),
        lambda x: torch.cat(neuron.rope_hf(x, x[:, :1], cos=COS, sin=SIN), dim=1),
    ),
    "decode": (normal(2, 3, 2, 64, dtype=BF16), lambda x: neuron.rope(x, INV_FREQS, POSITIONS)),
}  # fmt: skip


def both(x: Tensor, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = f(x)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]


@pytest.mark.parametrize("name", CALLS)
def test_modes_change_no_bit(name: str) -> None:
    x, f = CALLS[name]
    want = both(x, f)

    def same(got: tuple[Tensor, Tensor]) -> None:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    with torch.autocast("cpu", BF16):
        same(both(x, f))
    torch.set_default_dtype(torch.float64)
    try:
        same(both(x, f))
    finally:
        torch.set_default_dtype(F32)
    same(both(x, lambda t: checkpoint(f, t, use_reentrant=False)))
    with torch.inference_mode():
        assert torch.equal(f(x), want[0])
    compiled: Any = torch.compile(f, backend="eager")
    same(both(x, compiled))
    same(both(x, compiled))


def test_bytes_when_compiled() -> None:
    given = inputs(1, 2, 32, 128, 128, 64)
    kv, k_rope = given["kv"].permute(2, 0, 1, 3), given["k_rope"][:, 0].transpose(0, 1)
    tables = given["cos"][:, 0, 0], given["sin"][:, 0, 0]

    def f(kv: Tensor) -> Tensor:
        return te.fused_mla_kv_rope_mxfp8(kv, k_rope, *tables)[0].rowwise_data

    assert torch.equal(torch.compile(f, backend="eager")(kv), f(kv))


LOADED = """
import sys
from ropegraph.compat import nemo, neuron, transformer_engine
heavy = ("cupy", "cudnn", "cuda", "triton", "nvidia", "transformer_engine", "torch._dynamo")
print([name for name in sys.modules if name.startswith(heavy)])
"""


def test_an_import_loads_nothing_of_the_peers() -> None:
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=root, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"
