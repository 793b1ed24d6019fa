"""Decoding on a GPU, by the public API: caches, launches, wrong positions, no wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.testing import oracle
from tests.api.test_decode import FOLDS, H_KV, H_Q, NORMED, S_MAX, SCALE, D, Decode, bits, random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ENGINES = ("cuda.rope", "torch")


@pytest.fixture(autouse=True)
def needs_cupy() -> None:
    pytest.importorskip("cupy")


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_and_nothing_else(engine: str, dtype: torch.dtype, order: str, s: int) -> None:
    rope = {"rope_dim": 4, "rope_offset": 2}
    index = torch.int64 if s == 3 else torch.int32
    given = Decode(s, dtype, order, index=index, rope=rope, device="cuda", engines=engine)
    given.q.set_output(True).set_name("o")
    assert [step.engine for step in given.g.plan.steps] == [engine]
    k_rows, before = given.rotated("k", engine, **rope), given.pack["k_cache"].clone()
    v_before = given.pack["v_cache"].clone()
    for _ in range(3):  # the last ones are replays
        pack = given.run()
        assert torch.equal(bits(pack["k_cache"]), bits(given.kept(before, k_rows)))
        assert torch.equal(bits(pack["v_cache"]), bits(given.kept(v_before, pack["v"])))
        assert torch.equal(bits(pack["o"]), bits(given.rotated("q", engine, **rope)))


def check_keys(got: Tensor, want: Tensor, norm: bool) -> None:
    """Bit for bit; a norm alone and beside that of Q may add up in another order."""
    if norm:
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-8, equal_nan=True)
    else:
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("engine", ENGINES)
def test_both_caches_in_a_launch_behind_that_of_norms(
    engine: str, dtype: torch.dtype, order: str, s: int
) -> None:
    given = Decode(s, dtype, order, device="cuda", norm=True, engines=engine)
    given.q.set_output(True).set_name("o")
    assert [(x.name, x.engine) for x in given.g.plan.steps] == [(name, engine) for name in NORMED]
    k_rows, before = given.rotated("k", engine), given.pack["k_cache"].clone()
    v_before = given.pack["v_cache"].clone()
    for _ in range(3):  # the last ones are replays
        pack = given.run()
        check_keys(pack["k_cache"], given.kept(before, k_rows), norm=True)
        assert torch.equal(bits(pack["v_cache"]), bits(given.kept(v_before, pack["v"])))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_token_after_token(fold: str, log2: bool, norm: bool) -> None:
    """The default engines in bf16, with K unscaled in its cache under every fold."""
    given = Decode(1, BF16, "bshd", device="cuda", norm=norm, fold=fold, fold_log2=log2)
    engines = [step.engine for step in given.attention().g.plan.steps]
    assert len(engines) == 2 + norm
    assert set(engines[:-1]) == {"cuda.rope"}
    turn = given.pack["freqs"][:, 0, 0, : D // 2].double()
    for start in range(S_MAX):
        given.pack["positions"].fill_(start)
        given.pack["len_kv"].fill_(start + 1)
        for seed, name in enumerate("qkv"):
            given.pack[name].copy_(random(*given.pack[name].shape, seed=100 * start + seed))
        rotated = given.rotated("k", "cuda.rope")
        pack = given.run()
        check_keys(pack["k_cache"][:, :, start], rotated[:, :, 0], norm)
        q = oracle.rope(given.plain("q"), turn[start : start + 1])
        k, v = (
            pack[n][:, :, : start + 1].double().repeat_interleave(H_Q // H_KV, 1)
            for n in ("k_cache", "v_cache")
        )
        keep = torch.ones(1, start + 1, dtype=torch.bool, device="cuda")
        want = oracle.attention(q, k, v, attn_scale=SCALE, keep=keep)[0]
        error = float((pack["o"].double() - want).norm() / want.norm())
        assert error < 1e-2, f"token {start}: relative error {error:.3g}"


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_wrong_positions_write_nothing_and_are_told(
    index: torch.dtype, engine: str, norm: bool
) -> None:
    """C43: without a wait; the entry beside the wrong ones is written."""
    for wrong in (-1, S_MAX - 1, S_MAX, 2**31 - 1):
        given = Decode(2, BF16, positions=[4, wrong, -7], index=index, device="cuda",
                       norm=norm, engines=engine)  # fmt: skip
        before = {n: given.pack[n].clone() for n in ("k_cache", "v_cache")}
        given.run()
        torch.cuda.synchronize()
        for name, rows in (("k_cache", given.rotated("k", engine)), ("v_cache", given.pack["v"])):
            want = before[name].clone()
            want[0, :, 4:6] = rows[0]
            check_keys(given.pack[name], want, norm and name == "k_cache")
        found = given.g.verify(given.buffers)
        assert not found.is_ok
        assert any("cache_positions" in fault for fault in found.faults), found.faults


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_no_step_waits_for_the_device(engine: str, norm: bool) -> None:
    given = Decode(1, BF16, device="cuda", norm=norm, engines=engine)
    given.q.set_output(True).set_name("o")
    for _ in range(3):  # the last ones are replays
        given.run()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        given.run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("norm", [False, True])
def test_a_captured_step_follows_its_positions(norm: bool) -> None:
    """A CUDA graph of a whole step: the next token needs but another number on the device."""
    given = Decode(1, BF16, "bshd", device="cuda", norm=norm)
    given.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.run()
    for start in (3, 9):
        given.pack["positions"].fill_(start)
        before = given.pack["v_cache"].clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(given.pack["v_cache"]), bits(given.kept(before, given.pack["v"])))


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_64_sequences(order: str) -> None:
    """One launch for Q, K and V, as a server decodes."""
    b, s_max, d = 64, 512, 128
    q, k, v = (
        torch.randn(b, 1, h, d, device="cuda", dtype=BF16).transpose(1, 2) for h in (32, 8, 8)
    )
    dim = (b, 8, s_max, d) if order == "bhsd" else (b, s_max, 8, d)
    rooms = [torch.full(dim, torch.nan, device="cuda", dtype=BF16) for _ in range(2)]
    k_cache, v_cache = (x if order == "bhsd" else x.transpose(1, 2) for x in rooms)
    rows = torch.randperm(s_max, device="cuda")[:b].int()
    angle = torch.randn(s_max, 1, 1, d, device="cuda")
    g = rg.pygraph(io_data_type=BF16)
    t: dict[str, Any] = {"start_positions": g.tensor_like(rows, name="rows")}
    f = g.tensor_like(angle, name="freqs")
    into = {"cache_positions": t["start_positions"]}
    q_rot = g.rope(g.tensor_like(q, name="q"), f, **t).set_output(True).set_name("q_rot")
    g.rope(g.tensor_like(k, name="k"), f, cache=g.tensor_like(k_cache, name="kc"), **t, **into)
    g.cache_write(g.tensor_like(v, name="v"), cache=g.tensor_like(v_cache, name="vc"), **into)
    q_rot.set_stride(q.stride())
    pack = {"rows": rows, "freqs": angle, "q": q, "k": k, "v": v, "kc": k_cache, "vc": v_cache}
    out = torch.empty_like(q)
    g.execute(pack | {"q_rot": out})
    assert [step.engine for step in g.plan.steps] == ["cuda.rope"]
    turn = angle[rows.long(), 0, 0, : d // 2].double()
    entry = torch.arange(b, device="cuda")
    for got, x in ((out[:, :, 0], q), (k_cache[entry, :, rows.long()], k)):
        want = torch.stack([oracle.rope(x[i : i + 1].double(), turn[i : i + 1]) for i in range(b)])
        torch.testing.assert_close(got.double(), want[:, 0, :, 0], rtol=2**-8, atol=1e-6)
    assert torch.equal(v_cache[entry, :, rows.long()], v[:, :, 0])
    for room in (k_cache, v_cache):
        assert int(room.isfinite().sum()) == b * 8 * d
