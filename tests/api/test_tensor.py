"""Tensor handles: setters, getters, uids, and what makes a tensor real."""

from typing import Any

import numpy as np
import pytest
import torch

import ropegraph
from ropegraph import GraphError, data_type, tensor_reordering
from tests.api.graphs import F16, F32, X, buffers, new, rotation, run


def test_what_is_declared_comes_back():
    g = new()
    offsets = g.tensor((3, 1, 1, 1), data_type=torch.int32, name="at")
    t = g.tensor(
        X, (200, 40, 8, 1), F16, False, False, offsets, tensor_reordering.NONE, "x", 7, 8, 16
    )
    assert t.get_dim() == list(X)
    assert t.get_stride() == [200, 40, 8, 1]
    assert t.get_data_type() is data_type.HALF
    assert (t.get_is_virtual(), t.get_is_pass_by_value(), t.get_is_output()) == (False,) * 3
    assert t.get_ragged_offset() is offsets
    assert t.get_ragged_offset_multiplier() == 8
    assert (t.get_name(), t.get_uid(), t.get_alignment_value()) == ("x", 7, 16)
    assert repr(t) == "Tensor('x', dim=[2, 3, 5, 8], data_type.HALF)"


def test_what_is_not_declared():
    g = ropegraph.pygraph()
    t = g.tensor(X)
    assert t.get_stride() == [120, 40, 8, 1]
    assert t.get_data_type() is data_type.NOT_SET
    assert (t.get_uid(), t.get_name()) == (-1, "tensor.0")
    assert t.get_ragged_offset() is None
    assert (t.get_ragged_offset_multiplier(), t.get_alignment_value()) == (1, 1)
    assert g.tensor(X).get_name() == "tensor.1"


def test_setters_chain_and_getters_follow():
    g = new()
    offsets = g.tensor((3, 1, 1, 1), data_type=torch.int32)
    t = (
        g.tensor((1,))
        .set_dim(X)
        .set_stride([400, 100, 10, 1])
        .set_data_type(torch.bfloat16)
        .set_name("x")
        .set_uid(5)
        .set_ragged_offset(offsets)
        .set_ragged_offset_multiplier(4)
        .set_is_pass_by_value(True)
        .set_alignment_value(32)
        .set_reordering_type(tensor_reordering.NONE)
        .set_is_virtual(False)
        .set_saved(False)
    )
    assert (t.get_dim(), t.get_stride()) == (list(X), [400, 100, 10, 1])
    assert t.get_data_type() is data_type.BFLOAT16
    assert (t.get_name(), t.get_uid(), t.get_alignment_value()) == ("x", 5, 32)
    assert (t.get_ragged_offset(), t.get_ragged_offset_multiplier()) == (offsets, 4)
    assert t.get_is_pass_by_value()
    assert t.set_ragged_offset(None).get_ragged_offset() is None


@pytest.mark.parametrize(
    "given",
    [(2, 3, 5, 8), [2, 3, 5, 8], torch.Size(X), np.array(X), (np.int64(2), 3, 5, torch.tensor(8)),
     iter(X), torch.tensor(X)],
)  # fmt: skip
def test_dims_of_any_sequence(given: Any):
    assert new().tensor(given).get_dim() == [2, 3, 5, 8]


@pytest.mark.parametrize("given", [F16, "HALF", "half", "float16", data_type.HALF, np.dtype("f2")])
def test_data_types_of_any_library(given: Any):
    assert new().tensor(X, data_type=given).get_data_type() is data_type.HALF


DIMS: dict[str, tuple[Any, str]] = {
    "negative": ((2, -1), "dim=[2, -1] has a negative extent; use 0 or more"),
    "fraction": ((2, 1.5), "is not a list of integers"),
    "word": ("23", "dim='23' is not a list of integers"),
    "number": (5, "dim=5 is not a list of integers"),
    "none": (None, "dim=None is not a list of integers"),
    "infinite": ((float("inf"),), "dim=(inf,) is not a list of integers"),
    "NaN": ((float("nan"),), "is not a list of integers"),
    "nested": (((2, 3),), "is not a list of integers"),
}


