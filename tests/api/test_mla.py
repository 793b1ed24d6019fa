"""mla_kv_rope as it is recorded: layouts, messages, attention behind it, gradients, folds."""

from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.api.mla_ops import Mxfp8
from ropegraph.errors import FoldContractError, GraphError
from ropegraph.testing import oracle
from tests.engines import mxfp8_by_hand as by_hand
from tests.engines.mla_cases import exact, inputs

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def refused(text: str, *args: Any, **kwargs: Any) -> None:
    g = rg.pygraph()
    with pytest.raises(GraphError) as caught:
        g.mla_kv_rope(*args, **kwargs)
    assert text in str(caught.value), caught.value
    assert not g.recorder.nodes


def test_messages():
    given = inputs(2, 3, 5, 7, 6, 6)
    refused("kv [2, 3, 5, 13] has 13 channels", **given)
    refused("nope_dim=14", **given, nope_dim=14)
    refused("quantize='fp8'; use one of 'mxfp8'", **given, nope_dim=7, quantize="fp8")
    refused("nope_dim + r = 12, no multiple of 32", **given, nope_dim=6, quantize="mxfp8")
    refused("v_dim=7 is no argument here", **given, nope_dim=7, v_dim=7)
    refused("k_rope=None is not a tensor", given["kv"], None, given["cos"], given["sin"])
    g = rg.pygraph()
    key, value = g.mla_kv_rope(**given, nope_dim=7)
    with pytest.raises(GraphError, match="dValue is None, so its width is not known; give v_dim="):
        g.mla_kv_rope_backward(key, None, given["cos"], given["sin"])
    with pytest.raises(GraphError, match="give nope_dim="):
        g.mla_kv_rope_backward(None, value, given["cos"], given["sin"])
    with pytest.raises(GraphError, match="give dKey, dValue or both"):
        g.mla_kv_rope_backward(None, None, given["cos"], given["sin"], nope_dim=1, v_dim=1)


def test_a_ragged_kv_is_refused():
    g = rg.pygraph(io_data_type=BF16)
    starts = g.tensor([3, 1, 1, 1], data_type=torch.int32)
    kv = g.tensor([2, 3, 5, 8], ragged_offset=starts, name="kv")
    t = [g.tensor(dim) for dim in ([2, 1, 5, 4], [5, 1, 1, 4], [5, 1, 1, 4])]
    for table in t[1:]:
        table.set_data_type(F32)
    key, _ = g.mla_kv_rope(kv, *t)
    key.set_output(True)
    with pytest.raises(GraphError, match="kv 'kv' has a ragged_offset"):
        g.validate()


def test_outputs_nest_in_memory_as_kv_does():
    given = inputs(2, 3, 5, 6, 6, 4, layout="bshd")
    g = rg.pygraph()
    key, value = g.mla_kv_rope(**given)
    assert key.get_stride() == [150, 10, 30, 1]
    assert value.get_stride() == [90, 6, 18, 1]
    grads = g.mla_kv_rope_backward(key, value, given["cos"], given["sin"])
    assert [t.get_stride() for t in grads] == [[180, 12, 36, 1], [20, 20, 4, 1]]


