"""K and V into caches: which rows, in which order, in how many launches, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.compile import lower
from ropegraph.ir.ops import Pair
from ropegraph.ir.serialize import dumps, loads
from ropegraph.lowering.engine import Device
from ropegraph.testing import oracle

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
B, H_Q, H_KV, D, S_MAX, SCALE = 3, 6, 2, 8, 11, 0.3
POSITIONS, EPS = [4, 0, 7], 1e-3
ONE = ["rope_q+rope_k+keep_v"]
NORMED = ["norm_q+rope_q+norm_k+rope_k", "keep_k+keep_v"]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def random(*dim: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def freqs(width: int = D) -> Tensor:
    return random(S_MAX, 1, 1, width // 2, dtype=F32, seed=9).repeat(1, 1, 1, 2)


def cache(order: str = "bhsd", dtype: torch.dtype = F64) -> Tensor:
    """[b, h, s_max, d] of NaN with a payload each, in memory of some order."""
    dims = dict(zip("bhsd", (B, H_KV, S_MAX, D), strict=True))
    made = torch.empty([dims[axis] for axis in order], dtype=dtype)
    kind = BITS[made.element_size()]
    nan = {2: 0x7FC0, 4: 0x7FC00000, 8: 0x7FF8 << 48}[made.element_size()]
    made.view(kind).copy_(nan + torch.arange(made.numel()).reshape(made.shape) % 57)
    return made.permute([order.index(axis) for axis in "bhsd"])


def normed(g: rg.pygraph, x: Any, weight: Any, name: str) -> Any:
    phase = rg.norm_forward_phase.INFERENCE
    return g.rmsnorm(phase, x, weight, epsilon=EPS, name=name)[0]


class Decode:
    """q, k, v -> o, with both caches; the graph and its buffers.

    norm: q and k are normalised first, in the launch of the rotation, and k is written as it is.
    """

    def __init__(
        self,
        s: int = 1,
        dtype: torch.dtype = F64,
        order: str = "bhsd",
        positions: Any = POSITIONS,
        index: torch.dtype = torch.int32,
        rope: dict[str, Any] | None = None,
        device: str = "cpu",
        norm: bool = False,
        **settings: Any,
    ) -> None:
        self.norm = norm
        starts = torch.tensor(positions, dtype=index)
        width = (rope or {}).get("rope_dim", D)
        self.pack: dict[str, Any] = {
            "q": random(B, s, H_Q, D, dtype=dtype, seed=1).transpose(1, 2),
            "k": random(B, s, H_KV, D, dtype=dtype, seed=2).transpose(1, 2),
            "v": random(B, s, H_KV, D, dtype=dtype, seed=3).transpose(1, 2),
            "k_cache": cache(order, dtype),
            "v_cache": cache(order, dtype),
            "positions": starts,
            "freqs": freqs(width),
            "len_q": torch.full((B, 1, 1, 1), s, dtype=torch.int32),
            "len_kv": (starts + s).int().view(B, 1, 1, 1),
        }
        if norm:
            self.pack["weight"] = random(1, 1, 1, D, dtype=dtype, seed=4)
        self.pack = {n: x.to(device) for n, x in self.pack.items()}
        self.pack["o"] = torch.full_like(self.pack["q"], torch.nan)
        g = self.g = rg.pygraph(io_data_type=dtype, **settings)
        t = self.t = {n: g.tensor_like(x, name=n) for n, x in self.pack.items() if n != "o"}
        turn = {"start_positions": t["positions"], **(rope or {})}
        q, k = (normed(g, t[x], t["weight"], f"norm_{x}") if norm else t[x] for x in "qk")
        at = {"cache_positions": t["positions"]}
        self.q = g.rope(q, t["freqs"], name="rope_q", **turn)
        if norm:
            self.k = g.rope(k, t["freqs"], name="rope_k", **turn)
            self.k = g.cache_write(self.k, cache=t["k_cache"], name="keep_k", **at)
        else:
            self.k = g.rope(k, t["freqs"], cache=t["k_cache"], name="rope_k", **at, **turn)
        self.v = g.cache_write(t["v"], cache=t["v_cache"], name="keep_v", **at)

    def attention(self) -> Decode:
        t = self.t
        o, _ = self.g.sdpa(
            self.q, self.k, self.v, SCALE, use_padding_mask=True, seq_len_q=t["len_q"],
            seq_len_kv=t["len_kv"], use_causal_mask_bottom_right=True, name="attn",
        )  # fmt: skip
        o.set_output(True).set_name("o").set_stride(self.pack["o"].stride())
        return self

    @property
    def buffers(self) -> dict[str, Any]:
        used = self.g._look().values
        return {n: x for n, x in self.pack.items() if n in used}

    def run(self) -> dict[str, Any]:
        self.g.execute(self.buffers)
        return self.pack

    def kept(self, before: Tensor, rows: Tensor) -> Tensor:
        """The cache as it must be, by index."""
        want = before.clone()
        starts = self.pack["positions"].tolist()
        for b, i in itertools.product(range(B), range(rows.shape[2])):
            want[b, :, starts[b] + i] = rows[b, :, i]
        return want

    def plain(self, name: str) -> Tensor:
        """What is rotated, in fp64."""
        x = self.pack[name].double()
        if not self.norm:
            return x
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.pack["weight"].double()

    def rotated(self, name: str, engine: str = "torch", **rope: Any) -> Tensor:
        """The rotation of a buffer, normalised or not, by a graph without a cache."""
        g = rg.pygraph(io_data_type=self.pack["q"].dtype, engines=engine)
        names = (name, "freqs", "positions", *(("weight",) if self.norm else ()))
        t = {n: g.tensor_like(self.pack[n], name=n) for n in names}
        x = normed(g, t[name], t["weight"], "norm") if self.norm else t[name]
        y = g.rope(x, t["freqs"], start_positions=t["positions"], **rope)
        y.set_output(True).set_name("y")
        out = torch.empty_like(self.pack[name])
        g.execute({n: self.pack[n] for n in t} | {"y": out})
        return out


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("engine", ["torch", "reference"])
def test_rows_and_nothing_else(
    engine: str, dtype: torch.dtype, order: str, s: int, norm: bool
) -> None:
    rope = {"rope_dim": 4, "rope_offset": 2}
    index = torch.int64 if s == 3 else torch.int32
    given = Decode(s, dtype, order, index=index, rope=rope, norm=norm, engines=engine)
    given.q.set_output(True).set_name("o")
    k_rows, k_before = given.rotated("k", **rope), given.pack["k_cache"].clone()
    v_before = given.pack["v_cache"].clone()
    pack = given.run()
    if engine == "reference" and dtype is not F64:
        # Rounded once from fp64, where torch rounds in fp32: a row may differ in its last bit.
        got = given.kept(pack["k_cache"], k_rows)
        close = torch.isclose(pack["k_cache"].double(), got.double(), rtol=1e-2, atol=1e-2)
        assert (close | got.isnan()).all()
        wanted = given.kept(k_before, k_rows * 0)
        assert torch.equal(bits(given.kept(pack["k_cache"], k_rows * 0)), bits(wanted))
    elif engine == "torch":
        assert torch.equal(bits(pack["k_cache"]), bits(given.kept(k_before, k_rows)))
    assert torch.equal(bits(pack["v_cache"]), bits(given.kept(v_before, pack["v"])))
    assert pack["k_cache"].stride() == k_before.stride()


FOLDS = [("off", False), ("auto", False), ("q", False), ("symmetric", False), ("q", True),
         ("symmetric", True)]  # fmt: skip


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("s", [1, 2])
@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_attention_over_caches_under_every_fold(fold: str, log2: bool, s: int, norm: bool) -> None:
    """Token after token equals attention over all of them; K is kept without any scale."""
    given = Decode(s, norm=norm, fold=fold, fold_log2=log2).attention()
    assert [step.name for step in given.g.plan.steps] == [*(NORMED if norm else ONE), "attn"]
    parts = given.g.plan.steps[-3 if norm else 0].node.attrs
    assert isinstance(parts, Pair)
    ropes = [part.rope if norm else part for part in parts.parts[:2]]
    q_scale, k_scale = (rope.output_scale for rope in ropes)
    assert k_scale == 1.0
    assert (q_scale == 1.0) == (fold in ("off", "symmetric"))
    turn = given.pack["freqs"][:, 0, 0, : D // 2].double()
    keys: list[list[Tensor]] = [[] for _ in range(B)]
    values: list[list[Tensor]] = [[] for _ in range(B)]
    for start in range(0, S_MAX - s, s):
        given.pack["positions"].fill_(start)
        given.pack["len_kv"].fill_(start + s)
        for seed, name in enumerate("qkv"):
            given.pack[name].copy_(random(*given.pack[name].shape, seed=100 * start + seed))
        pack = given.run()
        for b in range(B):
            own = turn[start : start + s]
            q, k = (oracle.rope(given.plain(n)[b : b + 1], own) for n in "qk")
            keys[b].append(k[0])
            values[b].append(pack["v"][b].clone())
            k, v = torch.cat(keys[b], 1), torch.cat(values[b], 1)
            torch.testing.assert_close(pack["k_cache"][b, :, : start + s], k, rtol=0, atol=1e-12)
            keep = torch.ones(s, start + s, dtype=torch.bool).tril(start)
            k, v = (x.repeat_interleave(H_Q // H_KV, 0)[None] for x in (k, v))
            want = oracle.attention(q, k, v, attn_scale=SCALE, keep=keep)[0]
            torch.testing.assert_close(pack["o"][b][None], want, rtol=0, atol=1e-12)


def test_a_fold_into_the_cache_is_declined_in_words() -> None:
    given = Decode(fold="symmetric").attention()
    assert "is a cache that 'rope_k' writes: what is kept there carries no scale" in (
        given.g.explain()
    )


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_launches_on_a_gpu(order: str) -> None:
    """Planned for a GPU that need not be here: s_q = 1 and several tokens."""
    for s in (1, 5):
        given = Decode(s, BF16, order).attention()
        plan = lower(given.g._look(), Device("cuda", 0, 90), None).plan
        assert [(step.name, step.engine) for step in plan.steps] == [
            ("rope_q+rope_k+keep_v", "cuda.rope"),
            ("attn", "torch"),  # no cuDNN on this device
        ]
        given = Decode(s, BF16, order, norm=True).attention()
        plan = lower(given.g._look(), Device("cuda", 0, 90), None).plan
        assert [(step.name, step.engine) for step in plan.steps] == [
            *((name, "cuda.rope") for name in NORMED),
            ("attn", "torch"),
        ]
        lone = Decode(s, BF16, order)
        lone.q.set_output(True)
        plan = lower(lone.g._look(), Device("cuda", 0, 90), None).plan
        assert [step.engine for step in plan.steps] == ["cuda.rope"]


@pytest.mark.parametrize("engine", ["torch", "reference"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-1, S_MAX, S_MAX - 1, 2**31 - 1])
def test_positions_outside_raise_before_anything_is_written(
    wrong: int, index: torch.dtype, engine: str
) -> None:
    """C43."""
    given = Decode(2, positions=[4, wrong, 0], index=index, engines=engine)
    given.pack["freqs"] = torch.zeros(S_MAX, 1, 1, D)
    given.q.set_output(True).set_name("o")
    before = {n: bits(x).clone() for n, x in given.pack.items() if n.endswith("cache") or n == "o"}
    with pytest.raises(rg.PositionError, match=rf"(entry 1|row 0 of batch entry 1).*{wrong}"):
        given.run()
    for name, old in before.items():
        assert torch.equal(bits(given.pack[name]), old), name


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("engine", ["torch", "reference"])
def test_a_wrong_row_of_v_alone_keeps_k_out_too(engine: str, turns: bool) -> None:
    g = rg.pygraph(io_data_type=F64, engines=engine)
    x, rows = random(2, 1, 3, 4), torch.tensor([0, 2])
    full, short = torch.zeros(2, 1, 6, 4, dtype=F64), torch.zeros(2, 1, 4, 4, dtype=F64)
    t = g.tensor_like(rows)
    if turns:
        g.rope(x, torch.ones(9, 1, 1, 4), cache=full, cache_positions=t)
    else:
        g.cache_write(x, cache=full, cache_positions=t)
    g.cache_write(x, cache=short, cache_positions=t)
    with pytest.raises(rg.PositionError, match="use 0 to 1"):
        g.execute({t: rows})
    assert len(g.plan.steps) == 1
    assert not full.any()
    assert not short.any()


def test_no_tokens_and_as_many_as_there_is_room_for() -> None:
    """C16."""
    for s, positions in ((0, [0, S_MAX, 3]), (S_MAX, [0, 0, 0])):
        for engine in ("torch", "reference"):
            given = Decode(s, positions=positions, engines=engine)
            before = given.pack["v_cache"].clone()
            given.run()
            want = given.kept(before, given.pack["v"])
            assert torch.equal(bits(given.pack["v_cache"]), bits(want)), (s, engine)


def test_a_graph_that_only_writes_caches() -> None:
    given = Decode(2, dtype=BF16)
    assert given.g._look().outputs == ()
    assert given.g._look().rewritten == {"k_cache", "v_cache"}
    assert [step.name for step in given.g.plan.steps] == ["rope_k+keep_v"]
    before = given.pack["v_cache"].clone()
    versions = [given.pack[n]._version for n in ("k_cache", "v_cache")]
    given.run()
    want = given.kept(before, given.pack["v"])
    assert torch.equal(bits(given.pack["v_cache"]), bits(want))
    for name, old in zip(("k_cache", "v_cache"), versions, strict=True):
        assert given.pack[name]._version > old


def test_size_one_axes_may_have_any_stride() -> None:
    """C12."""
    x = torch.arange(8.0).view(1, 1, 1, 8)
    store = torch.full((40,), torch.nan)
    room = store[:24].view(3, 8).as_strided((1, 1, 3, 8), (7, 16, 8, 1))
    g = rg.pygraph(io_data_type=F32)
    g.cache_write(x, cache=room, cache_positions=torch.tensor([2]))
    g.execute({})
    assert torch.equal(store[16:24], x.flatten())
    assert store[:16].isnan().all()
    assert store[24:].isnan().all()


def test_a_wider_cache_and_a_narrower_one_take_launches_of_their_own() -> None:
    """One launch reads and writes one type."""
    x = random(2, 2, 1, 8, dtype=BF16)
    rows = torch.tensor([1, 0])
    k_cache, v_cache = torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8, dtype=BF16)
    g = rg.pygraph(io_data_type=BF16)
    t = g.tensor_like(rows)
    g.rope(x, torch.zeros(3, 1, 1, 8), cache=k_cache, cache_positions=t, name="k")
    g.cache_write(x, cache=v_cache, cache_positions=t, name="v")
    assert [step.name for step in g.plan.steps] == ["k", "v"]
    assert "'k' reads bf16 and writes fp32, 'v' reads bf16 and writes bf16" in g.explain()
    g.execute({t: rows})
    for kept in (k_cache, v_cache):
        assert torch.equal(kept[0, :, 1:2], x[0].to(kept.dtype))
        assert torch.equal(kept[1, :, :1], x[1].to(kept.dtype))


def test_two_writes_into_one_cache_come_in_the_order_of_the_graph() -> None:
    first, second = random(1, 1, 2, 4), random(1, 1, 2, 4, seed=1)
    rows, room = torch.tensor([1]), torch.zeros(1, 1, 4, 4, dtype=F64)
    g = rg.pygraph(io_data_type=F64)
    t = g.tensor_like(rows)
    kept = g.cache_write(first, cache=room, cache_positions=t, name="first")
    kept = g.cache_write(second, cache=kept, cache_positions=torch.tensor([2]), name="second")
    g.scale(kept, 1.0).set_output(True).set_name("copy")
    copy = torch.empty_like(room)
    g.execute({t: rows, "copy": copy})
    assert torch.equal(room[0, 0], torch.cat([room[0, 0, :1] * 0, first[0, 0, :1], second[0, 0]]))
    assert torch.equal(copy, room)


@pytest.mark.parametrize("by_groups", [False, True])
def test_packed_qkv_with_a_cache_behind(by_groups: bool) -> None:
    n = H_Q // H_KV
    dim = (B, 1, H_KV, (n + 2) * D) if by_groups else (B, 1, H_Q + 2 * H_KV, D)
    split = (n * D, D, D) if by_groups else (H_Q, H_KV, H_KV)
    qkv, given = random(*dim, seed=4), Decode()
    g = rg.pygraph(io_data_type=F64)
    t = {n: g.tensor_like(given.pack[n], name=n) for n in ("k_cache", "v_cache", "positions")}
    q, _, v = g.qkv_rope(
        qkv, given.pack["freqs"], split=split, by_groups=by_groups, start_positions=t["positions"],
        k_cache=t["k_cache"], k_cache_positions=t["positions"], name="turn",
    )  # fmt: skip
    g.cache_write(v, cache=t["v_cache"], cache_positions=t["positions"], name="keep_v")
    q.set_output(True).set_name("q")
    assert [step.name for step in g.plan.steps] == ["turn_q+turn_k+keep_v"]
    parts = qkv.split(split, 3 if by_groups else 2)
    q, k, v = (x.reshape(B, 1, -1, D).transpose(1, 2) for x in parts)
    given.pack |= {"q": q.clone(), "k": k.clone(), "v": v.clone()}
    before = {name: given.pack[name].clone() for name in ("k_cache", "v_cache")}
    g.execute({name: given.pack[name] for name in t} | {"q": torch.empty_like(q)})
    for name, rows in (("k_cache", given.rotated("k")), ("v_cache", v)):
        assert torch.equal(bits(given.pack[name]), bits(given.kept(before[name], rows)))
    with pytest.raises(rg.GraphError, match="in_place and k_cache both say where K goes"):
        rg.pygraph(io_data_type=F64).qkv_rope(
            qkv, given.pack["freqs"], split=split, by_groups=by_groups, in_place=True,
            k_cache=given.pack["k_cache"], k_cache_positions=given.pack["positions"],
        )  # fmt: skip


@pytest.mark.parametrize("norm", [False, True])
def test_a_serialized_graph_and_its_report(norm: bool) -> None:
    given = Decode(2, norm=norm).attention()
    again = rg.pygraph().deserialize(given.g.serialize())
    assert again.key == given.g.key
    assert str(again.lowered.plan.graph) == str(given.g.lowered.plan.graph)
    lowered = given.g.lowered.plan.graph
    assert loads(dumps(lowered)) == lowered
    other = Decode(2, norm=norm, index=torch.int64).attention()
    assert other.g.key != given.g.key
    again.execute(other.buffers | {"positions": given.pack["positions"]})
    given.run()
    for name in ("o", "k_cache", "v_cache"):
        assert torch.equal(bits(given.pack[name]), bits(other.pack[name])), name
    assert "cache_write" in given.g.to_mermaid("recorded")
    assert "[cache_write]" in str(lowered)
    others = "keep_k" if norm else "rope_q, rope_k"
    assert f"keep_v: one launch for {others} and keep_v" in given.g.explain()
    assert given.g.to_mermaid("lowered").count("(rope_pair)") == 1
    checked = given.g.verify(given.buffers)
    assert checked.is_ok, str(checked)
    assert len(checked.checks) == 4 + norm  # q, k before its cache, both caches and o


def test_no_gradient_goes_through_a_cache() -> None:
    for wanted in ("q", "k", "v"):
        given = Decode().attention()
        with pytest.raises(rg.GraphError, match="no gradient goes through a cache write"):
            given.g.backward_graph(["o"], [wanted])


def test_what_shares_memory_is_refused() -> None:
    """C23."""
    given = Decode(2)
    buffers = given.buffers
    for name in ("k_cache", "v_cache"):
        leaf = given.pack[name].clone().requires_grad_()
        with pytest.raises(rg.GraphError, match=f"'{name}' is written in place, but it is a leaf"):
            given.g.execute({**buffers, name: leaf})
    with pytest.raises(rg.GraphError, match="shares memory with that of"):
        given.g.execute({**buffers, "v_cache": buffers["k_cache"]})
    g = rg.pygraph(io_data_type=F64)
    room = buffers["k_cache"]
    g.cache_write(room[:, :, 3:4], cache=room, cache_positions=torch.tensor([0, 0, 0]))
    with pytest.raises(rg.GraphError, match="shares memory with that of"):
        g.execute({})
    flat = torch.zeros(B, H_KV, 1, D, dtype=F64).expand(B, H_KV, S_MAX, D)
    g = rg.pygraph(io_data_type=F64)
    g.cache_write(buffers["k"], cache=flat, cache_positions=torch.tensor([0, 0, 0]))
    with pytest.raises(rg.GraphError, match="by which elements of its dim"):
        g.execute({})


def test_a_cache_is_read_after_it_was_written() -> None:
    """C32: nobody may read, or write, what a write has changed."""
    given = Decode()
    o, _ = given.g.sdpa(given.q, given.t["k_cache"], given.v, name="attn")
    o.set_output(True)
    with pytest.raises(rg.GraphError, match=r"'k_cache', which is also read by \['attn'\]"):
        given.g.build()
    given = Decode()
    given.g.cache_write(
        given.t["v"], cache=given.t["v_cache"], cache_positions=given.t["positions"], name="again"
    )
    with pytest.raises(rg.GraphError, match=r"which is also read by \['again'\]"):
        given.g.build()
    given = Decode()
    given.g.cache_write(
        given.t["v_cache"], cache=given.t["v_cache"], cache_positions=given.t["positions"]
    )
    with pytest.raises(rg.GraphError, match="which is also read by"):
        given.g.build()


@pytest.mark.parametrize(
    ("setter", "argument", "message"),
    [
        ("set_output", True, "is the cache 'k_cache' itself, in place; leave out set_output"),
        ("set_uid", 5, "is the cache 'k_cache' itself, in place; leave out set_output"),
        ("set_data_type", F32, "'k_cache' itself, which is fp64; leave out set_data_type"),
    ],
)
def test_what_a_write_returns_is_the_cache_itself(setter: str, argument: Any, message: str) -> None:
    given = Decode()
    getattr(given.k, setter)(argument)
    with pytest.raises(rg.GraphError, match=message):
        given.g.build()


def small(**changes: Any) -> dict[str, Any]:
    return {"x": [2, 3, 4, 8], "cache": [2, 3, 9, 8], "rows": [2], **changes}


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (small(cache=[2, 3, 3, 8]), r"cache \[2, 3, 3, 8\] has 3 rows a sequence for the 4 of"),
        (small(cache=[2, 2, 9, 8]), r"cannot take rows of input \[2, 3, 4, 8\]; use \[2, 3, s_max"),
        (small(cache=[2, 3, 9]), r"use \[2, 3, s_max, 8\]"),
        (small(rows=[1]), r"cache_positions is \[1\]; use \[2\]"),
        (small(rows=[2, 1, 1, 1]), r"cache_positions is \[2, 1, 1, 1\]; use \[2\]"),
    ],
)
def test_shapes_that_do_not_fit(dims: dict[str, list[int]], message: str) -> None:
    for method in ("rope", "cache_write"):
        g = rg.pygraph(io_data_type=F64)
        freqs = (g.tensor([9, 1, 1, 8], data_type=F32),) if method == "rope" else ()
        with pytest.raises(rg.GraphError, match=message):
            getattr(g, method)(
                g.tensor(dims["x"]), *freqs, cache=g.tensor(dims["cache"]),
                cache_positions=g.tensor(dims["rows"], data_type=torch.int32),
            )  # fmt: skip
        assert not g.recorder.nodes


def test_settings_that_do_not_go_with_a_cache() -> None:
    def refused(message: str, dim: list[int] | None = None, **options: Any) -> None:
        g = rg.pygraph(io_data_type=F64)
        t = {
            "cache": g.tensor([2, 3, 9, 8], name="room"),
            "cache_positions": g.tensor([2], data_type=torch.int32),
        }
        for name, value in options.items():
            t[name] = value(g, t) if callable(value) else value
        x, freqs = g.tensor(dim or [2, 3, 4, 8]), g.tensor([9, 1, 1, 8], data_type=F32)
        with pytest.raises(rg.GraphError, match=message):
            _ = g.rope(x, freqs, **t), g.build()

    refused("cache= is given without cache_positions=", cache_positions=None)
    refused("cache_positions= is given without cache=", cache=None)
    refused("cache together with cp_size=2", cp_size=2)
    refused("cache together with head_groups=3", [2, 3, 1, 4, 8], head_groups=3)
    refused(
        "cache together with cu_seqlens",
        cu_seqlens=lambda g, _: g.tensor([3], data_type=torch.int32),
    )
    refused("is made by 'scale.0'; use an input", cache=lambda g, t: g.scale(t["cache"], 2.0))
    refused("cache_positions is fp64", cache_positions=lambda g, _: g.tensor([2], data_type=F64))
    g = rg.pygraph(io_data_type=F64)
    with pytest.raises(rg.GraphError, match="give cache= and cache_positions="):
        g.cache_write(g.tensor([2, 3, 4, 8]))
    with pytest.raises(rg.GraphError, match="is no argument here"):
        g.rope_backward(  # type: ignore[call-arg]
            g.tensor([2, 3, 4, 8]), g.tensor([9, 1, 1, 8]), cache=g.tensor([2, 3, 9, 8])
        )


def test_a_norm_before_a_rotation_into_a_cache_is_a_launch_of_its_own() -> None:
    k, starts = random(B, H_KV, 1, D), torch.tensor(POSITIONS, dtype=torch.int32)
    held, weight, table = cache(), random(1, 1, 1, D, seed=4), freqs()
    g = rg.pygraph(io_data_type=F64)
    y, _ = g.rmsnorm(
        rg.norm_forward_phase.INFERENCE, g.tensor_like(k, name="k"),
        g.tensor_like(weight, name="w"), epsilon=1e-6, name="norm",
    )  # fmt: skip
    rows = g.tensor_like(starts, name="rows")
    g.rope(
        y, g.tensor_like(table, name="freqs"), start_positions=rows, name="turn",
        cache=g.tensor_like(held, name="cache"), cache_positions=rows,
    )  # fmt: skip
    before = held.clone()
    g.execute({"k": k, "w": weight, "rows": starts, "freqs": table, "cache": held})
    assert [s.name for s in g.plan.steps] == ["norm", "turn"]
    assert "writes into a cache" in g.explain()
    norm = k * (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    for b, row in enumerate(POSITIONS):
        turn = table[row : row + 1, 0, 0, : D // 2].double()
        want = oracle.rope(norm[b : b + 1], turn)[0, :, 0]
        torch.testing.assert_close(held[b, :, row], want, rtol=0, atol=1e-12)
        others = [i for i in range(S_MAX) if i != row]
        assert torch.equal(bits(held[b, :, others]), bits(before[b, :, others]))
