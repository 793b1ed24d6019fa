"""Whole graphs on a GPU, by the public API: engines, replays, streams, threads, captures."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.testing import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
B, H_Q, H_KV, S, D = 2, 6, 2, 72, 64
SCALE = 0.3


def inputs(seed: int = 0, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    g = torch.Generator("cpu").manual_seed(seed)
    found = {
        n: torch.randn(B, S, h, D, generator=g).to("cuda", dtype).transpose(1, 2)
        for n, h in (("q", H_Q), ("k", H_KV), ("v", H_KV), ("do", H_Q))
    }
    half = oracle.angles(S, D).reshape(S, 1, 1, D // 2).float()
    return found | {"freqs": torch.cat((half, half), dim=-1).cuda()}


def nothing(g: rg.pygraph) -> dict[str, torch.Tensor]:
    """Buffers of NaN for all that a graph writes."""
    return {n: x.fill_(torch.nan) for n, x in g.allocate(device="cuda").items()}


class Pair:
    """The forward and the backward graph of rope + causal sdpa, and buffers for both."""

    def __init__(self, x: dict[str, torch.Tensor], **settings: Any) -> None:
        g = rg.pygraph(io_data_type=x["q"].dtype, **settings)
        t = {n: g.tensor_like(x[n], name=n) for n in ("q", "k", "v", "freqs")}
        q, k = (g.rope(t[n], t["freqs"], name=f"rope_{n}") for n in "qk")
        o, _ = g.sdpa(q, k, t["v"], SCALE, use_causal_mask=True, name="attn")
        o.set_output(True).set_name("o").set_stride(x["q"].stride())
        self.forward, self.backward = g, g.backward_graph(["o"], ["q", "k", "v"])
        g.build()
        self.backward.build()
        self.pack = {n: x[n] for n in t} | nothing(g)
        self.back = {n: self.pack[n] for n in self.backward.saved} | {"do": x["do"]}
        self.back |= nothing(self.backward)

    def step(self, **options: Any) -> list[torch.Tensor]:
        self.forward.execute(self.pack, **options)
        self.backward.execute(self.back, **options)
        return [self.pack["o"], *(self.back[f"d{n}"] for n in "qkv")]


def wanted(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """o, dq, dk, dv in fp64."""
    leaves = [x[n].detach().double().requires_grad_() for n in "qkv"]
    turn = x["freqs"][:, 0, 0, : D // 2].double()
    q, k = oracle.rope(leaves[0], turn), oracle.rope(leaves[1], turn)
    keep = torch.ones(S, S, dtype=torch.bool, device="cuda").tril()
    o = oracle.attention(q, k, leaves[2], attn_scale=SCALE, keep=keep)[0]
    return [o.detach(), *torch.autograd.grad(o, leaves, x["do"].double())]


def check(got: list[torch.Tensor], x: dict[str, torch.Tensor]) -> None:
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, wanted(x), strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error < 6e-3, f"{name}: relative error {error:.3g}"


FOLDS = [(fold, log2) for fold in ("auto", "off", "q", "symmetric") for log2 in (False, True)]


@pytest.mark.parametrize(("fold", "log2"), [f for f in FOLDS if f != ("off", True)])
def test_every_fold_on_the_default_engines(fold, log2):
    x = inputs()
    pair = Pair(x, fold=fold, fold_log2=log2)
    assert [s.engine for s in pair.forward.plan.steps] == ["cuda.rope", "cudnn.sdpa"]
    assert [s.engine for s in pair.backward.plan.steps] == ["cudnn.sdpa", "cuda.rope"]
    check(pair.step(), x)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("fold", "log2"), [f for f in FOLDS if f[0] in ("q", "symmetric")])
def test_a_fold_is_at_most_twice_as_wrong_as_none(fold, log2, dtype):
    x = inputs(dtype=dtype)
    errors = [
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(pair.step(), want, strict=True)]
        for want in [wanted(x)]
        for pair in (Pair(x, fold="off"), Pair(x, fold=fold, fold_log2=log2))
    ]
    for name, plain, folded in zip(("o", "dq", "dk", "dv"), *errors, strict=True):
        assert folded <= 2 * plain, f"{name}: {folded:.3g} folded, {plain:.3g} not"


def test_the_same_buffers_again_are_replayed_with_what_they_hold_then():
    x = inputs()
    pair = Pair(x)
    for seed in range(5):
        for name, fresh in inputs(seed).items():
            x[name].copy_(fresh)
        for out in (pair.pack["o"], *(pair.back[f"d{n}"] for n in "qkv")):
            out.fill_(torch.nan)
        check(pair.step(), x)


def test_new_buffers_after_a_replay():
    x = inputs()
    pair = Pair(x)
    for seed in (0, 0, 0, 1, 2, 1, 0, 3, 3, 3):
        x = inputs(seed)
        pair.pack |= {n: x[n] for n in ("q", "k", "v", "freqs")}
        pair.back |= {n: x[n] for n in ("v", "freqs", "do")}
        check(pair.step(), x)


def test_one_address_with_another_layout_is_another_buffer():
    x = inputs()
    pair = Pair(x)
    for _ in range(4):
        pair.step()
    o = pair.pack["o"]
    with pytest.raises(rg.GraphError, match="'o' is declared with strides"):
        pair.forward.execute({**pair.pack, "o": o.contiguous()})
    pair.pack["o"].unsqueeze_(0)
    with pytest.raises(rg.GraphError, match="'o' is declared"):
        pair.forward.execute({**pair.pack, "o": pair.pack["o"].expand(2, -1, -1, -1, -1)})


def test_a_side_stream_behind_a_late_producer():
    x = inputs()
    pair = Pair(x)
    side = torch.cuda.Stream()
    for seed in range(4):
        fresh = inputs(seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            for name in x:
                x[name].copy_(fresh[name])
            got = [t.clone() for t in pair.step()]
        side.synchronize()
        check(got, x)


def test_a_handle_with_a_stream():
    x = inputs()
    pair = Pair(x)
    side, handle = torch.cuda.Stream(), rg.create_handle()
    rg.set_stream(handle, side.cuda_stream)
    for seed in range(3):
        fresh = inputs(seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            for name in x:
                x[name].copy_(fresh[name])
        got = pair.step(handle=handle)
        side.synchronize()
        check(got, x)


def test_threads_with_streams_of_their_own_and_one_graph():
    pair = Pair(inputs())

    def work(seed: int) -> float:
        x = inputs(seed)
        own = {**pair.pack, **{n: x[n] for n in ("q", "k", "v", "freqs")}}
        own |= {n: torch.empty_like(t) for n, t in pair.pack.items() if n not in x}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                pair.forward.execute(own)
        stream.synchronize()
        want = wanted(x)[0]
        return float((own["o"].double() - want).norm() / want.norm())

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < 6e-3


def test_inside_a_capture_of_the_caller():
    x = inputs()
    pair = Pair(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            pair.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        pair.step()
    for seed in (5, 6):
        for name, fresh in inputs(seed).items():
            x[name].copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        check([pair.pack["o"], *(pair.back[f"d{n}"] for n in "qkv")], x)


def test_in_place_in_packed_qkv():
    torch.manual_seed(0)
    qkv = torch.randn(B, S, H_Q + 2 * H_KV, D, device="cuda", dtype=BF16).transpose(1, 2)
    x = {"q": qkv[:, :H_Q], "k": qkv[:, H_Q : H_Q + H_KV], "v": qkv[:, H_Q + H_KV :]}
    x |= {n: t for n, t in inputs().items() if n in ("freqs", "do")}
    before = {n: t.clone() for n, t in x.items()}
    g = rg.pygraph(io_data_type=BF16, fold="q")
    t = {n: g.tensor_like(x[n], name=n) for n in ("q", "k", "v", "freqs")}
    for n in "qk":
        t[n] = g.rope(t[n], t["freqs"], name=f"rope_{n}").set_output(True).set_name(f"{n}_rot")
        t[n].set_stride(x[n].stride())
    o, _ = g.sdpa(t["q"], t["k"], t["v"], SCALE, use_causal_mask=True)
    o.set_output(True).set_name("o")
    out = torch.full((B, H_Q, S, D), torch.nan, device="cuda", dtype=BF16)
    pack = {n: x[n] for n in ("q", "k", "v", "freqs")}
    g.execute(pack | {"q_rot": x["q"], "k_rot": x["k"], "o": out})
    assert len(g.plan.steps) == 2
    assert torch.equal(x["v"], before["v"])
    want = wanted(before)[0]
    assert float((out.double() - want).norm() / want.norm()) < 6e-3


def test_cpu_buffers_on_the_same_graph_object():
    g = rg.pygraph(io_data_type=torch.float32)
    x, f = g.tensor([1, 2, 3, 8], name="x"), g.tensor([3, 1, 1, 8], name="f")
    g.rope(x, f).set_output(True).set_name("y")
    g.build()
    for device in ("cuda", "cpu", "cuda"):
        y = torch.full((1, 2, 3, 8), torch.nan, device=device)
        pack = {"x": torch.ones(1, 2, 3, 8, device=device), "y": y}
        g.execute(pack | {"f": torch.zeros(3, 1, 1, 8, device=device)})
        assert bool((y == 1).all())
    with pytest.raises(rg.GraphError, match="is bound to a buffer on cpu"):
        g.execute({"x": torch.ones(1, 2, 3, 8), "y": y, "f": torch.zeros(3, 1, 1, 8)})


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_position_0_keeps_every_bit_of_subnormal_numbers(dtype):
    smallest = torch.finfo(dtype).smallest_normal
    x = torch.tensor([3.0, -0.0, smallest / 8, -smallest / 2, smallest / 4, 1.0] * 4, device="cuda")
    x = x.to(dtype).view(1, 1, 1, 24).expand(1, 2, 1, 24).contiguous()
    g = rg.pygraph(io_data_type=dtype)
    freqs = torch.zeros(1, 1, 1, 16, device="cuda")
    y = g.rope(g.tensor_like(x, name="x"), g.tensor_like(freqs, name="f"), rope_dim=16)
    y.set_output(True).set_name("y")
    pack = {"x": x, "f": freqs, "y": torch.full_like(x, torch.nan)}
    g.execute(pack)
    assert [s.engine for s in g.plan.steps] == ["cuda.rope"]
    assert torch.equal(pack["y"], x)
    assert int((x[..., 2::6] != 0).sum()) == 8
