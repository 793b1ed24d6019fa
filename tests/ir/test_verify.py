"""Every invariant that passes must keep, broken once: an InternalError with the graph attached."""

from dataclasses import replace

import pytest

from ropegraph.errors import GraphError, InternalError
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Rope, Scale, Sdpa
from ropegraph.ir.verify import verify
from tests.ir.build import forward, value


def good() -> Graph:
    return forward().graph("o")


def with_nodes(*nodes: Node) -> Graph:
    return replace(good(), nodes=nodes)


def changed(name: str, **changes: object) -> Graph:
    g = good()
    return replace(g, nodes=tuple(replace(n, **changes) if n.name == name else n for n in g.nodes))


def with_value(name: str, *dim: int) -> Graph:
    g = good()
    return replace(g, values={**g.values, name: value(name, dim)})


NODES = {n.name: n for n in good().nodes}
BROKEN = {
    "unordered": (
        with_nodes(NODES["attn"], NODES["rope_q"], NODES["rope_k"]),
        "node 'attn' reads 'q_rot', which no earlier node produces",
    ),
    "lost producer": (
        with_nodes(NODES["rope_k"], NODES["attn"]),
        None,  # q_rot is then an input of the graph, which is no fault
    ),
    "same name": (
        with_nodes(NODES["rope_q"], replace(NODES["rope_k"], name="rope_q"), NODES["attn"]),
        "two nodes are named 'rope_q'",
    ),
    "written twice": (
        with_nodes(*good().nodes, Node("again", Scale(2.0), {"input": "q"}, {"output": "o"})),
        "'o' is written twice, the second time by 'again'",
    ),
    "an input written": (
        with_nodes(*good().nodes, Node("again", Scale(2.0), {"input": "o"}, {"output": "v"})),
        "node 'attn' reads 'v', which no earlier node produces",
    ),
    "unknown input": (
        changed("attn", inputs={"q": "q_rot", "k": "gone", "v": "v"}),
        "node 'attn' uses 'gone' at k, which is no value",
    ),
    "unknown output": (
        changed("attn", outputs={"O": "o", "Stats": "gone"}),
        "node 'attn' uses 'gone' at Stats, which is no value",
    ),
    "a shape rule": (
        changed("rope_q", attrs=Rope(10, 0)),
        "rope_dim=10 is more than the 8 channels",
    ),
    "output dims": (with_value("o", 2, 6, 5, 8), "'attn' writes (2, 6, 5, 4) to 'o'"),
    "a missing port": (
        changed("attn", inputs={"q": "q_rot", "k": "k_rot"}),
        "node 'attn' has no input at 'v'",
    ),
    "a port of another op": (
        changed("attn", outputs={"dQ": "o"}),
        "node 'attn' has no output dQ",
    ),
    "an output by nobody": (
        replace(good(), visible=frozenset({"o", "nowhere"})),
        "the output 'nowhere' is written by no node",
    ),
    "a saved value by nobody": (
        replace(good(), saved=frozenset({"q"})),
        "the output 'q' is written by no node",
    ),
    "offsets that are no value": (
        replace(good(), values={
            n: replace(v, ragged_offset="gone") if n == "q" else v
            for n, v in good().values.items()
        }),
        "'q' is ragged by 'gone', which is no value",
    ),
}  # fmt: skip


def test_a_good_graph_passes():
    assert verify(good(), after="record") is None
    assert verify(replace(good(), nodes=(), visible=frozenset()), after="drop-dead") is None


@pytest.mark.parametrize(("graph", "text"), BROKEN.values(), ids=BROKEN)
def test_a_broken_graph_is_our_own_fault(graph: Graph, text: str | None):
    if text is None:
        assert verify(graph, after="a-pass") is None
        return
    with pytest.raises(InternalError) as caught:
        verify(graph, after="a-pass")
    message = str(caught.value)
    assert message.startswith("after 'a-pass': ")
    assert text in message.split("\n")[0]
    assert "\ngraph 'g' fold=q" in message, "the graph follows"
    assert not isinstance(caught.value, GraphError), "the caller did nothing wrong"


def test_the_shape_rule_is_kept_as_the_cause():
    with pytest.raises(InternalError) as caught:
        verify(changed("attn", attrs=Sdpa(max_seq_len_kv=64)), after="a-pass")
    assert isinstance(caught.value.__cause__, (GraphError, KeyError))
