"""Attention over caches: row after row equals all rows at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ropegraph as rg
from ropegraph.api.pygraph import pygraph
from ropegraph.functional import attention, cached_attention, eager
from ropegraph.functional.kept import Kept
from ropegraph.testing import budget, oracle
from tests.functional.cases import H_KV, H_Q, B, D, S, table
from tests.functional.test_operators import captured
from tests.functional.test_plan_cache import NORMS, ROTATION, no_cache
from tests.functional.test_plan_cache import data as small

ROOM = S + 4
STEPS = ((0, 5), (5, 6), (6, 7), (7, 10), (10, S))


def rows(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = (torch.randn(B, S, h, D, generator=g).to(dtype) for h in (H_Q, H_KV, H_KV))
    return [x.transpose(1, 2) for x in made]


def caches(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """k and v in one piece of memory, the way a model may hold them."""
    whole = torch.zeros(2, B, ROOM, H_KV, D, dtype=dtype).transpose(2, 3)
    return whole[0], whole[1]


def starts(*lengths: int) -> Tensor:
    return torch.tensor(lengths or (0,) * B, dtype=torch.int32)


def decode(data: list[Tensor], steps: Any = STEPS, **options: Any) -> tuple[Tensor, Tensor]:
    """The rows of o, a few at a time, and the cache of k."""
    k_cache, v_cache = caches(data[0].dtype)
    made: list[Tensor] = []
    for first, last in steps:
        new = [x[:, :, first:last] for x in data]
        at = starts(*(first,) * B)
        made.append(cached_attention(*new, k_cache, v_cache, at, table(ROOM), **options))
        assert torch.equal(v_cache[:, :, :last], data[2][:, :, :last])
        assert not v_cache[:, :, last:].any()
    return torch.cat(made, 2), k_cache


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"window": 4}, {"window": 4}),
    "scale": ({"scale": 0.7, "fold": "off"}, {"scale": 0.7}),
    "symmetric": ({"fold": "symmetric", "fold_log2": True}, {}),
    "softcap": ({"softcap": 0.9}, {"softcap": 0.9}),
    "sink": ({"sink": torch.linspace(-1, 1, H_Q)}, {"sink": torch.linspace(-1, 1, H_Q)}),
    "partial": ({"rope_dim": 6, "rope_offset": 0}, {"rope_dim": 6, "rope_offset": 0}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_one_after_another(name: str) -> None:
    ours, whole = OPTIONS[name]
    q, k, v = data = rows()
    angles: dict[str, Any] = {"freqs": table(ROOM)}
    if "rope_dim" in ours:
        half = table(ROOM)[:, : ours["rope_dim"] // 2]
        angles = {"cos": half.cos(), "sin": half.sin(), "half_width": True}
    want = attention(q, k, v, **angles, is_causal=True, enable_gqa=True, **whole)
    k_cache, v_cache = caches()
    for first, last in STEPS:
        new = (x[:, :, first:last] for x in data)
        got = cached_attention(*new, k_cache, v_cache, starts(*(first,) * B), **angles, **ours)
        torch.testing.assert_close(got, want[:, :, first:last], rtol=0, atol=1e-12)
        assert got.transpose(1, 2).is_contiguous()  # as q is


def test_bf16_within_budget() -> None:
    data = rows(torch.bfloat16)
    q, k, v = (x.double() for x in data)
    half = oracle.angles(S, D)
    keep = oracle.band(S, S, right=0)
    want = oracle.attention(
        oracle.rope(q, half), oracle.rope(k, half), v, attn_scale=D**-0.5, keep=keep
    )[0]
    turned = [oracle.rope(x.double(), half).bfloat16() for x in data[:2]]
    peer = torch.nn.functional.scaled_dot_product_attention(
        *turned, data[2], is_causal=True, enable_gqa=True
    )
    allowed = budget.budget(want, peer, torch.bfloat16)
    budget.assert_within(decode(data)[0], want, allowed, "o")


def test_sequences_of_their_own_lengths() -> None:
    """Padded prompts: what padding leaves behind is written over and never read."""
    data = rows()
    new_lens = torch.tensor([3, 6])
    k_cache, v_cache = caches()
    first = cached_attention(
        *(x[:, :, :6] for x in data), k_cache, v_cache, starts(), table(ROOM), new_lens=new_lens
    )
    assert not first[0, :, 3:].any()
    at = new_lens.int()
    second = cached_attention(
        *(x[:, :, 6:8] for x in data), k_cache, v_cache, at, table(ROOM),
        new_lens=torch.tensor([2, 0]),
    )  # fmt: skip
    assert not second[1].any()
    real = torch.tensor([0, 1, 2, 6, 7])
    want = attention(
        *(x[:1, :, real] for x in data), table(ROOM), is_causal=True, enable_gqa=True
    )  # fmt: skip
    got = torch.cat((first[:1, :, :3], second[:1]), 2)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_positions_of_their_own_and_none() -> None:
    data = rows()
    ids = torch.arange(7, 7 + 5)[None]
    new = [x[:, :, :5] for x in data]
    o = cached_attention(*new, *caches(), starts(), table(ROOM), position_ids=ids)
    want = attention(*new, table(ROOM), position_ids=ids, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(o, want, rtol=0, atol=1e-12)
    by_start = cached_attention(
        *new, *caches(), starts(), table(ROOM), start_positions=torch.tensor([7, 7])
    )
    assert torch.equal(by_start, o)
    bare = cached_attention(*new, *caches(), starts())
    want = attention(*new, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(bare, want, rtol=0, atol=1e-12)


def test_the_bits_of_a_graph_by_hand() -> None:
    q, k, v = (x[:, :, :1] for x in rows(torch.float32))
    inv_freq, at = torch.rand(D // 2), starts(3, 8)
    k_cache, v_cache = (torch.randn_like(x) for x in caches(torch.float32))
    pack = {"q": q, "k": k, "v": v, "inv_freq": inv_freq, "at": at}
    pack |= {"kc": k_cache.clone(), "vc": v_cache.clone()}
    pack |= {"ones": torch.ones_like(at), "ends": at + 1, "o": torch.empty_like(q)}
    g = rg.pygraph(io_data_type=torch.float32)
    t = {name: g.tensor_like(x, name=name) for name, x in pack.items() if name != "o"}
    turn = {"inv_freq": t["inv_freq"], "start_positions": t["at"]}
    keys = g.rope(t["k"], **turn, cache=t["kc"], cache_positions=t["at"])
    values = g.cache_write(t["v"], cache=t["vc"], cache_positions=t["at"])
    o, _ = g.sdpa(
        g.rope(t["q"], **turn), keys, values, D**-0.5, use_padding_mask=True, seq_len_q=t["ones"],
        seq_len_kv=t["ends"], use_causal_mask_bottom_right=True,
    )  # fmt: skip
    o.set_output(True).set_name("o").set_stride(pack["o"].stride())
    g.execute(pack)
    assert len(g.plan.steps) == 2
    got = cached_attention(q, k, v, k_cache, v_cache, at, inv_freq=inv_freq)
    for ours, hand in ((got, "o"), (k_cache, "kc"), (v_cache, "vc")):
        assert torch.equal(ours, pack[hand])


def test_one_compiled_step_serves_every_token() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Any:
        o = cached_attention(q * 1.5, k, v, k_cache, v_cache, at, table(ROOM))
        return o, at + q.shape[2]

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    data, at, other = rows(torch.float32), starts(), starts()
    ours, plain = caches(torch.float32), caches(torch.float32)
    for i in range(5):
        new = [x[:, :, i : i + 1] for x in data]
        got, at = compiled(*new, *ours, at)
        want, other = step(*new, *plain, other)
        assert torch.equal(got, want)
    assert all(map(torch.equal, ours, plain))
    assert counter.frame_count == 1


@pytest.mark.parametrize("norms", [{}, {"q_norm": torch.rand(D), "k_norm": torch.rand(D)}])
def test_opcheck(norms: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    new, room = [x[:, :, :2] for x in rows(torch.float32)], caches(torch.float32)
    operator, arguments = captured(
        "cached_attention",
        lambda: cached_attention(*new, *room, starts(), table(ROOM), **norms),
        monkeypatch,
    )
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_tensors_without_memory() -> None:
    new = [x.to("meta") for x in rows()]
    k_cache, v_cache = (x.to("meta") for x in caches())
    o = cached_attention(*new, k_cache, v_cache, starts().to("meta"), table(ROOM).to("meta"))
    assert o.shape == new[0].shape
    assert o.is_meta


def test_what_is_written_counts_as_changed() -> None:
    """So autograd refuses what it saved of a cache before."""
    new = [x[:, :, :2] for x in rows()]
    k_cache, v_cache = caches()
    before = k_cache._version, v_cache._version
    cached_attention(*new, k_cache, v_cache, starts(), table(ROOM))
    assert (k_cache._version, v_cache._version) > before
    with torch.inference_mode():
        k_cache, v_cache = caches()
        cached_attention(*new, k_cache, v_cache, starts(), table(ROOM))
    assert k_cache.any()


def test_another_place_of_the_cache_is_no_stale_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_calls", Kept[Any, Any](64))
    new = [x[:, :, :2] for x in rows()]
    rooms = [caches(), tuple(x.contiguous() for x in caches()), caches()]
    made = [cached_attention(*new, *room, starts(), table(ROOM)) for room in rooms]
    assert torch.equal(made[0], made[1])
    assert all(torch.equal(room[0], rooms[0][0]) and room[0].any() for room in rooms)
    capped = cached_attention(*new, *caches(), starts(), table(ROOM), softcap=0.1)
    assert not torch.equal(capped, made[0])


CHANGES: dict[str, dict[str, Any]] = (
    ROTATION
    | NORMS
    | {
        "scale": {"scale": 0.25},
        "softcap": {"softcap": 0.5},
        "window": {"window": 2},
        "sink": {"sink": torch.ones(4)},
        "fold": {"fold": "symmetric"},
        "fold_log2": {"fold": "q", "fold_log2": True},
        "new_lens": {"new_lens": torch.tensor([1, 2])},
    }
)


def once(changes: dict[str, Any]) -> list[Tensor]:
    """One call, as a graph of the torch engine: o and the caches."""
    room = [torch.zeros(2, h, 12, 8) for h in (2, 2)]
    new = [small(h, i, s=2) for i, h in enumerate((4, 2, 2))]
    options = {"freqs": table(12, 8), **changes}
    ids = options.get("position_ids")
    if ids is not None:
        options["position_ids"] = ids[:, :2]
    return [cached_attention(*new, *room, starts(0, 3), **options), *room]


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_is_as_a_fresh_build(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = CHANGES[field]
    with no_cache(monkeypatch):
        want, base = once(changes), once({})
    for order in ([{}, changes], [changes, {}]):
        monkeypatch.setattr(eager, "_calls", Kept[Any, Any](64))
        for given in order:
            got = once(given)
            assert all(map(torch.equal, got, want if given is changes else base))
    says_the_same = {"fold", "fold_log2", "cos", "table_layout"}
    if field not in says_the_same:
        assert not all(map(torch.equal, want, base))


def test_a_kernel_that_needs_aligned_buffers_writes_to_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache may start anywhere in memory: then a copy is written, and copied back."""
    new = [x[:, :, :2] for x in rows()]
    want, (k_cache, v_cache) = caches(), caches()
    o = cached_attention(*new, *want, starts(), table(ROOM))
    execute = pygraph.execute

    def aligned(self: pygraph, pack: dict[str, Tensor], *rest: Any) -> Any:
        if any(x is not None and x.data_ptr() & 15 for x in pack.values()):
            raise rg.GraphError("a buffer is not on 16 bytes")
        return execute(self, pack, *rest)

    monkeypatch.setattr(pygraph, "execute", aligned)
    odd = torch.zeros(k_cache.numel() + 1, dtype=torch.float64)[1:].view_as(k_cache)
    assert odd.data_ptr() & 15
    assert torch.equal(cached_attention(*new, odd, v_cache, starts(), table(ROOM)), o)
    assert torch.equal(odd, want[0])
    assert torch.equal(v_cache, want[1])


