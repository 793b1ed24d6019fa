"""Keys and values of execute(): handles, names, uids; torch, numpy and other DLPack objects."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ropegraph
from ropegraph import GraphError
from tests.api.graphs import F32, X, attention, buffers, new, refused, rotation, run


def keys_of(g: ropegraph.pygraph, kind: str) -> dict[str, Any]:
    """Name -> the key of this kind."""
    tensors = {t.get_name(): t for t in g.tensors}
    uids = {name: 10 + i for i, name in enumerate(tensors)}
    for name, tensor in tensors.items():
        if name != "q_rot" and name != "k_rot":
            tensor.set_uid(uids[name])
    return {"handle": tensors, "name": {n: n for n in tensors}, "uid": uids,
            "numpy uid": {n: np.int64(u) for n, u in uids.items()}}[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["handle", "name", "uid", "numpy uid"])
def test_every_kind_of_key(kind: str):
    want = run(attention())
    g = attention()
    keys = keys_of(g, kind)
    pack = buffers(g)
    g.execute({keys[name]: x for name, x in pack.items()})
    assert all(torch.equal(pack[n], want[n]) for n in want)


def test_kinds_may_be_mixed():
    g = rotation()
    x = g.find_tensor("x").set_uid(1)
    y = torch.full(X, torch.nan)
    g.execute({1: torch.ones(X), "f": torch.zeros(5, 1, 1, 8), g.find_tensor("y"): y})
    assert bool((y == 1).all())
    assert x.get_uid() == 1


@pytest.mark.parametrize("key", [None, 99, -1, 10**12, np.int32(99)])
def test_none_and_unknown_uids_are_ignored(key: Any):
    g = rotation()
    assert set(run(g)) == {"y"}
    pack: dict[Any, Any] = {**buffers(g), key: torch.ones(3)}
    g.execute(pack)
    g.execute({**pack, key: None})
    g.execute({key: None, **pack})


def test_one_tensor_under_two_keys():
    g = rotation()
    x = g.find_tensor("x").set_uid(1)
    pack: dict[Any, Any] = buffers(g)
    g.execute({**pack, x: pack["x"], 1: pack["x"]})
    other = torch.zeros(X)
    for key in (x, 1):
        bad = {**buffers(g), key: other}
        refused(g, bad, "execute: 'x' is given two buffers, the second by")


def test_a_name_that_two_tensors_have():
    g = rotation()
    g.find_tensor("f").set_name("x")
    x, f = g.tensors[0], g.tensors[1]
    y = torch.full(X, torch.nan)
    with pytest.raises(GraphError, match="'x' names 2 tensors of graph 'graph'; give the Tensor"):
        g.execute({"x": torch.ones(X), f: torch.zeros(5, 1, 1, 8), "y": y})
    assert bool(y.isnan().all())
    g.execute({x: torch.ones(X), f: torch.zeros(5, 1, 1, 8), "y": y})
    assert bool((y == 1).all())


def test_a_pack_that_is_no_dict():
    for given in ([1], None, torch.ones(2), {1}):
        with pytest.raises(GraphError, match="use a dict of tensors to buffers"):
            rotation().execute(given)


def test_a_tensor_that_no_node_uses_may_be_bound():
    g = rotation()
    g.tensor(X, name="spare")
    assert set(run(g, spare=torch.ones(3))) == {"y"}


def test_an_input_of_a_dead_node_may_be_left_out():
    g = rotation()
    dead = g.tensor(X, name="dead")
    g.scale(dead, 2.0)
    pack = buffers(g)
    assert "dead" not in pack
    g.execute(pack)
    g.execute({**pack, "dead": torch.ones(X)})


def test_the_pack_itself_is_left_alone():
    g = rotation()
    pack: dict[Any, Any] = {**buffers(g), None: 1}
    kept = dict(pack)
    g.execute(pack)
    assert pack.keys() == kept.keys()
    assert all(pack[k] is kept[k] for k in pack)


def test_any_mapping_will_do():
    from collections import ChainMap
    from types import MappingProxyType

    g = rotation()
    pack = buffers(g)
    g.execute(MappingProxyType(pack))
    g.execute(ChainMap({}, pack))


# Values


class Foreign:
    """A tensor of another library: nothing but DLPack."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("wrap", [Foreign, lambda x: x.numpy(), torch.nn.Parameter])
def test_objects_of_other_libraries(wrap: Any):
    """Inputs are read and outputs are written in place, whatever holds them."""
    g = rotation()
    pack = buffers(g)
    want = run(g, x=pack["x"], f=pack["f"])["y"]
    g.execute({name: wrap(x) for name, x in pack.items()})
    assert torch.equal(pack["y"], want)


