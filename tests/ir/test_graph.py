"""The graph as a value: order of nodes, edits, and the questions passes ask."""

import dataclasses

import pytest

from ropegraph.errors import InternalError
from ropegraph.ir.graph import Node, merged_ports, toposort
from ropegraph.ir.ops import Rope, Scale, Sum
from tests.ir.build import Build, forward, value


def node(name: str, reads: str = "", writes: str = "") -> Node:
    inputs = {str(i): v for i, v in enumerate(reads.split())}
    outputs = {f"o{i}": v for i, v in enumerate(writes.split())}
    return Node(name, Sum(), inputs, outputs)


@pytest.mark.parametrize(
    ("nodes", "want"),
    [
        ([], ""),
        ([node("a", "x", "y"), node("b", "y", "z")], "a b"),
        ([node("b", "y", "z"), node("a", "x", "y")], "a b"),
        # where nothing decides, the order stays
        ([node("c", "x", "y"), node("a", "x", "z"), node("b", "x", "w")], "c a b"),
        # as far forward as it may go, and no farther
        ([node("d", "z w", "u"), node("a", "x", "y"), node("b", "y", "z w")], "a b d"),
        # two outputs, one reader of each, a diamond
        ([node("j", "l r", ""), node("r", "m", "r"), node("l", "m", "l"), node("m", "", "m")],
         "m r l j"),
        # the same value read twice
        ([node("b", "y y", "z"), node("a", "", "y")], "a b"),
    ],
)  # fmt: skip
def test_toposort(nodes: list[Node], want: str):
    assert " ".join(n.name for n in toposort(nodes)) == want


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a", "y", "y")],
        [node("a", "z", "y"), node("b", "y", "z")],
        [node("a", "x", "w"), node("b", "u", "y"), node("c", "y", "z"), node("d", "z", "u")],
    ],
)
def test_a_cycle_is_our_own_fault(nodes: list[Node]):
    with pytest.raises(InternalError, match="wait for each other") as caught:
        toposort(nodes)
    assert "'a'" in str(caught.value) or "'b', 'c', 'd'" in str(caught.value)


def test_who_makes_and_who_reads():
    g = forward().graph("o", saved=["k_rot"])
    assert g.producer("q_rot") is g.node("rope_q")
    assert g.producer("q") is None
    assert g.readers("freqs") == {"rope_q", "rope_k"}
    assert [n.name for n in g.reading("k_rot")] == ["attn"]
    assert g.reading("o") == []
    assert g.inputs == ("q", "freqs", "k", "v")
    assert g.outputs == ("k_rot", "o")
    assert [g.is_virtual(v) for v in ("q", "q_rot", "k_rot", "o")] == [False, True, False, False]


def test_a_node_that_reads_a_value_twice_is_one_reader():
    b = Build()
    b.tensor("x", 1, 1, 2, 4)
    b.sum("twice", ["x", "x"], "y")
    assert [n.name for n in b.graph("y").reading("x")] == ["twice"]


def test_offsets_of_ragged_tensors_are_inputs():
    b = Build()
    b.tensor("x", 2, 1, 4, 4, ragged_offset="starts")
    b.tensor("starts", 3, 1, 1, 1)
    b.scale("s", "x", "y", 2.0)
    b.values["y"] = dataclasses.replace(b.values["y"], ragged_offset="ends")
    b.tensor("ends", 3, 1, 1, 1)
    assert b.graph("y").inputs == ("x", "starts", "ends")


def test_an_edit_orders_nodes_and_drops_what_nobody_mentions():
    b = Build()
    b.tensor("x", 1, 1, 2, 4)
    b.scale("first", "x", "y", 2.0)
    b.scale("second", "y", "z", 3.0)
    g = b.graph("z")
    after = g.edited([Node("second", Scale(6.0), {"input": "x"}, {"output": "z"})], ["first"])
    assert [n.name for n in after.nodes] == ["second"]
    assert set(after.values) == {"x", "z"}
    assert [n.name for n in g.nodes] == ["first", "second"], "the old graph is as it was"


def test_an_edit_that_turns_the_order_round():
    b = Build()
    b.tensor("x", 1, 1, 2, 4)
    b.scale("first", "x", "y", 2.0)
    b.scale("second", "x", "z", 3.0)
    after = b.graph("y").edited([Node("first", Scale(2.0), {"input": "z"}, {"output": "y"})])
    assert [n.name for n in after.nodes] == ["second", "first"]


def test_attributes_are_replaced_in_a_copy():
    g = forward().graph("o")
    rope = g.node("rope_q")
    assert rope.with_attrs(output_scale=2.0).attrs == Rope(8, 0, output_scale=2.0)
    assert rope.attrs == Rope(8, 0)
    with pytest.raises(TypeError):
        rope.with_attrs(no_such_field=1)


def test_graph_nodes_and_values_are_frozen():
    g = forward().graph("o")
    for thing, field in ((g, "fold"), (g.nodes[0], "name"), (g.values["q"], "dim")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, None)


@pytest.mark.parametrize(
    ("dim", "stride", "numel", "span"),
    [
        ((2, 3, 5, 8), (120, 40, 8, 1), 240, 240),
        ((2, 3, 5, 8), (1000, 100, 8, 1), 240, 1000 + 200 + 32 + 7 + 1),
        ((2, 3, 5, 8), (0, 40, 8, 1), 240, 120),
        ((2, 0, 5, 8), (0, 40, 8, 1), 0, 0),
        ((), (), 1, 1),
    ],
)
def test_sizes(dim: tuple[int, ...], stride: tuple[int, ...], numel: int, span: int):
    x = value("x", dim, stride=stride)
    assert (x.numel, x.span_elems) == (numel, span)


def test_the_ports_of_one_part_of_a_pair():
    ports = {"input0": "a", "freqs0": "f", "input1": "b", "freqs1": "f"}
    assert merged_ports(ports, 0) == {"input": "a", "freqs": "f"}
    assert merged_ports(ports, 1) == {"input": "b", "freqs": "f"}
