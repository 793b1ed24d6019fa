"""Buffers that do not fit: refused by name, before any output is written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ropegraph
from ropegraph import GraphError, PositionError, UnsupportedError
from tests.api.graphs import F32, X, attention, buffers, new, refused, rotation, run

Pack = dict[Any, Any]


def change(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[Pack], Pack]:
    return lambda pack: {**pack, name: make(pack[name])}


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, :, :1].expand(x.shape)


def emptied(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


# What is wrong with the pack -> the pack, and words of the message.
BAD = {
    "a missing input": (
        lambda p: {n: x for n, x in p.items() if n != "v"},
        ["no buffer is bound to 'v' (v of 'attn')", "bind a tensor [2, 3, 7, 4] of fp32"],
    ),
    "a missing output": (
        lambda p: {n: x for n, x in p.items() if n != "o"},
        ["no buffer is bound to 'o' (O of 'attn')"],
    ),
    "an input of None": (change("q", lambda x: None), ["'q' is bound to NoneType None"]),
    "an output of None": (change("o", lambda x: None), ["'o' is bound to NoneType None"]),
    "a list": (change("q", lambda x: x.tolist()), ["'q' is bound to list", "__dlpack__"]),
    "an address": (change("q", lambda x: x.data_ptr()), ["'q' is bound to int"]),
    "a shorter input": (
        change("k", lambda x: x[:, :, :6]),
        ["'k' is declared [2, 2, 7, 8] but bound to a buffer [2, 2, 6, 8]"],
    ),
    "a longer output": (
        change("o", lambda x: torch.full((2, 6, 6, 4), torch.nan)),
        ["'o' is declared [2, 6, 5, 4] but bound to a buffer [2, 6, 6, 4]"],
    ),
    "axes the other way round": (
        change("q", lambda x: x.transpose(1, 2)),
        ["'q' is declared [2, 6, 5, 8] but bound to a buffer [2, 5, 6, 8]"],
    ),
    "rank 3": (change("q", lambda x: x[0]), ["'q' is declared [2, 6, 5, 8] but bound to"]),
    "other strides": (
        change("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        ["'q' is declared with strides [240, 40, 8, 1] but its buffer", "has [240, 8, 48, 1]"],
    ),
    "an expanded input": (change("q", expanded), ["'q' is declared with strides"]),
    "an expanded output": (change("o", expanded), ["'o' is declared with strides"]),
    "another dtype": (
        change("q", lambda x: x.half()),
        ["'q' is declared fp32 but bound to a torch.float16 buffer [2, 6, 5, 8]"],
    ),
    "a dtype no graph has": (
        change("q", lambda x: x.to(torch.complex64)),
        ["'q' is declared fp32 but bound to a torch.complex64 buffer"],
    ),
    "integer angles": (change("f", lambda x: x.int()), ["'f' is declared fp32", "torch.int32"]),
    "an output of another dtype": (
        change("stats", lambda x: x.double()),
        ["'stats' is declared fp32 but bound to a torch.float64 buffer"],
    ),
    "a sparse tensor": (
        change("q", lambda x: x.to_sparse()),
        ["'q' is bound to a tensor without plain memory (torch.sparse_coo, cpu)"],
    ),
    "a meta output": (
        change("stats", lambda x: x.to("meta")),
        ["'stats' is bound to a meta tensor that has no memory"],
    ),
    "memory that was given back": (change("q", emptied), ["'q' is bound to a Tensor that has no"]),
    "objects": (
        change("q", lambda x: np.zeros(X, dtype=object)),
        ["'q': its buffer cannot be read by DLPack"],
    ),
    "a virtual tensor": (
        lambda p: {**p, "q_rot": torch.zeros(2, 6, 5, 8)},
        ["'q_rot' is virtual, it has no buffer; call set_output(True)"],
    ),
    "an unknown name": (
        lambda p: {**p, "Q": p["q"]},
        [
            "'Q' names no tensor of graph 'graph' (did you mean 'q'?)",
            "there are f, k, o, q, stats, v",
        ],
    ),
    "a key of no kind": (
        lambda p: {**p, 1.5: p["q"]},
        ["1.5 names no tensor of graph 'graph'"],
    ),
    "a tensor of another graph": (
        lambda p: {**p, new().tensor(X, name="q"): p["q"]},
        ["tensor 'q' belongs to another graph"],
    ),
}


@pytest.mark.parametrize(("make", "parts"), BAD.values(), ids=BAD)
def test_a_pack_that_does_not_fit(make: Callable[[Pack], Pack], parts: list[str]):
    g = attention()
    g.build()
    refused(g, make(buffers(g)), *parts)


def test_outputs_are_untouched_however_late_the_fault_is_found():
    """The second of two outputs, of the last node, is the one that is wrong."""
    g = rotation()
    y = g.find_tensor("y")
    g.scale(y, 2.0, name="twice").set_output(True).set_name("z")
    g.build()
    refused(g, buffers(g) | {"z": torch.full((2, 3, 5, 7), torch.nan)}, "'z' is declared")


# Overlap


def split(n: int, *starts: int) -> list[torch.Tensor]:
    """Views of X's size into one store."""
    store = torch.full((n,), torch.nan)
    return [store[i : i + 240].view(X) for i in starts]