def test_a_full_cache_raises_before_anything_is_written() -> None:
    new = [x[:, :, :2] for x in rows()]
    k_cache, v_cache = caches()
    with pytest.raises(rg.PositionError, match=rf"entry 1 is {ROOM - 1}.*use 0 to {ROOM - 2}"):
        cached_attention(*new, k_cache, v_cache, starts(0, ROOM - 1), inv_freq=torch.rand(D // 2))
    assert not k_cache.any()
    assert not v_cache.any()


def test_mistakes() -> None:
    q, k, v = new = [x[:, :, :2] for x in rows()]
    k_cache, v_cache = caches()

    def call(*data: Tensor, at: Any = None, **options: Any) -> None:
        cached_attention(*data, starts() if at is None else at, table(ROOM), **options)

    with pytest.raises(rg.GraphError, match=r"q .* and k .* differ in rows"):
        call(q[:, :, :1], k, v, k_cache, v_cache)
    with pytest.raises(rg.GraphError, match=rf"k_cache is .*; use \[{B}, {H_KV}, s_max, {D}\]"):
        call(*new, k_cache[:, :1], v_cache)
    with pytest.raises(rg.GraphError, match=r"has 2 new rows, and k_cache .* room for 1"):
        call(*new, k_cache[:, :, :1], v_cache)
    with pytest.raises(rg.GraphError, match=r"v_cache is torch.float32 .*use one type"):
        call(*new, k_cache, v_cache.float())
    with pytest.raises(rg.GraphError, match=r"lengths is torch.int64; use torch.int32 \[b\]"):
        call(*new, k_cache, v_cache, at=starts().long())
    with pytest.raises(rg.GraphError, match=rf"lengths is \[1\]; use \[{B}\]"):
        call(*new, k_cache, v_cache, at=starts(0))
    with pytest.raises(rg.GraphError, match=rf"new_lens is \[1\]; use \[{B}\]"):
        call(*new, k_cache, v_cache, new_lens=starts(1))
    with pytest.raises(rg.GraphError, match=r"new_lens is torch.float32; use torch.int32 \[b\]"):
        call(*new, k_cache, v_cache, new_lens=torch.ones(B))
    with pytest.raises(rg.PositionError, match=r"new_lens of sequence 0 is 3; .* in 0\.\.2"):
        call(*new, k_cache, v_cache, new_lens=starts(3, 1))
    with pytest.raises(rg.GraphError, match="rope_dim= is given but no angles"):
        cached_attention(*new, k_cache, v_cache, starts(), rope_dim=4)
    leaf = q.clone().requires_grad_()
    with pytest.raises(rg.GraphError, match=r"q requires grad.*within torch\.no_grad"):
        call(leaf, k, v, k_cache, v_cache)
    with torch.no_grad():
        call(leaf, k, v, k_cache, v_cache)
    compiled = torch.compile(call, backend="aot_eager")
    with pytest.raises(rg.GraphError, match=r"q requires grad"):
        compiled(leaf, k, v, k_cache, v_cache)
