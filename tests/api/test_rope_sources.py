"""Sources of angles, positions and numerics as a caller records them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph
from ropegraph import FoldContractError, GraphError, PositionError
from ropegraph.testing.inputs import normal, poisoned
from tests.api.graphs import F32, F64, buffers, new, refused
from tests.api.test_ambient import MODES

BF16, INT32, INT64 = torch.bfloat16, torch.int32, torch.int64
ONE = torch.tensor([1.0, 0.01])
ROW = torch.tensor([1.0, 2.0, 3.0, 4.0])


def rotate(x: Tensor, op: str = "rope", **options: Any) -> Tensor:
    """One rotation of bound tensors, into NaN."""
    g = new(io_data_type=x.dtype)
    options = {n: adopt(g, n, t) if isinstance(t, Tensor) else t for n, t in options.items()}
    y = getattr(g, op)(adopt(g, "x", x), **options, name="turn").set_output(True).set_name("y")
    y.set_stride(x.contiguous().stride())
    out = poisoned(x.shape, x.dtype)
    g.execute({"y": out})
    return out


def adopt(g: Any, name: str, tensor: Tensor) -> Any:
    handle = g.tensor_like(tensor, name=name)
    handle.spec.bound = tensor
    return handle


def close(got: Tensor, *want: float) -> None:
    wanted = torch.tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got.flatten(), wanted, rtol=0, atol=1e-4)


def sources(angles: Tensor) -> dict[str, dict[str, Any]]:
    """Every way to say that row i is turned by angles[i], of r/2 each."""
    half = angles[:, None, None]
    full = torch.cat([half, half], dim=3)
    pairs = torch.stack([half, half], dim=4).flatten(3)
    found: dict[str, dict[str, Any]] = {}
    for name, table, how in (
        ("half", half, {"half_width": True}),
        ("first_half", full, {"table_layout": "first_half"}),
        ("pairs", pairs, {"table_layout": "pairs"}),
    ):
        cos, sin = table.cos(), table.sin()
        found[f"freqs, {name}"] = {"freqs": table, **how}
        found[f"tables, {name}"] = {"cos": cos, "sin": sin, **how}
        found[f"packed, {name}"] = {"cos_sin": torch.cat([cos, sin], dim=3), **how}
    return found


WAYS = sources(ONE[None])
WAYS["inv_freq"] = {"inv_freq": ONE, "position_ids": torch.tensor([[1]])}
WAYS["exact"] = {**WAYS["inv_freq"], "angle_precision": "exact"}
WAYS["start"] = {"inv_freq": ONE, "start_positions": torch.tensor([1])}


@pytest.mark.parametrize("way", WAYS)
def test_c08_both_pairings_by_every_source(way):
    x = ROW.reshape(1, 1, 1, 4)
    halves = (-1.98411, 1.95990, 2.46238, 4.01980)
    close(rotate(x, **WAYS[way]), *halves)
    at_one = torch.tensor([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    close(rotate(at_one, **WAYS[way]), 0.5403, 0, 0.8415, 0)
    pairs = {"table_layout": "first_half", **WAYS[way], "interleaved": True}
    if WAYS[way].get("half_width") or "inv_freq" in WAYS[way]:
        pairs.pop("table_layout")
    close(rotate(at_one, **pairs), 0.5403, 0.8415, 0, 0)
    both = rotate(x, **{**pairs, "interleaved": False, "interleaved_output": True})
    close(both, halves[0], halves[2], halves[1], halves[3])
    y = torch.tensor(halves).reshape(1, 1, 1, 4)
    close(rotate(y, "rope_backward", **WAYS[way]), 1, 2, 3, 4)
    close(rotate(y, inverse=True, **WAYS[way]), 1, 2, 3, 4)
    y = torch.tensor([halves[i] for i in (0, 2, 1, 3)]).reshape(1, 1, 1, 4)
    back = {**pairs, "interleaved": False, "interleaved_output": True}
    close(rotate(y, "rope_backward", **back), 1, 2, 3, 4)


@pytest.mark.parametrize("way", ["inv_freq", "table"])
def test_c09_a_part_of_the_head(way):
    x = torch.arange(1.0, 9.0).reshape(1, 1, 1, 8)
    table = 3 * ONE.reshape(1, 1, 1, 2)
    given = {"cos": table.cos(), "sin": table.sin(), "half_width": True}
    if way == "inv_freq":
        given = {"inv_freq": ONE, "start_positions": torch.tensor([3], dtype=INT32)}
    head = rotate(x, rope_dim=4, rope_offset=0, **given)
    close(head, -1.41335, 1.87912, -2.82886, 4.05819, 5, 6, 7, 8)
    close(rotate(x, rope_dim=4, **given), 1, 2, 3, 4, -5.93780, 5.75734, -6.22435, 8.17637)


@pytest.mark.parametrize("mode", MODES)
def test_c02_large_positions_stay_apart_in_every_mode(mode):
    x = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 4, 4).contiguous()
    ids = torch.arange(65536, 65540)[None]
    want = torch.tensor([-0.7218, -0.9724, -0.3289, 0.6169])
    g = new()
    t = {"x": x, "inv_freq": ONE, "position_ids": ids}
    g.rope(**{"input" if n == "x" else n: adopt(g, n, v) for n, v in t.items()}, name="turn")
    g.find_tensor("turn::OUT_0").set_output(True).set_name("y")
    plain, y = poisoned(x.shape), poisoned(x.shape)
    g.execute({"y": plain})
    torch.testing.assert_close(plain[0, 0, :, 0], want, rtol=0, atol=1e-4)
    with MODES[mode]():
        g.execute({"y": y})
    assert torch.equal(y, plain)


def test_without_positions_inv_freq_counts_rows():
    x = normal((2, 3, 5, 4))
    ids = torch.arange(5, dtype=INT32)[None]
    assert torch.equal(rotate(x, inv_freq=ONE), rotate(x, inv_freq=ONE, position_ids=ids))
    four = rotate(x, inv_freq=ONE.reshape(1, 1, 1, 2))
    assert torch.equal(four, rotate(x, inv_freq=ONE))


def test_transposed_output_memory():
    # [s, b, h, d] read, [b, s, h, d] written: strides of the output say so.
    x = normal((3, 5, 2, 8)).permute(1, 2, 0, 3)  # b = 5, h = 2, s = 3
    g = new()
    t = g.tensor_like(x, name="x")
    y = g.rope(t, inv_freq=g.tensor([4], name="inv"), name="turn")
    y.set_output(True).set_name("y").set_stride([3 * 2 * 8, 8, 2 * 8, 1])
    out = poisoned((5, 3, 2, 8)).transpose(1, 2)
    inv = torch.tensor([1.0, 0.5, 0.25, 0.125])
    g.execute({"x": x, "inv": inv, "y": out})
    assert torch.equal(out, rotate(x.contiguous(), inv_freq=inv))


def test_a_caller_binds_tensors_by_name():
    g = new()
    dims = {"x": [2, 3, 5, 4], "c": [9, 1, 1, 4], "s": [9, 1, 1, 4], "ids": [2, 5]}
    t = {n: g.tensor(d, name=n) for n, d in dims.items()}
    t["c"].set_data_type(BF16), t["s"].set_data_type(BF16)
    y = g.rope(t["x"], cos=t["c"], sin=t["s"], position_ids=t["ids"])
    y.set_output(True).set_name("y")
    g.build()
    values = g.plan.graph.values
    assert values["ids"].dtype is ropegraph.data_type.INT32
    text = str(g.plan.graph)
    assert "(input=x, cos=c, sin=s, position_ids=ids, rope_dim=4" in text
    assert "ids" in g.to_mermaid()
    pack = buffers(g)
    g.execute(pack)
    again = new()
    again.deserialize(g.serialize())
    assert again.key == g.key
    out = {**pack, "y": torch.full_like(pack["y"], torch.nan)}
    again.execute(out)
    assert torch.equal(out["y"], pack["y"])
    pack["ids"] = torch.full((2, 5), 9, dtype=INT32)
    pack["y"].fill_(torch.nan)
    refused(g, pack, "position 9, outside of the 9 rows of cos 'c'", error=PositionError)


def test_verify_compares_positions_and_tables():
    g = new(io_data_type=BF16)
    x = g.tensor([1, 3, 6, 8], name="x")
    inv, cu = g.tensor([4], name="inv"), g.tensor([4], name="cu")
    g.rope(x, inv_freq=inv, cu_seqlens=cu, name="turn").set_output(True).set_name("y")
    g.build()
    pack = {**buffers(g), "cu": torch.tensor([0, 2, 2, 5], dtype=INT32)}
    report = g.verify(pack)
    assert report.is_ok
    assert not report.checks[0].unchecked


def test_verify_of_promised_bits_is_not_a_comparison():
    g = new(io_data_type=BF16)
    x, c = g.tensor([1, 3, 6, 8], name="x"), g.tensor([6, 1, 1, 16], name="c")
    g.rope(x, cos_sin=c, numerics="hf", name="turn").set_output(True).set_name("y")
    assert "about bits" in g.verify(buffers(g)).checks[0].unchecked


# backward_graph, C26


def rotated_attention(**positions: Any) -> tuple[Any, dict[str, Any]]:
    """q and k turned at start_positions; v; -> o."""
    g = new(io_data_type=F64, **positions.pop("settings", {}))
    t = {n: g.tensor([2, 2, 4, 8], name=n) for n in "qkv"}
    t["inv"] = g.tensor([4], data_type=F32, name="inv")
    t["at"] = g.tensor([2], data_type=INT32, name="at")
    q, k = (
        g.rope(t[n], inv_freq=t["inv"], start_positions=t["at"], name=f"rope_{n}", **positions)
        for n in "qk"
    )
    o, _ = g.sdpa(q, k, t["v"], attn_scale=0.3, generate_stats=True, name="attn")
    o.set_output(True).set_name("o")
    return g, t


@pytest.mark.parametrize("fold", ["off", "q", "symmetric"])
def test_c26_the_backward_has_the_positions(fold):
    g, _ = rotated_attention(settings={"fold": fold})
    b = g.backward_graph(["o"], ["q", "k"])
    assert {"inv", "at"} <= set(b.saved)
    assert b.plan.steps[-1].name == "rope_q_backward+rope_k_backward"
    assert g.plan.steps[0].name == "rope_q+rope_k"
    at, inv = torch.tensor([3, 0], dtype=INT32), torch.tensor([1.0, 0.5, 0.1, 0.01])
    pack = {**buffers(g), "at": at, "inv": inv}
    g.execute(pack)
    grads = {**buffers(b), "at": at, "inv": inv}
    grads |= {n: pack[n] for n in b.plan.graph.inputs if n in pack}
    b.execute(grads)
    q, k = (pack[n].clone().requires_grad_() for n in "qk")
    position = at[:, None, None, None] + torch.arange(4)[None, None, :, None]
    angle = (position.float() * inv).double()
    turned = [
        torch.cat(
            [
                x[..., :4] * angle.cos() - x[..., 4:] * angle.sin(),
                x[..., 4:] * angle.cos() + x[..., :4] * angle.sin(),
            ],
            dim=3,
        )
        for x in (q, k)
    ]
    o = torch.softmax(0.3 * turned[0] @ turned[1].transpose(2, 3), dim=3) @ pack["v"]
    torch.testing.assert_close(pack["o"], o.detach(), rtol=1e-11, atol=1e-11)
    for got, want in zip(("dq", "dk"), torch.autograd.grad(o, (q, k), grads["do"]), strict=True):
        torch.testing.assert_close(grads[got], want, rtol=1e-11, atol=1e-11)


def test_c26_by_hand_dx_is_turned_back_from_the_same_positions():
    dy = normal((2, 1, 3, 4), F64)
    at = torch.tensor([3, 0])
    dx = rotate(dy, "rope_backward", inv_freq=ONE, start_positions=at)
    want = rotate(dy, inv_freq=ONE, start_positions=at, inverse=True)
    torch.testing.assert_close(dx, want, rtol=1e-13, atol=1e-13)


def by_hand(g: Any, **positions: Any) -> Any:
    """A backward recorded by the caller, its rotations with other positions."""
    b = new(io_data_type=F64, fold_contract=g.fold_contract)
    t = {n: b.tensor([2, 2, 4, 8], name=n) for n in ("q", "k", "v", "o", "dO")}
    t["stats"] = b.tensor([2, 2, 4, 1], name="stats")
    dq, dk, _ = b.sdpa_backward(**t, attn_scale=0.3, name="attn")
    inv = b.tensor([4], data_type=F32, name="inv")
    given = {n: b.tensor(d, data_type=INT32, name=n) for n, d in positions.items()}
    for grad, name in ((dq, "q"), (dk, "k")):
        made = b.rope_backward(grad, inv_freq=inv, name=f"rope_{name}", **given)
        made.set_output(True).set_name(f"d{name}")
    return b


def test_c26_a_backward_by_hand_without_the_positions_is_refused():
    g, _ = rotated_attention()
    by_hand(g, start_positions=[2]).build()
    for other in ({}, {"position_ids": [2, 4]}):
        with pytest.raises(FoldContractError, match="positions wherever that has them"):
            by_hand(g, **other).build()


def test_the_gradient_of_freqs_by_position():
    g = new(io_data_type=F64)
    x, f = g.tensor([2, 3, 4, 8], name="x"), g.tensor([9, 1, 1, 8], name="f")
    ids = g.tensor([2, 4], data_type=INT64, name="ids")
    g.rope(x, f, position_ids=ids, name="turn").set_output(True).set_name("y")
    b = g.backward_graph(["y"], ["x", "f"])
    assert b.saved == ["f", "ids", "x"]
    pack = {**buffers(b), "ids": torch.tensor([[1, 1, 8, 0], [0, 5, 1, 8]])}
    b.execute(pack)
    read = torch.tensor([0, 1, 5, 8])
    unread = [i for i in range(9) if i not in read]
    assert bool((pack["df"][read][..., :4] != 0).all())
    assert not pack["df"][unread].any()


@pytest.mark.parametrize("port", ["inv_freq", "cos", "sin", "cos_sin", "start_positions"])
def test_other_sources_have_no_gradient(port):
    g = new()
    x = g.tensor([1, 2, 3, 4], name="x")
    given = {
        "inv_freq": {"inv_freq": [2]},
        "cos": {"cos": [3, 1, 1, 4], "sin": [3, 1, 1, 4]},
        "cos_sin": {"cos_sin": [3, 1, 1, 8]},
    }
    given["sin"], given["start_positions"] = given["cos"], {"inv_freq": [2], "start_positions": [1]}
    t = {n: g.tensor(d, name=f"the {n}") for n, d in given[port].items()}
    g.rope(x, **t, name="turn").set_output(True).set_name("y")
    text = f"rope 'turn': {port} 'the {port}' has no gradient; .* only freqs has one"
    with pytest.raises(GraphError, match=text):
        g.backward_graph(["y"], [f"the {port}"])


# C23


@pytest.mark.parametrize("how", ["table", "positions"])
def test_c23_an_output_over_what_it_looks_up_is_refused(how):
    g = new()
    x, c = g.tensor([1, 1, 4, 4], name="x"), g.tensor([4, 1, 1, 8], name="c")
    at = g.tensor([1], data_type=INT32, name="at")
    g.rope(x, cos_sin=c, start_positions=at, name="turn").set_output(True).set_name("y")
    pack = {"x": torch.ones(1, 1, 4, 4), "c": torch.ones(4, 8), "y": torch.zeros(1, 1, 4, 4)}
    pack["at"] = torch.zeros(1, dtype=INT32)
    if how == "table":
        pack["c"] = torch.ones(48)[:32].view(4, 8)
        pack["y"] = torch.ones(48)[:16].view(1, 1, 4, 4)
        pack["y"] = pack["c"].view(-1)[16:].view(1, 1, 4, 4)
    else:
        pack["at"] = pack["y"].view(INT32).view(-1)[:1]
    refused(g, pack, "shares memory with that of", "use separate buffers")


def test_c23_inputs_are_as_they_were_and_in_place_is_exact():
    g = new(io_data_type=BF16)
    x, c = g.tensor([2, 3, 4, 6], name="x"), g.tensor([9, 1, 1, 6], name="c")
    ids = g.tensor([1, 4], data_type=INT64, name="ids")
    y = g.rope(x, cos_sin=c, half_width=True, position_ids=ids, interleaved=True, numerics="nemo")
    y.set_output(True).set_name("y")
    pack = {**buffers(g), "ids": torch.tensor([[8, 0, 3, 3]])}
    before = {n: t.clone() for n, t in pack.items()}
    g.execute(pack)
    assert all(torch.equal(pack[n], before[n]) for n in ("x", "c", "ids"))
    again = {**pack, "x": pack["x"].clone()}
    version = again["x"]._version
    again["y"] = again["x"]
    g.execute(again)
    assert torch.equal(again["y"], pack["y"])
    assert again["x"]._version > version


# numerics


@pytest.mark.parametrize("fold", ["auto", "q", "symmetric"])
@pytest.mark.parametrize("numerics", ["nemo", "hf"])
def test_promised_bits_decline_folds(numerics, fold):
    g = new(io_data_type=BF16, fold=fold)
    q, k, v = (g.tensor([1, 2, 4, 8], name=n) for n in "qkv")
    c = g.tensor([4, 1, 1, 16], name="c")
    q, k = (g.rope(x, cos_sin=c, numerics=numerics, name=f"rope_{x.get_name()}") for x in (q, k))
    g.sdpa(q, k, v, attn_scale=0.3, is_inference=True, name="attn")[0].set_output(True)
    pair = g.plan.graph.node("rope_q+rope_k").attrs
    assert [part.output_scale for part in pair.parts] == [1.0, 1.0]
    text = f"fold-attn-scale did not, at attn: 'rope_q' is bit-exact (numerics='{numerics}')"
    assert text in g.explain()


def test_a_scale_behind_promised_bits_stays_a_node():
    g = new(io_data_type=BF16)
    x, c = g.tensor([1, 2, 4, 8], name="x"), g.tensor([4, 1, 1, 16], name="c")
    g.scale(g.rope(x, cos_sin=c, numerics="hf"), 0.5).set_output(True)
    assert len(g.plan.steps) == 2