OVERLAP = ["shares memory with that of", "use separate buffers"]


def test_an_output_over_its_input():
    g = rotation()
    g.build()
    for shift in (1, 120, 239):
        x, y = split(480, 0, shift)
        refused(g, buffers(g) | {"x": x, "y": y}, "'y' (written by 'turn')", "'x'", *OVERLAP)
    x, y = split(480, 0, 240)
    run(g, x=x.copy_(torch.ones(X)), y=y)


def test_an_output_over_the_table():
    g = rotation((2, 3, 30, 8))
    g.build()
    y = torch.full((2, 3, 30, 8), torch.nan)
    f = y.view(-1)[:240].view(30, 1, 1, 8)
    refused(g, buffers(g) | {"f": f, "y": y}, "'f'", *OVERLAP)


def test_two_outputs_in_one_place():
    g = attention(rotated=False)
    g.build()
    store = torch.full((240,), torch.nan)
    pack = {"o": store.view(2, 6, 5, 4), "stats": store[100:160].view(2, 6, 5, 1)}
    refused(g, buffers(g) | pack, "shares memory")


def test_strides_that_interleave_without_touching():
    """Even channels of one store for x, odd ones for y: the same range, no byte in common."""
    g = new()
    stride = (240, 80, 16, 2)
    x, f = g.tensor(X, stride, name="x"), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f).set_output(True).set_name("y").set_stride(stride)
    store = torch.full((2, 3, 5, 16), torch.nan)
    store[..., ::2] = 1.0
    kept = store.clone()
    run(g, x=store[..., ::2], y=store[..., 1::2])
    assert torch.equal(store[..., ::2], kept[..., ::2])


def test_an_output_may_take_the_place_of_what_is_not_read_any_more():
    """z is written by a node after the last one that reads x."""
    g = rotation()
    g.scale(g.find_tensor("y"), 2.0, name="twice").set_output(True).set_name("z")
    g.build()
    pack = buffers(g)
    g.execute(pack)
    want = pack["z"].clone()
    pack["z"] = pack["x"]
    g.execute(pack)
    assert torch.equal(pack["z"], want)


def test_an_input_may_be_bound_twice():
    q = torch.randn(2, 6, 7, 8)
    g = new()
    t = [g.tensor(q.shape, name=n) for n in "qkv"]
    g.sdpa(*t, name="attn")[0].set_output(True).set_name("o")
    run(g, q=q, k=q, v=q)


def test_an_output_that_overlaps_itself():
    g = new()
    x = g.tensor((2, 1, 5, 8), name="x")
    y = g.scale(x, 2.0, name="s").set_output(True).set_name("y")
    y.set_stride((0, 40, 8, 1))
    with pytest.raises(GraphError, match=r"by which elements of its dim .* overlap"):
        g.build()


def test_a_virtual_tensor_that_overlaps_itself():
    """It would lie in the workspace, where nobody sees that one element serves twice."""
    g = new()
    x, f = g.tensor(X, name="x"), g.tensor((5, 1, 1, 8), name="f")
    y = g.rope(x, f, name="turn").set_stride((1, 1, 1, 1))
    g.rope(y, f).set_output(True)
    with pytest.raises(GraphError, match=r"rope 'turn': output .* has strides"):
        g.build()


# Workspace


def test_the_workspace():
    g = attention()
    size = g.get_workspace_size()
    assert size > 0
    pack = buffers(g)
    needs = f"needs {size} bytes on cpu"
    refused(g, pack, needs, workspace=torch.empty(size - 1, dtype=torch.uint8))
    refused(g, pack, needs, workspace=torch.empty(0, dtype=torch.uint8))
    refused(g, pack, needs, workspace=torch.empty(size, dtype=torch.uint8, device="meta"))
    for given in (5, "workspace", b"0" * size, np.zeros(size, np.uint8)):
        refused(g, pack, "use a contiguous uint8 tensor", workspace=given)
    every_second = torch.empty(2 * size, dtype=torch.uint8)[::2]
    refused(g, pack, "use a contiguous uint8 tensor", workspace=every_second)
    odd = torch.empty(size + 17, dtype=torch.uint8)[1:]
    refused(g, pack, "not aligned to 16 bytes", workspace=odd)
    for fits in (
        torch.empty(size, dtype=torch.uint8),
        torch.empty(size, 2, dtype=torch.float64),
        torch.full((size,), 255, dtype=torch.uint8),
    ):
        pack = buffers(g)
        g.execute(pack, fits)
        assert not bool(pack["o"].isnan().any())


