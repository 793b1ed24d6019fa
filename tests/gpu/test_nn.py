"""The modules on a GPU: frequencies, decoding without a wait, a captured step, a full cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.cli.bench.timing import captured
from ropegraph.functional import eager
from ropegraph.functional.kept import Kept
from ropegraph.nn import KVCache, RotaryAngles, RotaryAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
E, H_Q, H_KV, D, S, ROOM = 128, 8, 2, 64, 24, 40
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 4.0,
    "short_factor": [1.0] * (D // 2), "long_factor": [3.0] * (D // 2),
}  # fmt: skip


def layer(**options: object) -> RotaryAttention:
    torch.manual_seed(0)
    made = RotaryAttention(E, H_Q, H_KV, head_dim=D, device="cuda", dtype=BF16, **options)  # type: ignore[arg-type]
    return made.eval()


def data() -> Tensor:
    return torch.randn(2, S, E, generator=torch.Generator().manual_seed(1)).to("cuda", BF16)


def test_frequencies_have_the_bits_of_the_cpu() -> None:
    for parameters in ({"rope_theta": 5e5}, LONGROPE):
        want = RotaryAngles(parameters, head_dim=D)
        for made in (
            RotaryAngles(parameters, head_dim=D).to("cuda", BF16),
            RotaryAngles(parameters, head_dim=D, device="cuda"),
            RotaryAngles(parameters, head_dim=D, device="meta").to_empty(device="cuda").half(),
        ):
            assert made.inv_freq.device.type == "cuda"
            assert torch.equal(made.inv_freq.cpu(), want.inv_freq)


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_every_step_is_the_whole_forward(qk_norm: bool) -> None:
    module, x = layer(qk_norm=qk_norm), data()
    want, cache = module(x), module.new_cache(2, ROOM)
    rows = [module(x[:, :10], cache=cache)]
    rows += [module(x[:, i : i + 1], cache=cache) for i in range(10, S)]
    error = (torch.cat(rows, 1) - want).float().norm() / want.float().norm()
    assert float(error) < 1e-2
    assert cache.lengths.tolist() == [S, S]


def test_a_step_with_norms_takes_the_fused_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](8))
    module = layer(qk_norm=True)
    module(data()).float().square().mean().backward()
    (call,) = vars(eager._calls)["_young"].values()
    for plan in (call.plan, call._backward):
        assert sorted(s.engine for s in plan.graph.plan.steps) == ["cuda.rope", "cudnn.sdpa"]
    for norm in (module.q_norm, module.k_norm):
        assert norm.weight.grad.isfinite().all()
        assert norm.weight.grad.any()


@pytest.mark.parametrize("angles", [None, DYNAMIC, LONGROPE])
def test_no_step_waits_for_the_device(angles: object) -> None:
    module, x = layer(angles=angles), data()
    cache = module.new_cache(2, ROOM)
    ids = torch.arange(S, device="cuda")[None]
    with torch.no_grad():
        module(x[:, :1], cache=cache)
        module(x, rope=module.angles(ids))
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            module(x[:, 1:2], cache=cache)
            module(x, rope=module.angles(ids))
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@torch.no_grad()
def test_a_captured_step_serves_every_token() -> None:
    module, x = layer(), data()
    want, cache = module(x), module.new_cache(2, ROOM)
    token = x[:, :1].clone()
    graph, o = captured(lambda: module(token, cache=cache))
    cache.reset()
    rows: list[Tensor] = []
    for i in range(S):
        token.copy_(x[:, i : i + 1])
        graph.replay()
        rows.append(o.clone())
    error = (torch.cat(rows, 1) - want).float().norm() / want.float().norm()
    assert float(error) < 1e-2
    assert cache.lengths.tolist() == [S, S]


@torch.no_grad()
def test_a_full_cache_writes_nothing_and_counts_on() -> None:
    module, x = layer(), data()
    cache = KVCache(2, H_KV, 5, D, dtype=BF16, device="cuda")
    module(x[:, :4], cache=cache, seq_lens=torch.tensor([4, 2], device="cuda"))
    k, v = cache.k.clone(), cache.v.clone()
    module(x[:, 4:6], cache=cache)
    assert torch.equal(cache.k[0], k[0])
    assert torch.equal(cache.v[0], v[0])
    assert not torch.equal(cache.k[1], k[1])
    assert cache.lengths.tolist() == [6, 4]
    assert module(x[:, 6:7], cache=cache).isfinite().all()