@pytest.mark.parametrize(("given", "text"), DIMS.values(), ids=DIMS)
def test_dims_that_are_none(given: Any, text: str):
    g = new()
    with pytest.raises(GraphError) as caught:
        g.tensor(given, name="x")
    assert "tensor 'x': " in str(caught.value)
    assert text in str(caught.value)
    assert g.tensors == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stride": (1, 1)}, "stride=[1, 1] has 2 entries for dim [2, 3, 5, 8]"),
        ({"stride": (120, 40, -8, 1)}, "stride=[120, 40, -8, 1] has a negative stride"),
        ({"stride": 5}, "stride=5 is not a list of integers"),
        ({"data_type": "quad"}, "data_type='quad' is not a data type; use a torch dtype"),
        ({"data_type": 5}, "data_type=5 is not a data type"),
        ({"is_virtual": True}, "is_virtual=True, but no node writes an input"),
        ({"ragged_offset_multiplier": 0}, "ragged_offset_multiplier=0; use 1 or more"),
        ({"ragged_offset_multiplier": 1.5}, "ragged_offset_multiplier=1.5 is not a host integer"),
        ({"alignment_value": 0}, "alignment_value=0; use 1 or more"),
        ({"reordering_type": tensor_reordering.F8_128x4}, "is not supported; use tensor_reorderin"),
        ({"uid": "x"}, "uid='x' is not a host integer"),
        ({"uid": -2}, "uid=-2; use -1 or more"),
        ({"uid": True}, "uid=True is not a host integer"),
        ({"uid": 1.0}, "uid=1.0 is not a host integer"),
        ({"ragged_offset": 5}, "ragged_offset=5 is not a tensor of this graph"),
        ({"colour": "red"}, "colour='red' is no argument here"),
    ],
)
def test_declarations_that_are_wrong(options: dict[str, Any], text: str):
    g = new()
    with pytest.raises(GraphError) as caught:
        g.tensor(X, name="x", **options)
    assert text in str(caught.value)
    assert g.tensors == [], "a refused tensor is not part of the graph"


def test_offsets_of_another_graph():
    with pytest.raises(GraphError, match="tensor 'at' belongs to another graph"):
        new().tensor(X, ragged_offset=new().tensor((3, 1, 1, 1), name="at"))


# uids


def test_uids_are_unique():
    g = new()
    a = g.tensor(X, name="a", uid=3)
    with pytest.raises(GraphError, match="tensor 'b': uid=3 belongs to 'a'; use another"):
        g.tensor(X, name="b", uid=3)
    b = g.tensor(X, name="b")
    with pytest.raises(GraphError, match="uid=3 belongs to 'a'"):
        b.set_uid(3)
    assert a.set_uid(3) is a, "its own number again"
    a.set_uid(-1)
    assert b.set_uid(3).get_uid() == 3
    assert g.tensor(X, uid=-1).get_uid() == g.tensor(X, uid=-1).get_uid() == -1
    assert g.tensor(X, uid=0).get_uid() == 0
    assert g.tensor(X, uid=np.int64(9)).get_uid() == 9


def test_a_uid_makes_a_written_tensor_real():
    g = rotation()
    y = g.find_tensor("y")
    z = g.scale(y, 2.0, name="twice")
    assert z.get_is_virtual()
    z.set_uid(4)
    assert not z.get_is_virtual()
    pack: dict[Any, Any] = buffers(g)
    pack[4] = pack.pop("twice::OUT_0")
    assert "twice::OUT_0" in g.plan.graph.visible
    g.execute(pack)
    assert torch.equal(pack[4], 2 * pack["y"])


def test_uid_0_is_a_key():
    g = rotation()
    g.find_tensor("x").set_uid(0)
    x, y = torch.ones(X), torch.full(X, torch.nan)
    g.execute({0: x, "f": torch.zeros(5, 1, 1, 8), "y": y})
    assert torch.equal(x, y)


# Real and virtual


def test_what_makes_a_tensor_real():
    g = rotation()
    x, y = g.find_tensor("x"), g.find_tensor("y")
    assert not x.get_is_virtual()
    assert (y.get_is_output(), y.get_is_virtual()) == (True, False)
    y.set_output(False)
    assert y.get_is_virtual()
    assert not y.set_is_virtual(False).get_is_virtual()
    assert y.set_is_virtual().get_is_virtual()
    y.set_saved(True)
    assert y.get_is_virtual(), "saving exports it for the backward alone"