def test_a_workspace_that_is_a_buffer_as_well():
    g = attention()
    size = g.get_workspace_size()
    pack = buffers(g)
    workspace = torch.empty(size + 4 * 480, dtype=torch.uint8)
    for name in ("q", "o"):
        shape = pack[name].shape
        inside = workspace[: 4 * shape.numel()].view(F32).view(shape).copy_(pack[name])
        words = f"the workspace shares memory with the buffer of {name!r}"
        refused(g, pack | {name: inside}, words, workspace=workspace)


def test_a_graph_without_virtual_tensors_needs_none():
    g = rotation()
    assert g.get_workspace_size() == 0
    g.execute(buffers(g), torch.empty(0, dtype=torch.uint8))
    g.execute(buffers(g), None)


# Values on the host


def padded(**options: Any) -> ropegraph.pygraph:
    g = new()
    t = {n: g.tensor((2, 2, 4, 8), name=n) for n in "qkv"}
    lengths = {
        n: g.tensor((2, 1, 1, 1), data_type=torch.int32, name=n)
        for n in ("seq_len_q", "seq_len_kv")
    }
    o, _ = g.sdpa(t["q"], t["k"], t["v"], use_padding_mask=True, name="attn", **lengths, **options)
    o.set_output(True).set_name("o")
    return g


@pytest.mark.parametrize("port", ["seq_len_q", "seq_len_kv"])
@pytest.mark.parametrize("length", [-1, 5])
def test_a_length_outside_of_the_tensor(port: str, length: int):
    g = padded()
    lengths = torch.tensor([1, length], dtype=torch.int32).reshape(2, 1, 1, 1)
    refused(
        g,
        buffers(g) | {port: lengths},
        f"sdpa 'attn': {port} of sequence 1 is {length}",
        "0..4",
        error=PositionError,
    )


def test_a_position_error_is_an_index_error_and_a_graph_error():
    assert issubclass(PositionError, IndexError)
    assert issubclass(PositionError, GraphError)
    assert issubclass(GraphError, ValueError)
    assert not issubclass(UnsupportedError, ValueError)


def with_seed() -> ropegraph.pygraph:
    g = new()
    q = g.tensor((1, 2, 4, 8), name="q")
    seed, offset = (
        g.tensor((1, 1, 1, 1), data_type=torch.int64, is_pass_by_value=True, name=n)
        for n in ("seed", "offset")
    )
    g.sdpa(q, q, q, dropout=(0.5, seed, offset), name="a")[0].set_output(True).set_name("o")
    return g


@pytest.mark.parametrize("given", [1.5, 2**64, True, "7", None, [7], float("nan")])
def test_a_host_scalar_that_its_type_cannot_hold(given: Any):
    g = with_seed()
    refused(g, buffers(g) | {"seed": given}, "'seed' is bound to", "int64")


@pytest.mark.parametrize("given", [7, np.int32(7), np.array([[[[7]]]]), torch.tensor(7)])
def test_a_host_scalar_of_any_kind(given: Any):
    g = with_seed()
    want = run(g, seed=torch.full((1, 1, 1, 1), 7))["o"]
    assert torch.equal(run(g, seed=given)["o"], want)


def test_a_host_scalar_on_a_device_is_refused():
    g = with_seed()
    given = torch.full((1, 1, 1, 1), 7, device="meta")
    refused(g, buffers(g) | {"seed": given}, "'seed' is bound to a meta tensor")


def test_a_scale_as_a_host_number():
    g = new()
    q, a = g.tensor((1, 2, 4, 8), name="q"), g.tensor((1, 1, 1, 1), name="a", is_pass_by_value=True)
    g.sdpa(q, q, q, attn_scale=a)[0].set_output(True).set_name("o")
    want = run(g, a=torch.full((1, 1, 1, 1), 0.3))["o"]
    for given in (0.3, np.float32(0.3), np.float64(0.3), torch.tensor(0.3)):
        assert torch.equal(run(g, a=given)["o"], want)
    refused(g, buffers(g) | {"a": "0.3"}, "'a' is bound to str '0.3'")


# Ragged buffers


