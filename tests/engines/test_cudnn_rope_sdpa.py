"""cuDNN's native graph of rotation and attention: what it takes, and what is recorded."""

from __future__ import annotations

from typing import Any

import pytest

import ropegraph
from ropegraph.api.freeze import freeze
from ropegraph.engines.cudnn_rope_sdpa import native
from ropegraph.engines.cudnn_rope_sdpa.engine import CudnnRopeSdpa
from ropegraph.engines.cudnn_rope_sdpa.record import record, uids_of
from ropegraph.engines.cudnn_rope_sdpa.rules import why_not
from ropegraph.errors import UnsupportedError
from ropegraph.ir.graph import Graph
from ropegraph.lowering.choose import slots_of
from ropegraph.lowering.engine import Device, Step
from ropegraph.passes.merge_rope_qk import merge_rope_qk
from tests.engines.cudnn_steps import frontend

FE = frontend()
H200 = Device("cuda", 0, sm=90, cudnn=92800)
B, HQ, HK, S, D = 2, 4, 2, 128, 64
TYPES = {"io_data_type": "bfloat16", "intermediate_data_type": "float32"}


def forward(fold: str = "off", **rope: Any) -> Graph:
    """rope(q), rope(k), sdpa; nothing but O is bound."""
    g = ropegraph.pygraph(name="native", fold=fold, **TYPES)
    q, k, v = (g.tensor((B, h, S, D), name=n) for n, h in (("q", HQ), ("k", HK), ("v", HK)))
    width = rope.get("rope_dim", 0) or D
    freqs = g.tensor((S, 1, 1, width), data_type="float32", name="freqs")
    q_rot = g.rope(q, freqs, name="rope_q", **{"output_scale": 0.5, **rope})
    k_rot = g.rope(k, freqs, name="rope_k", **{"output_scale": 2.0, **rope})
    o, _ = g.sdpa(q_rot, k_rot, v, attn_scale=0.125, use_causal_mask=True, generate_stats=True,
                  name="attn")  # fmt: skip
    o.set_output(True).set_name("o")
    return freeze(g.recorder, fold, False, None)


def backward(is_bound: bool = True) -> Graph:
    """sdpa_backward, then the adjoint of each rotation."""
    g = ropegraph.pygraph(name="native_backward", **TYPES)
    q, o, d_o = (g.tensor((B, HQ, S, D), name=n) for n in ("q_rot", "o", "dO"))
    k, v = (g.tensor((B, HK, S, D), name=n) for n in ("k_rot", "v"))
    stats = g.tensor((B, HQ, S, 1), data_type="float32", name="stats")
    freqs = g.tensor((S, 1, 1, D), data_type="float32", name="freqs")
    d_q, d_k, d_v = g.sdpa_backward(q, k, v, o, d_o, stats, attn_scale=0.125, name="attn")
    for tensor, name in ((d_q, "dQ_rot"), (d_k, "dK_rot")):
        tensor.set_name(name)
        if is_bound:
            tensor.set_output(True)
    d_v.set_output(True).set_name("dV")
    for tensor, name in ((d_q, "dQ"), (d_k, "dK")):
        made = g.rope_backward(tensor, freqs, output_scale=0.5, name=f"rope_{name}")
        made.set_output(True).set_name(name)
    return freeze(g.recorder, "off", False, None)