def test_an_input_is_no_output_and_not_virtual():
    x = rotation().find_tensor("x")
    with pytest.raises(GraphError, match="only what a node writes can be an output"):
        x.set_output(True)
    with pytest.raises(GraphError, match="is_virtual=True, but no node writes it"):
        x.set_is_virtual(True)
    assert x.set_output(False) is x
    assert x.set_is_virtual(False) is x


def test_the_dims_of_a_written_tensor_are_given():
    y = rotation().find_tensor("y")
    assert y.set_dim(X) is y
    with pytest.raises(GraphError, match="but 'turn' writes") as caught:
        y.set_dim((2, 3, 5, 6))
    assert "tensor 'y': dim=[2, 3, 5, 6], but 'turn' writes [2, 3, 5, 8]" in str(caught.value)


def test_what_decides_outputs_is_settled_before_a_node_reads_it():
    g = new()
    x, f = g.tensor(X, name="x"), g.tensor((9, 1, 1, 8), name="f")
    at = g.tensor((3, 1, 1, 1), data_type=torch.int32, name="at")
    x.set_dim((2, 3, 6, 8)).set_dim(X)
    g.rope(x, f, name="turn").set_output(True)
    for change in (lambda: x.set_dim((2, 3, 6, 8)), lambda: x.set_ragged_offset(at)):
        with pytest.raises(GraphError, match="after 'turn' has read the tensor; set it before"):
            change()
    assert x.set_dim(X) is x
    x.set_stride((240, 80, 16, 2)).set_data_type(F32).set_name("x2")
    assert "x2: fp32 [2, 3, 5, 8]" in str(g)


# Layouts


@pytest.mark.parametrize(
    ("stride", "want"),
    [
        ((120, 40, 8, 1), [120, 40, 8, 1]),
        ((120, 8, 24, 1), [120, 8, 24, 1]),  # b s h d
        ((1000, 8, 100, 1), [120, 8, 24, 1]),  # the same with gaps
        ((1, 2, 6, 30), [1, 2, 6, 30]),
        ((0, 40, 8, 1), [120, 40, 8, 1]),  # expanded
    ],
)
def test_an_output_has_the_memory_order_of_its_input(stride: tuple[int, ...], want: list[int]):
    g = new()
    x, f = g.tensor(X, stride), g.tensor((5, 1, 1, 8))
    assert g.rope(x, f).get_stride() == want
    assert g.scale(x, 2.0).get_stride() == want


@pytest.mark.parametrize(
    ("dim", "stride", "want"),
    [
        ((1, 3, 5, 8), (7, 40, 8, 1), [120, 40, 8, 1]),
        ((1, 3, 5, 8), (7, 8, 24, 1), [120, 8, 24, 1]),
        ((2, 3, 1, 8), (24, 8, 7, 1), [24, 8, 8, 1]),
        ((2, 1, 5, 8), (40, 7, 8, 1), [40, 40, 8, 1]),
        ((1, 1, 1, 8), (0, 0, 0, 1), [8, 8, 8, 1]),
        ((2, 3, 5, 1), (15, 5, 1, 99), [15, 5, 1, 1]),
    ],
)
def test_axes_of_length_1_get_the_strides_of_a_packed_tensor(
    dim: Any, stride: Any, want: list[int]
):
    """They are checked by libraries that never step over them."""
    g = new()
    y = g.scale(g.tensor(dim, stride, name="x"), 2.0).set_output(True).set_name("y")
    assert y.get_stride() == want
    assert list(g.plan.graph.values["x"].stride) == want
    assert list(g.plan.graph.values["y"].stride) == want


@pytest.mark.parametrize(
    ("dim", "stride"),
    [((2, 1, 5, 8), (40, 7, 8, 1)), ((1, 3, 5, 8), (999, 40, 8, 1)), ((1, 1, 1, 8), (0, 0, 0, 1))],
)
def test_strides_of_length_1_enter_no_key(dim: tuple[int, ...], stride: tuple[int, ...]):
    """C12."""

    def graph(*given: Any) -> ropegraph.pygraph:
        g = new()
        x, f = g.tensor(dim, *given, name="x"), g.tensor((dim[2], 1, 1, 8), name="f")
        g.rope(x, f).set_output(True).set_name("y")
        return g

    odd, plain = graph(stride), graph()
    assert odd.key == plain.key
    x = torch.randn(dim)
    assert torch.equal(run(odd, x=x)["y"], run(plain, x=x)["y"])
    strange = torch.empty(2000).as_strided(dim, stride).copy_(x)
    assert torch.equal(run(plain, x=strange)["y"], run(plain, x=x)["y"])