def test_mxfp8_in_transformer_engines_buffers():
    """Its shapes: data [s, b h d], row scales [s b h, d/32], column scales [s/32, b h d]."""
    b, h, s = 2, 2, 32
    given = inputs(b, h, s, 32, 32, 32)
    g = rg.pygraph()
    key, value = g.mla_kv_rope(**given, quantize="mxfp8")
    assert isinstance(key, Mxfp8)
    pack: dict[Any, Any] = {}
    bytes_of: dict[str, torch.Tensor] = {}
    for side, d, made in (("key", 64, key), ("value", 32, value)):
        shapes = {"row": (s, d), "row_scale": (s, d // 32), "column": (s, d),
                  "column_scale": (s // 32, d)}  # fmt: skip
        for form, (rows, width) in shapes.items():
            handle = getattr(made, form).set_output(True)
            store = torch.full((rows, b * h * width), 255, dtype=torch.uint8)
            view = store.view(rows, b, h, width).permute(1, 2, 0, 3)
            dtype = torch.float8_e8m0fnu if form.endswith("scale") else torch.float8_e4m3fn
            pack[handle] = view.view(dtype)
            bytes_of[f"{side}_{form}"] = view
    assert key.row_scale.get_data_type() is rg.data_type.NOT_SET
    g.execute(pack)
    assert key.row_scale.get_data_type() is rg.data_type.FP8_E8M0
    assert key.row.get_data_type() is rg.data_type.FP8_E4M3
    for port, want in by_hand.mla(**given, nope=32).items():
        assert torch.equal(bytes_of[port], want), port
    assert g.verify(pack).is_ok
    assert len(g.plan.steps) == 1


def test_mxfp8_as_uint8_and_only_what_is_asked_for():
    given = inputs(1, 2, 32, 32, 32, 32)
    g = rg.pygraph()
    key, value = g.mla_kv_rope(**given, quantize="mxfp8")
    pack = {
        t.set_output(True).set_data_type(torch.uint8): torch.zeros(dim, dtype=torch.uint8).permute(
            1, 2, 0, 3
        )
        for t, dim in ((key.row, (32, 1, 2, 64)), (value.column_scale, (1, 1, 2, 32)))
    }
    g.execute(pack)
    want = by_hand.mla(**given, nope=32)
    got = list(pack.values())
    assert torch.equal(got[0], want["key_row"])
    assert torch.equal(got[1], want["value_column_scale"])
    assert g.verify(pack).is_ok
    assert set(g.plan.steps[0].node.outputs) == {"key_row", "value_column_scale"}


def test_types_that_an_mxfp8_output_cannot_have():
    g = rg.pygraph()
    key, _ = g.mla_kv_rope(**inputs(1, 2, 32, 32, 32, 32), quantize="mxfp8")
    key.row.set_output(True).set_data_type(BF16)
    with pytest.raises(GraphError, match="an output must be fp8_e4m3 or uint8"):
        g.validate()


def test_what_is_quantized_is_read_by_no_other_node():
    g = rg.pygraph()
    key, value = g.mla_kv_rope(**inputs(1, 2, 32, 64, 64, 32), quantize="mxfp8")
    o, _ = g.sdpa(torch.zeros(1, 2, 4, 96, dtype=BF16), key.row, value.row)
    o.set_output(True)
    with pytest.raises(GraphError, match="k is fp8_e4m3"):
        g.validate()


# Attention behind it


def attention(dtype: torch.dtype, s: int = 7, **settings: Any):
    b, h, nope, v, r = 2, 3, 6, 5, 4
    given = inputs(b, h, s, nope, v, r, dtype)
    generator = torch.Generator().manual_seed(3)
    given["q"] = torch.randn(b, h, s, nope + r, generator=generator).to(dtype)
    angle = torch.randn(s, 1, 1, r // 2, generator=generator)
    given["freqs"] = torch.cat([angle, angle], -1)
    g = rg.pygraph(io_data_type=dtype, **settings)
    t = {name: g.tensor_like(x, name=name) for name, x in given.items()}
    q = g.rope(t["q"], t["freqs"], rope_dim=r, name="rope_q")
    key, value = g.mla_kv_rope(t["kv"], t["k_rope"], t["cos"], t["sin"], nope_dim=nope, name="mla")
    o, _ = g.sdpa(q, key, value, attn_scale=0.3, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o")
    return g, given, o


def meaning(given: dict[str, torch.Tensor]) -> torch.Tensor:
    made = exact(given, 6)
    q = oracle.rope(given["q"], given["freqs"][:, 0, 0, :2])
    keep = torch.ones(q.shape[2], q.shape[2]).tril().bool()
    return oracle.attention(q, made["key"], made["value"], attn_scale=0.3, keep=keep)[0]


@pytest.mark.parametrize("fold", ["auto", "off", "q"])
def test_attention_and_its_gradients(fold: str):
    g, given, _ = attention(F64, fold=fold)
    names = ["q", "kv", "k_rope"]
    backward = g.backward_graph("o", names)
    o = torch.full((2, 3, 7, 5), torch.nan, dtype=F64)
    saved = {
        name: torch.full(t.get_dim(), torch.nan, dtype=F64).as_strided(t.get_dim(), t.get_stride())
        for t in g.tensors
        if t.spec.is_saved
        for name in [t.get_name()]
    }
    g.execute(given | {"o": o} | saved)
    leaves = {n: given[n].double().requires_grad_() for n in names}
    want = meaning(given | leaves)
    torch.testing.assert_close(o, want.detach(), rtol=1e-12, atol=1e-12)
    d_o = torch.randn(o.shape, dtype=F64, generator=torch.Generator().manual_seed(9))
    grads = {f"d{n}": torch.full_like(given[n], torch.nan) for n in names}
    for n in names:
        backward.find_tensor(f"d{n}").set_stride(grads[f"d{n}"].stride())
    pool = given | saved | {"o": o}
    pack = {name: pool[name] for name in backward.saved} | {"do": d_o} | grads
    backward.execute(pack)
    for n, grad in zip(names, oracle.gradients(want, list(leaves.values()), d_o), strict=True):
        torch.testing.assert_close(grads[f"d{n}"], grad, rtol=1e-11, atol=1e-11)
    folded = 0.3 if fold != "off" else 1.0
    scales = [
        n.attrs.output_scale for n in g.plan.graph.singles if hasattr(n.attrs, "output_scale")
    ]
    assert scales == [folded]


def test_q_folds_alone_and_symmetric_says_why_not():
    g, _, _ = attention(F32, fold="symmetric")
    g.build()
    (reason,) = [
        d.text for d in g.fold_decisions if d.rule == "fold-attn-scale" and d.node == "attn"
    ]
    assert "is made by mla_kv_rope 'mla', which scales nothing" in reason
    assert 'fold="q" needs Q alone' in reason


def test_a_gradient_of_the_key_alone():
    given = inputs(2, 3, 5, 6, 6, 4, F64)
    g = rg.pygraph()
    t = {name: g.tensor_like(x, name=name) for name, x in given.items()}
    key, _ = g.mla_kv_rope(**t)
    key.set_output(True).set_name("key")
    backward = g.backward_graph("key", ["kv"])
    assert list(backward.recorder.nodes[-1].outputs) == ["dKV"]
    d_key = torch.randn(2, 3, 5, 10, dtype=F64)
    d_kv = torch.full((2, 3, 5, 12), torch.nan, dtype=F64)
    for name, x in (("dkey", d_key), ("dkv", d_kv)):
        backward.find_tensor(name).set_stride(x.stride())
    backward.execute({"cos": given["cos"], "sin": given["sin"], "dkey": d_key, "dkv": d_kv})
    assert torch.equal(d_kv[..., :6], d_key[..., :6])
    assert (d_kv[..., 6:] == 0).all()


def test_gradients_that_do_not_exist():
    given = inputs(1, 2, 32, 32, 32, 32)
    for quantize, wanted, text in (
        ("mxfp8", "kv", "'mxfp8' writes has no gradient"),
        (None, "cos", "cos has no gradient; kv and k_rope have one"),
    ):
        g = rg.pygraph()
        t = {name: g.tensor_like(x, name=name) for name, x in given.items()}
        key, _ = g.mla_kv_rope(**t, quantize=quantize)
        output = key.row if quantize else key
        output.set_output(True).set_name("key")
        with pytest.raises(GraphError, match=text):
            g.backward_graph("key", [wanted])


def test_a_graph_comes_back_from_its_file():
    g, given, _ = attention(F32)
    again = rg.pygraph().deserialize(g.serialize())
    outputs = [torch.full((2, 3, 7, 5), torch.nan) for _ in range(2)]
    for graph, o in zip((g, again), outputs, strict=True):
        graph.execute(given | {"o": o})
    assert torch.equal(*outputs)
    assert g.key == again.key


def test_key_changes_with_what_is_declared():
    """C35."""
    given = inputs(2, 3, 32, 32, 32, 32)
    keys: set[str] = set()
    for quantize, nope, layout, table in (
        (None, 32, "bshd", F32), ("mxfp8", 32, "bshd", F32), (None, 16, "bshd", F32),
        (None, 32, "bhsd", F32), (None, 32, "bshd", BF16),
    ):  # fmt: skip
        given = inputs(2, 3, 32, 32, 32, 32, BF16, table, layout)
        g = rg.pygraph()
        key, _ = g.mla_kv_rope(**given, quantize=quantize, nope_dim=nope)
        (key.row if quantize else key).set_output(True)
        keys.add(g.key)
    assert len(keys) == 5


def test_an_output_may_not_lie_on_an_input():
    given = inputs(2, 3, 5, 6, 6, 6)
    g = rg.pygraph()
    key, _ = g.mla_kv_rope(**given)
    key.set_output(True)
    with pytest.raises(GraphError, match="shares memory with that of"):
        g.execute({key: given["kv"]})


def test_a_fold_contract_does_not_reach_the_key():
    g, _, _ = attention(F32, fold="symmetric")
    assert issubclass(FoldContractError, GraphError)
    assert g.backward_graph("o", ["kv"]).trace
