"""Decoding with a KVCache gives what the whole sequence gives, in static shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ropegraph as rg
from ropegraph import angles
from ropegraph.nn import KVCache, RotaryAttention
from ropegraph.testing import budget
from tests.nn.reference import attended
from tests.nn.test_rotary_attention import BF16, F32, F64, H_KV, MODULES, D, S, data, module

ROOM = S + 3
CAUSAL = [name for name in MODULES if name != "not causal"]


@torch.no_grad()
def decoded(
    layer: RotaryAttention, x: Tensor, prompt: int, cache: KVCache, step: Any = None
) -> Tensor:
    """A prefill, then one row after another."""
    step = layer if step is None else step
    made = [layer(x[:, :prompt], cache=cache)] if prompt else []
    for i in range(prompt, x.shape[1]):
        made.append(step(x[:, i : i + 1], cache=cache))
        assert cache.lengths.tolist() == [i + 1] * x.shape[0]
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("prompt", [0, 5])
@pytest.mark.parametrize("name", CAUSAL)
def test_every_step_is_the_whole_forward(name: str, prompt: int) -> None:
    layer, x = module(**MODULES[name]).eval(), data()
    cache = layer.new_cache(2, ROOM)
    got = decoded(layer, x, prompt, cache)
    torch.testing.assert_close(got, layer(x).detach(), rtol=0, atol=1e-12)
    cache.reset()
    assert torch.equal(decoded(layer, x, prompt, cache), got)


@pytest.mark.parametrize("name", ["plain", "norm", "yarn", "window"])
def test_bf16_within_the_budget_of_the_whole_forward(name: str) -> None:
    layer, x = module(BF16, **MODULES[name]).eval(), data(BF16)
    want = attended(layer, x)[0].detach()
    got = decoded(layer, x, 4, layer.new_cache(2, ROOM))
    budget.assert_within(got, want, budget.budget(want, layer(x).detach(), BF16), name)


def test_prompts_of_their_own_lengths_and_a_new_one_in_an_old_place() -> None:
    layer, x = module().eval(), data()
    prompts, cache = [3, 6], layer.new_cache(2, ROOM)
    with torch.no_grad():
        first = layer(x[:, :6], cache=cache, seq_lens=torch.tensor(prompts))
        assert cache.lengths.tolist() == prompts
        steps = [layer(x[:, i : i + 1], cache=cache) for i in (6, 7)]
        for b, n in enumerate(prompts):
            rows = [*range(n), 6, 7]
            want = layer(x[b : b + 1, rows])[0]
            got = torch.cat([first[b, :n], *(s[b] for s in steps)])
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        cache.lengths[0] = 0
        got = layer(x[:, 8:9], cache=cache)
        torch.testing.assert_close(got[0], layer(x[:1, 8:9])[0], rtol=0, atol=1e-12)
    assert cache.lengths.tolist() == [1, 9]


@pytest.mark.parametrize("name", ["plain", "norm"])
def test_one_compiled_step_has_the_same_bits(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    layer, x = module(F32, **MODULES[name]).eval(), data(F32).detach()
    step = torch.compile(layer, fullgraph=True, backend=counter)
    plain, compiled = (layer.new_cache(2, ROOM) for _ in range(2))
    want = decoded(layer, x, 3, plain)
    assert torch.equal(decoded(layer, x, 3, compiled, step), want)
    assert torch.equal(compiled.k, plain.k)
    assert torch.equal(compiled.v, plain.v)
    assert counter.frame_count == 1


def test_dynamic_angles_have_the_length_of_the_cache() -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 8}
    layer, x = module(angles=parameters).eval(), data()
    got = decoded(layer, x, 4, layer.new_cache(2, ROOM))
    want = layer(x, rope=layer.angles(seq_len=ROOM))
    torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-12)
    assert not torch.allclose(got, layer(x), atol=1e-6)


def test_positions_on_several_axes() -> None:
    layer = module(angles={"rope_type": "default", "mrope_section": [1, 1, 2]}).eval()
    x, ids, cache = data(), torch.randint(30, (3, 2, S)), layer.new_cache(2, ROOM)
    want = layer(x, position_ids=ids)
    made: list[Tensor] = []
    with torch.no_grad():
        for i, j in ((0, 6), (6, 7), (7, S)):
            made.append(layer(x[:, i:j], cache=cache, position_ids=ids[..., i:j]))
    torch.testing.assert_close(torch.cat(made, 1), want.detach(), rtol=0, atol=1e-12)
    table = angles.freqs(angles.inv_freq({"mrope_section": [1, 1, 2]}, head_dim=D), ids)
    assert torch.equal(layer(x, rope={"freqs": table}), want)


def test_a_full_cache_raises_and_stays_as_it_was() -> None:
    layer, x, cache = module().eval(), data(), KVCache(2, H_KV, S, D, dtype=F64)
    with torch.no_grad():
        layer(x[:, :-1], cache=cache)
        cache.lengths[0] = 2
        before = cache.k.clone(), cache.v.clone(), cache.lengths.clone()
        with pytest.raises(
            rg.PositionError, match=rf"not fit behind the .* of a cache with max_length={S}; make"
        ):
            layer(x[:, :2], cache=cache)
        with pytest.raises(
            rg.GraphError, match=f"has {S + 1} new rows, and k_cache .*room for {S}"
        ):
            layer(data(s=S + 1), cache=cache)
    assert all(map(torch.equal, before, (cache.k, cache.v, cache.lengths)))


def test_a_cache_itself() -> None:
    cache = module(F32).new_cache(3, 7, dtype=BF16)
    assert cache.k.dtype is cache.v.dtype is BF16
    assert cache.max_length == 7
    assert "[3, 2, 7, 8]" in repr(cache)
    cache.advance(torch.tensor([1, 0, 4]))
    cache.advance(2)
    assert cache.lengths.tolist() == [3, 2, 6]
    with pytest.raises(rg.GraphError, match="KVCache: max_length=0; use 1 or more"):
        KVCache(1, 1, 0, 8)
    with pytest.raises(rg.GraphError, match="KVCache: batch="):
        KVCache(1.5, 1, 1, 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(rg.GraphError, match="KVCache: new_rows='2'; use a number"):
        cache.advance("2")  # pyright: ignore[reportArgumentType]


def test_made_in_inference_mode_and_filled_without() -> None:
    layer, x = module().eval(), data()
    with torch.inference_mode():
        cache = layer.new_cache(2, ROOM)
        want = layer(x)
        first = layer(x[:, :4], cache=cache)
    with torch.no_grad():
        rest = layer(x[:, 4:], cache=cache)
    torch.testing.assert_close(torch.cat((first, rest), dim=1), want)


def test_mistakes() -> None:
    layer, x = module(), data()
    cache = layer.new_cache(2, ROOM)
    with pytest.raises(rg.GraphError, match=r"requires grad.*within torch\.no_grad"):
        layer(x, cache=cache)
    assert not cache.lengths.any()
    with torch.no_grad():
        with pytest.raises(rg.GraphError, match="cu_seqlens packs documents, a cache has"):
            layer(x, cache=cache, cu_seqlens=torch.tensor([0, S]))
        with pytest.raises(rg.GraphError, match="is_causal=False sees what comes after"):
            module(is_causal=False)(x, cache=cache)
        with pytest.raises(rg.GraphError, match=r"dropout with a cache; call eval\(\)"):
            module(dropout=0.1)(x, cache=cache)
        with pytest.raises(rg.GraphError, match=r"k_cache is \[3.*; use \[2, 2, s_max, 8\]"):
            layer(x, cache=layer.new_cache(3, ROOM))
        with pytest.raises(rg.GraphError, match=r"k_cache is torch.float32 .*use one type"):
            layer(x, cache=layer.new_cache(2, ROOM, dtype=F32))
        with pytest.raises(rg.GraphError, match="cache is tuple; use a KVCache"):
            layer(x, cache=(cache.k, cache.v))  # pyright: ignore[reportArgumentType]
