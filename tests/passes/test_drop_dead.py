"""Nodes and outputs that nobody reads are dropped, and nothing else is."""

import pytest

from ropegraph.ir.ops import Rope, RopePair
from ropegraph.passes.drop_dead import drop_dead
from tests.ir.build import Build, backward, forward
from tests.passes.text import declines, done, nodes, run


def one_scale() -> Build:
    b = Build()
    b.tensor("x", 1, 1, 2, 4)
    b.scale("s", "x", "y", 2.0)
    return b


def test_a_chain_goes_from_its_end():
    b = one_scale()
    b.scale("t", "y", "z", 3.0)
    b.scale("kept", "x", "w", 4.0)
    g = b.graph("w")
    after = run(drop_dead, g)
    assert nodes(after) == ["w* = scale 'kept' (input=x, factor=4)"]
    assert set(after.values) == {"x", "w"}
    assert done(drop_dead, g) == [
        "t: removed: nobody reads its outputs",
        "s: removed: nobody reads its outputs",
    ]


@pytest.mark.parametrize(("visible", "saved"), [(["y"], []), ([], ["y"])])
def test_what_the_caller_or_the_backward_sees_stays(visible: list[str], saved: list[str]):
    assert declines(drop_dead, one_scale().graph(*visible, saved=saved)) == {}


def test_unread_stats_are_not_computed():
    b = forward()
    b.sdpa("second", "q_rot", "k_rot", "v", "o2", stats="stats")
    g = b.graph("o", "o2")
    assert nodes(run(drop_dead, g))[-1] == (
        "o2* = sdpa 'second' (q=q_rot, k=k_rot, v=v, attn_scale=1)"
    )
    assert done(drop_dead, g) == ["second: Stats not computed: unread"]


@pytest.mark.parametrize("saved", [False, True])
def test_stats_alone_keep_the_output(saved: bool):
    """Every engine writes O: without a place of its own it would land in another tensor."""
    b = Build()
    b.tensor("q", 1, 2, 3, 8)
    b.sdpa("attn", "q", "q", "q", stats="stats")
    g = b.graph(saved=["stats"]) if saved else b.graph("stats")
    assert declines(drop_dead, g) == {}
    assert g.is_virtual("o")


def test_unread_gradients_are_not_computed():
    g = backward().graph("dk")
    after = run(drop_dead, g)
    assert done(drop_dead, g) == [
        "attn: dV not computed: unread",
        "rope_q_b: removed: nobody reads its outputs",
        "attn: dQ not computed: unread",
    ]
    assert nodes(after) == [
        (
            "dk_rot = sdpa_backward 'attn' "
            "(q=q_rot, k=k_rot, v=v, o=o, dO=do, stats=stats, attn_scale=0.25)"
        ),
        "dk* = rope_backward 'rope_k_b' (dY=dk_rot, freqs=freqs, output_scale=1)",
    ]


def test_a_merged_launch_keeps_both_outputs():
    b = Build()
    b.tensor("q", 1, 2, 3, 8), b.tensor("k", 1, 1, 3, 8), b.tensor("freqs", 3, 1, 1, 8)
    ports = {"input0": "q", "freqs0": "freqs", "input1": "k", "freqs1": "freqs"}
    b.node("pair", RopePair((Rope(8, 0), Rope(8, 0))), ports, {"output0": "a", "output1": "b"})
    assert declines(drop_dead, b.graph("a")) == {}
    assert run(drop_dead, b.graph()).nodes == ()


def test_offsets_of_dropped_values_go_with_them():
    b = Build()
    b.tensor("x", 2, 1, 4, 4, ragged_offset="starts"), b.tensor("starts", 3, 1, 1, 1)
    b.tensor("y", 1, 1, 4, 4)
    b.scale("dead", "x", "z", 2.0), b.scale("kept", "y", "w", 2.0)
    assert set(run(drop_dead, b.graph("w")).values) == {"y", "w"}