def inspected(graph: Graph) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nodes and tensors by name."""
    found = record(FE, graph, H200).inspect()
    return {node["name"]: node for node in found["nodes"]}, found["tensors"]


def test_the_forward_is_one_graph_of_three_nodes() -> None:
    graph = forward()
    assert why_not(graph, H200) == ()
    nodes, tensors = inspected(graph)
    assert [node["type"] for node in nodes.values()] == ["ROPE", "ROPE", "SDPA"]
    assert nodes["rope_q"]["params"] == {"output_scale": 0.5, "rope_dim": D}
    assert nodes["rope_k"]["params"] == {"output_scale": 2.0, "rope_dim": D}
    assert nodes["attn"]["params"]["attn_scale"] == 0.125
    assert nodes["attn"]["inputs"]["q"] == nodes["rope_q"]["outputs"]["OUT_0"]
    assert nodes["attn"]["inputs"]["k"] == nodes["rope_k"]["outputs"]["OUT_0"]
    for name, uid in uids_of(graph).items():
        assert tensors[name]["uid"] == uid
        assert not tensors[name]["is_virtual"], "a rotation writes to a buffer, never between nodes"
        assert tuple(tensors[name]["dim"]) == graph.values[name].dim


def test_a_pair_of_rotations_is_recorded_as_two() -> None:
    graph, _ = merge_rope_qk.run(forward())
    assert len(graph.nodes) == 2
    assert why_not(graph, H200) == ()
    nodes, _ = inspected(graph)
    scales = [n["params"]["output_scale"] for n in nodes.values() if n["type"] == "ROPE"]
    assert sorted(scales) == [0.5, 2.0]


def test_the_backward_runs_from_bound_gradients() -> None:
    graph = backward()
    assert why_not(graph, H200) == ()
    nodes, tensors = inspected(graph)
    assert [node["type"] for node in nodes.values()] == ["SDPA_BWD", "ROPE_BWD", "ROPE_BWD"]
    assert nodes["rope_dQ"]["params"] == {"output_scale": 0.5, "rope_dim": D}
    assert nodes["rope_dQ"]["inputs"]["dY"] == "dQ_rot"
    assert not any(tensor["is_virtual"] for tensor in tensors.values())
    unbound = why_not(backward(is_bound=False), H200)
    assert [text.split(" must")[0] for text in unbound] == ["'dQ_rot'", "'dK_rot'"]


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_dim": 32, "rope_offset": 0}, "rope_offset=0; cuDNN rotates the last 32 channels"),
        ({"attention_factor": 1.2}, "attention_factor=1.2; cuDNN scales whole rows only"),
        ({"interleaved": True, "table_layout": "pairs"}, "interleaved pairs"),
        ({"table_layout": "full"}, "freqs in another form"),
        ({"inverse": True}, "inverse=True"),
    ],
)
def test_a_rotation_cudnn_does_not_know_is_named(rope: dict[str, Any], says: str) -> None:
    found = why_not(forward(**rope), H200)
    assert any(text.startswith("rope 'rope_q': ") and says in text for text in found), found
    assert any(text.startswith("rope 'rope_k': ") and says in text for text in found), found


def test_an_old_backend_and_a_cpu_are_named_for_every_node() -> None:
    old = why_not(forward(), Device("cuda", 0, 90, 91900))
    assert [text.split(": ", 1)[0] for text in old] == [
        "rope 'rope_q'", "rope 'rope_k'", "sdpa 'attn'"
    ]  # fmt: skip
    assert all("needs cuDNN 9.24 or newer, this is 9.19.0" in text for text in old)
    assert all("needs a CUDA device, this is cpu" in text for text in why_not(forward(), Device()))


def test_rotations_alone_have_no_plan() -> None:
    g = ropegraph.pygraph(name="alone", **TYPES)
    q = g.tensor((B, HQ, S, D), name="q")
    freqs = g.tensor((S, 1, 1, D), data_type="float32", name="freqs")
    g.rope(q, freqs).set_output(True)
    found = why_not(freeze(g.recorder, "off", False, None), H200)
    assert found == ("a graph without sdpa has no plan: cuDNN rotates only beside an attention",)


def test_as_an_engine_it_takes_no_step_and_says_where_to_go() -> None:
    graph = forward()
    for node in graph.nodes:
        step = Step(node, graph.values, "cudnn.rope_sdpa", slots_of(graph))
        (reason,) = CudnnRopeSdpa().why_not(step, H200)
        assert "native.build runs the whole graph" in reason
        with pytest.raises(UnsupportedError, match="runs the whole graph"):
            CudnnRopeSdpa().compile(step, H200)


def test_asked_for_by_name_it_raises_with_its_reasons() -> None:
    g = ropegraph.pygraph(name="named", engines="cudnn.rope_sdpa", **TYPES)
    q = g.tensor((B, HQ, S, D), name="q")
    g.sdpa(q, q, q, attn_scale=0.125, name="attn")[0].set_output(True)
    with pytest.raises(UnsupportedError) as caught:
        g.build()
    assert any("native.build" in text for text in caught.value.reasons["cudnn.rope_sdpa"])


def test_a_build_that_cannot_be_lists_every_reason() -> None:
    with pytest.raises(UnsupportedError, match="cannot take the graph") as caught:
        native.build(forward(inverse=True), Device("cuda", 0, 90, 91900))
    assert len(caught.value.reasons["cudnn.rope_sdpa"]) == 5