def test_numpy_outputs_are_written_in_place():
    g = rotation()
    y = np.full(X, np.nan, dtype=np.float32)
    g.execute({"x": np.ones(X, np.float32), "f": np.zeros((5, 1, 1, 8), np.float32), "y": y})
    assert (y == 1).all()


def test_numpy_memory_that_is_read_only():
    g = rotation()
    x, y = np.ones(X, np.float32), np.full(X, np.nan, dtype=np.float32)
    pack = {"x": x, "f": np.zeros((5, 1, 1, 8), np.float32), "y": y}
    x.flags.writeable = False
    g.execute(pack)
    assert (y == 1).all()
    y[:] = 7
    y.flags.writeable = False
    with pytest.raises(GraphError, match="'y' is an output, but its buffer is read-only"):
        g.execute(pack)
    assert (y == 7).all()


def test_numpy_types_are_checked_like_others():
    g = rotation()
    refused(g, {**buffers(g), "x": np.ones(X)}, "'x' is declared fp32 but bound to a torch.float64")
    refused(g, {**buffers(g), "x": np.ones((2, 3, 5, 7), np.float32)}, "'x' is declared [2, 3, 5,")


def test_shapes_that_differ_in_axes_of_length_1():
    """[b] for [b, 1, 1, 1], and a scalar for [1, 1, 1, 1], as FE takes them."""
    g = new()
    t = [g.tensor((2, 2, 4, 8), name=n) for n in "qkv"]
    lengths = {
        n: g.tensor((2, 1, 1, 1), data_type=torch.int64, name=n)
        for n in ("seq_len_q", "seq_len_kv")
    }
    g.sdpa(*t, use_padding_mask=True, **lengths)[0].set_output(True).set_name("o")
    want = run(g)["o"]
    for shape in ((2,), (2, 1), (1, 2), (1, 1, 2, 1, 1)):
        got = run(g, seq_len_q=torch.ones(shape, dtype=torch.int64))["o"]
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["torch", "numpy", "foreign"])
def test_tensors_given_while_recording_are_bound(kind: str):
    """FE's builders take framework tensors; execute needs no more than the outputs then."""
    wrap = {"torch": lambda x: x, "numpy": lambda x: x.numpy(), "foreign": Foreign}[kind]
    x, f = torch.randn(X), torch.randn(5, 1, 1, 8)
    g = ropegraph.pygraph()
    y = g.rope(wrap(x), wrap(f), name="turn").set_output(True).set_name("y")
    assert y.get_name() == "y"
    out = torch.full(X, torch.nan)
    g.execute({y: out})
    assert torch.equal(out, run(rotation(), x=x, f=f)["y"])
    g.execute({y: out, "turn::input": torch.zeros(X)})
    assert bool((out == 0).all()), "another buffer may take its place"


def test_the_same_object_is_one_input():
    q = torch.randn(1, 2, 4, 8)
    g = ropegraph.pygraph()
    o, _ = g.sdpa(q, q, q, generate_stats=False)
    assert len(g.tensors) == 2
    o.set_output(True)
    buffer = torch.full(q.shape, torch.nan)
    g.execute({o: buffer})
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=1.0)
    torch.testing.assert_close(buffer, want)


def test_lengths_of_any_stride():
    """A column of a table of lengths: its stride is 2, not 1."""
    table = torch.tensor([[3, 9], [4, 9]], dtype=torch.int32)
    g = ropegraph.pygraph(io_data_type=F32)
    q = torch.randn(2, 2, 4, 8)
    lengths = dict.fromkeys(("seq_len_q", "seq_len_kv"), table[:, 0])
    o, _ = g.sdpa(q, q, q, use_padding_mask=True, generate_stats=False, **lengths)
    o.set_output(True)
    buffer = torch.full(q.shape, torch.nan)
    g.execute({o: buffer})
    want = torch.nn.functional.scaled_dot_product_attention(
        q[:1, :, :3], q[:1, :, :3], q[:1, :, :3], scale=1.0
    )
    torch.testing.assert_close(buffer[:1, :, :3], want)
    assert bool((buffer[0, :, 3:] == 0).all())


@pytest.mark.parametrize("make", [torch.tensor, lambda x: np.array(x, dtype=np.float32)])
def test_a_scale_given_as_a_tensor(make: Any):
    q = torch.randn(1, 2, 4, 8)
    g = ropegraph.pygraph(io_data_type=F32)
    o, _ = g.sdpa(q, q, q, attn_scale=make(0.5), generate_stats=False)
    o.set_output(True)
    buffer = torch.full(q.shape, torch.nan)
    g.execute({o: buffer})
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=0.5)
    torch.testing.assert_close(buffer, want)
