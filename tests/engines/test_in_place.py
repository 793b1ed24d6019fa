"""A rotation may write where it reads: bound to one buffer, input and output are the same place."""

import pytest
import torch

import ropegraph as rg
from ropegraph.testing import oracle

DIM = (2, 3, 5, 8)
ENGINES = ["torch", "reference"]


def angles(s: int = 5, r: int = 8) -> torch.Tensor:
    half = oracle.angles(s, r).reshape(s, 1, 1, r // 2)
    return torch.cat((half, half), dim=-1).float()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("interleaved_output", [False, True])
@pytest.mark.parametrize("op", ["rope", "rope_backward"])
def test_the_same_bits_as_out_of_place(engine, dtype, interleaved_output, op):
    g = rg.pygraph(io_data_type=dtype, engines=engine)
    x, f = g.tensor(DIM, name="x"), g.tensor((5, 1, 1, 6), data_type=torch.float32, name="f")
    layout = {"interleaved_output": interleaved_output, "table_layout": "first_half"}
    y = getattr(g, op)(x, f, 0.5, rope_dim=6, **layout).set_output(True).set_name("y")
    assert y.get_dim() == list(DIM)
    torch.manual_seed(0)
    pack = {"x": torch.randn(DIM).to(dtype), "f": angles(5, 6)}
    apart = torch.full_like(pack["x"], torch.nan)
    g.execute(pack | {"y": apart})
    store = pack["x"].clone()
    version = store._version
    g.execute(pack | {"x": store, "y": store})
    assert torch.equal(store, apart)
    assert store._version > version


def packed_qkv(engine: str, is_leaf: bool = False) -> tuple[rg.pygraph, dict[str, torch.Tensor]]:
    """q, k and v as TransformerEngine packs them; q and k are rotated where they lie."""
    b, s, d = 2, 5, 8
    torch.manual_seed(0)
    qkv = torch.randn(b, s, 4 + 2 + 2, d, dtype=torch.float64, requires_grad=is_leaf)
    q, k, v = (x.transpose(1, 2) for x in (qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]))
    g = rg.pygraph(io_data_type=torch.float64, fold="q", engines=engine)
    t = {n: g.tensor_like(x, name=n) for n, x in (("q", q), ("k", k), ("v", v))}
    f = g.tensor((s, 1, 1, d), data_type=torch.float32, name="f")
    rotated = {}
    for n in "qk":
        rotated[n] = g.rope(t[n], f, name=f"rope_{n}").set_output(True).set_name(f"{n}_rot")
        rotated[n].set_stride(t[n].get_stride())
    o, _ = g.sdpa(rotated["q"], rotated["k"], t["v"], 0.3, use_causal_mask=True)
    o.set_output(True).set_name("o")
    pack = {"q": q, "k": k, "v": v, "f": angles(), "q_rot": q, "k_rot": k}
    return g, {**pack, "o": torch.full((b, 4, s, d), torch.nan, dtype=torch.float64), "qkv": qkv}


@pytest.mark.parametrize("engine", ENGINES)
def test_inside_packed_qkv(engine):
    g, pack = packed_qkv(engine)
    qkv = pack.pop("qkv")
    before = qkv.clone()
    g.execute(pack)
    assert len(g.plan.steps) == 2
    assert torch.equal(qkv[:, :, 6:], before[:, :, 6:])
    q, k, v = (x.transpose(1, 2) for x in before.split([4, 2, 2], dim=2))
    turn = angles()[:, 0, 0, :4].double()
    q, k = oracle.rope(q, turn), oracle.rope(k, turn)
    torch.testing.assert_close(qkv[:, :, :4].transpose(1, 2), 0.3 * q, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(qkv[:, :, 4:6].transpose(1, 2), k, rtol=1e-12, atol=1e-12)
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    o = oracle.attention(q, k, v, attn_scale=0.3, keep=keep)[0]
    torch.testing.assert_close(pack["o"], o, rtol=1e-12, atol=1e-12)


def test_a_leaf_that_needs_grad_is_refused():
    g = rg.pygraph(io_data_type=torch.float32)
    x, f = g.tensor(DIM, name="x"), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f).set_output(True).set_name("y")
    leaf = torch.ones(DIM, requires_grad=True)
    with pytest.raises(rg.GraphError, match="'x' is rotated in place, but it is a leaf"):
        g.execute({"x": leaf, "f": angles(), "y": leaf})
    assert bool((leaf == 1).all())


def test_an_input_that_is_read_again_is_refused():
    g = rg.pygraph(io_data_type=torch.float32)
    x, f = g.tensor(DIM, name="x"), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f).set_output(True).set_name("y")
    g.scale(x, 2.0).set_output(True).set_name("z")
    store = torch.ones(DIM)
    with pytest.raises(rg.GraphError, match=r"'y' .* shares memory with that of 'x'"):
        g.execute({"x": store, "f": angles(), "y": store, "z": torch.empty(DIM)})
    assert bool((store == 1).all())