# tensor_like


def test_tensor_like():
    g = new()
    x = torch.randn(2, 5, 3, 8, dtype=F16, requires_grad=True).transpose(1, 2)
    for like in (g.tensor_like(x), g.tensor_like(g.tensor_like(x)), new().tensor_like(x)):
        assert like.get_dim() == list(X)
        assert like.get_stride() == [120, 8, 24, 1]
        assert like.get_data_type() is data_type.HALF
        assert not like.get_is_pass_by_value(), "a CPU tensor is an ordinary tensor"
    other = new().tensor(X, (240, 80, 16, 2), F32, name="other")
    like = g.tensor_like(other, name="mine")
    assert (like.get_name(), like.get_stride()) == ("mine", [240, 80, 16, 2])
    array = g.tensor_like(np.zeros((2, 3), dtype=np.int64))
    assert (array.get_dim(), array.get_data_type()) == ([2, 3], data_type.INT64)
    assert g.tensor_like(torch.tensor(5.0)).get_dim() == []
    assert g.tensor_like(torch.empty(0, 3)).get_dim() == [0, 3]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (5, "5 is no torch tensor, graph tensor or object with __dlpack__"),
        ([1.0], "[1.0] is no torch tensor"),
        (None, "None is no torch tensor"),
        (torch.ones(2, dtype=torch.complex64), "data_type=torch.complex64 is not a data type"),
        (np.zeros(2, dtype=object), "cannot be read by DLPack"),
    ],
)
def test_tensor_like_of_something_else(given: Any, text: str):
    g = new()
    with pytest.raises(GraphError, match="tensor_like") as caught:
        g.tensor_like(given)
    assert text in str(caught.value)
    assert g.tensors == []
    with pytest.raises(GraphError, match="is_virtual=True, but no node writes an input"):
        g.tensor_like(torch.ones(2), is_virtual=True)


# Names


def test_default_names_are_those_of_fe():
    g = new()
    x, f = g.tensor(X), g.tensor((5, 1, 1, 8))
    y = g.rope(x, f)
    at = g.tensor((3, 1, 1, 1), data_type=torch.int32)
    q = g.tensor(X, ragged_offset=at)
    lengths = {
        n: g.tensor((2, 1, 1, 1), data_type=torch.int32) for n in ("seq_len_q", "seq_len_kv")
    }
    o, stats = g.sdpa(q, x, y, use_padding_mask=True, **lengths)
    names = [t.get_name() for t in (x, f, y, q, at, o, stats, lengths["seq_len_q"])]
    assert names == [
        "rope.0::input",
        "rope.0::freqs",
        "rope.0::OUT_0",
        "sdpa.0::q",
        "sdpa.0::q::ragged_offset",
        "sdpa.0::O",
        "sdpa.0::Stats",
        "sdpa.0::seq_len_q",
    ]


def test_node_names_count_and_never_repeat():
    g = new()
    x, f = g.tensor(X), g.tensor((5, 1, 1, 8))
    g.rope(x, f, name="rope.1")
    assert g.rope(x, f).get_name() == "rope.2::OUT_0", "the first free number"
    assert g.rope(x, f).get_name() == "rope.3::OUT_0"
    with pytest.raises(GraphError, match=r"rope 'rope\.1': another node has that name"):
        g.rope(x, f, name="rope.1")
    with pytest.raises(GraphError, match=r"scale 'rope\.1': another node has that name"):
        g.scale(x, 2.0, name="rope.1")


def test_find_tensor():
    g = rotation()
    assert g.find_tensor("x").get_dim() == list(X)
    with pytest.raises(GraphError, match="'z' names no tensor; the names are f, x, y"):
        g.find_tensor("z")
    g.find_tensor("f").set_name("x")
    with pytest.raises(GraphError, match="'x' names 2 tensors"):
        g.find_tensor("x")