def test_offsets_that_reach_past_the_buffer():
    g = new()
    offsets = g.tensor((3, 1, 1, 1), data_type=torch.int64, name="at")
    x = g.tensor((2, 1, 4, 8), (32, 8, 8, 1), ragged_offset=offsets, name="x")
    f = g.tensor((4, 1, 1, 8), name="f")
    g.rope(x, f).set_output(True).set_name("y")
    g.build()
    pack = {"f": torch.zeros(4, 1, 1, 8), "x": torch.ones(6, 8), "y": torch.full((6, 8), torch.nan)}

    def at(*starts: int) -> torch.Tensor:
        return torch.tensor(starts).reshape(3, 1, 1, 1)

    for starts, text in (
        ((0, 24, 56), "ends at element"),
        ((0, 32, 16), "decrease at sequence 1"),
        ((-8, 0, 8), "the first offset"),
    ):
        refused(g, pack | {"at": at(*starts)}, text, error=PositionError)
    g.execute(pack | {"at": at(0, 16, 48)})
    assert bool((pack["y"] == 1).all())


def ragged_rotations() -> tuple[ropegraph.pygraph, Pack]:
    """q and k rotated in one launch and bound, then read by an attention."""
    g = new()
    names = ("q", "k")
    at = {n: g.tensor((3, 1, 1, 1), data_type=torch.int64, name=f"at_{n}") for n in names}
    f = g.tensor((4, 1, 1, 8), name="f")
    turned = {}
    for n in names:
        x = g.tensor((2, 1, 4, 8), (32, 8, 8, 1), ragged_offset=at[n], name=n)
        turned[n] = g.rope(x, f, name=f"turn_{n}").set_output(True).set_name(f"{n}_rot")
    lengths = {n: g.tensor((2, 1, 1, 1), data_type=torch.int64, name=n)
               for n in ("seq_len_q", "seq_len_kv")}  # fmt: skip
    o, _ = g.sdpa(
        turned["q"], turned["k"], turned["k"], use_padding_mask=True, name="attn", **lengths
    )
    o.set_output(True).set_name("o").set_ragged_offset(at["q"])
    starts = torch.tensor([0, 16, 48]).reshape(3, 1, 1, 1)
    pack: Pack = {"f": torch.zeros(4, 1, 1, 8), "o": torch.full((6, 8), torch.nan)}
    for n in names:
        pack |= {n: torch.ones(6, 8), f"{n}_rot": torch.full((6, 8), torch.nan)}
        pack |= {f"at_{n}": starts.clone()}
    pack |= {n: torch.tensor([2, 4]).reshape(2, 1, 1, 1) for n in lengths}
    return g, pack


def test_two_rotations_in_one_launch_are_checked_before_either_writes():
    g, pack = ragged_rotations()
    assert len(g.plan.steps) == 2
    g.execute(pack)
    assert all(bool((pack[n] == 1).all()) for n in ("q_rot", "k_rot", "o"))
    for n in ("q_rot", "k_rot", "o"):
        pack[n].fill_(torch.nan)
    bad = torch.tensor([0, 32, 16]).reshape(3, 1, 1, 1)
    refused(g, pack | {"at_k": bad}, "'at_k': offsets of 'k' decrease", error=PositionError)


def test_outputs_of_steps_before_the_fault_are_named():
    """Lengths are read by the attention, when the rotations have been written."""
    g, pack = ragged_rotations()
    pack["seq_len_kv"] = torch.tensor([2, 5]).reshape(2, 1, 1, 1)
    with pytest.raises(PositionError, match="already written: q_rot, k_rot") as caught:
        g.execute(pack)
    assert "seq_len_kv of sequence 1 is 5" in str(caught.value)
    assert bool(pack["o"].isnan().all())
    assert bool((pack["q_rot"] == 1).all())


# Same buffers again


def test_a_good_pack_does_not_vouch_for_a_bad_one():
    g = rotation()
    good = buffers(g)
    g.execute(good)
    refused(g, good | {"x": good["x"].transpose(1, 2)}, "'x' is declared")
    g.execute(good)
    x, y = split(480, 0, 1)
    refused(g, good | {"x": x, "y": y}, "shares memory")
    shorter = good["y"].view(-1)[:-1].as_strided((2, 3, 5, 7), (120, 40, 8, 1))
    refused(g, good | {"y": shorter}, "'y' is declared")


def test_a_length_found_wrong_after_a_launch_names_what_is_written():
    g = new()
    q, k, v = (g.tensor((2, 1, 3, 8), name=name) for name in "qkv")
    f = g.tensor((3, 1, 1, 8), name="f")
    lengths = {name: g.tensor((2, 1, 1, 1), name=name) for name in ("seq_len_q", "seq_len_kv")}
    turned = g.rope(q, f, name="turn").set_output(True).set_name("turned")
    o, _ = g.sdpa(turned, k, v, use_padding_mask=True, generate_stats=False, **lengths)
    o.set_output(True).set_name("o")
    pack = buffers(g)
    pack["seq_len_q"].fill_(9)
    with pytest.raises(PositionError, match=r"sequence 0 is 9.*already written: turned$"):
        g.execute(pack)
    assert bool(pack["o"].isnan().all())
