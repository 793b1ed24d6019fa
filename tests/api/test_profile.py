"""profile(): what is counted is counted right, nothing of the caller's is harmed, all is shown."""

import json
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import ropegraph as rg
from ropegraph.api.profile import HEAD, Profile, StepProfile
from ropegraph.ir.ops import Sdpa
from ropegraph.lowering.work import visible_pairs
from ropegraph.testing import oracle
from tests.api.graphs import F32, attention, buffers, new
from tests.missing import missing

QUICK = 1e-4


def profiled(g: rg.pygraph, pack: Any = None) -> dict[str, StepProfile]:
    found = g.profile(buffers(g) if pack is None else pack, seconds=QUICK)
    assert [row.name for row in found.rows] == [step.name for step in g.plan.steps]
    return {row.name: row for row in found.rows}


def test_a_rotation_reads_and_writes_each_element_once():
    g = new()
    x, f = g.tensor((2, 3, 5, 8), name="x"), g.tensor((16, 1, 1, 8), data_type=F32, name="f")
    g.rope(x, f, name="turn").set_output(True).set_name("y")
    row = profiled(g)["turn"]
    # Of the table, the rows of the five positions.
    assert row.bytes_read == 4 * (2 * 3 * 5 * 8 + 5 * 8)
    assert row.bytes_written == 4 * 2 * 3 * 5 * 8
    assert row.flops == 0
    assert row.limited_by == "memory"
    assert row.bytes_per_second == pytest.approx(row.bytes / row.device_seconds)


def test_a_merged_launch_reads_the_shared_table_once():
    row = profiled(attention())["rope_q+rope_k"]
    q, k = 2 * 6 * 5 * 8, 2 * 2 * 7 * 8
    assert row.bytes_read == 4 * (q + k + 7 * 8)
    assert row.bytes_written == 4 * (q + k)


def test_packed_parts_and_broadcast_extents_count_once():
    g = new()
    qkv = g.tensor((2, 5, 6, 8), name="qkv")
    f = g.tensor((5, 1, 1, 8), data_type=F32, name="f")
    q, k, v = g.qkv_rope(qkv, freqs=f, split=[2, 2, 2])
    o, _ = g.sdpa(q, k, v, name="attn")
    o.set_output(True).set_name("o")
    part = 2 * 5 * 2 * 8
    rows = profiled(g)
    turn = next(row for row in rows.values() if row.op == "rope_pair")
    assert (turn.bytes_read, turn.bytes_written) == (4 * (2 * part + 5 * 8), 4 * 2 * part)
    assert rows["attn"].bytes_read == 4 * 3 * part

    h = new()
    x = h.tensor((2, 3, 5, 8), stride=(0, 40, 8, 1), name="x")
    h.scale(x, 2.0, name="twice").set_output(True).set_name("y")
    pack = {"x": torch.randn(1, 3, 5, 8).expand(2, 3, 5, 8), "y": torch.empty(2, 3, 5, 8)}
    assert profiled(h, pack)["twice"].bytes_read == 4 * 3 * 5 * 8


def test_flops_are_those_of_torch():
    g = new()
    q, k, v = (g.tensor((2, 4, 16, 8), name=n) for n in "qkv")
    o, _ = g.sdpa(q, k, v, attn_scale=0.3, name="attn", generate_stats=True)
    o.set_output(True).set_name("o")
    back = g.backward_graph(outputs=["o"], inputs=["q", "k", "v"])
    dim = (2, 4, 16, 8)
    assert profiled(g)["attn"].flops == sdpa_flop_count(dim, dim, dim)
    ahead, behind = buffers(g), buffers(back)
    g.execute(ahead)
    behind |= {name: ahead[name] for name in back.saved}
    flops = profiled(back, behind)["attn_backward"].flops
    assert flops == sdpa_backward_flop_count(dim, dim, dim, dim)


MASKS: list[dict[str, Any]] = [
    {},
    {"right": 0},
    {"right": 2, "left": 3},
    {"left": 1},
    {"right": 0, "bottom_right": True},
    {"right": 1, "left": 4, "bottom_right": True},
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", [(5, 5), (7, 3), (3, 7), (1, 9), (0, 4), (4, 0)])
def test_masked_pairs_are_not_counted(mask: dict[str, Any], sizes: tuple[int, int]):
    names = {"right": "right_bound", "left": "left_bound", "bottom_right": "bottom_right"}
    attrs = Sdpa(**{names[k]: v for k, v in mask.items()})
    assert visible_pairs(attrs, *sizes) == int(oracle.band(*sizes, **mask).sum())


def test_lengths_count():
    g = new()
    q, k, v = (g.tensor((2, 1, 6, 8), name=n) for n in "qkv")
    lens = g.tensor((2, 1, 1, 1), data_type=torch.int32, name="lens")
    o, _ = g.sdpa(
        q, k, v, use_padding_mask=True, seq_len_q=lens, seq_len_kv=lens, name="attn",
        use_causal_mask=True,
    )  # fmt: skip
    o.set_output(True).set_name("o")
    pack = buffers(g) | {"lens": torch.tensor([6, 3], dtype=torch.int32).reshape(2, 1, 1, 1)}
    assert profiled(g, pack)["attn"].flops == 2 * (21 + 6) * (8 + 8)


def test_a_cache_counts_by_the_rows_written():
    g = new()
    x = g.tensor((2, 3, 1, 8), name="x")
    cache = g.tensor((2, 3, 64, 8), name="cache")
    at = g.tensor((2,), data_type=torch.int32, name="at")
    g.cache_write(x, cache=cache, cache_positions=at, name="put")
    row = profiled(g)["put"]
    assert row.bytes_written == 4 * 2 * 3 * 8
    assert row.bytes_read < 4 * 2 * 3 * 8 + 64


def test_matmul_flops():
    g = new()
    a, b = g.tensor((2, 3, 4), name="a"), g.tensor((1, 4, 5), name="b")
    g.matmul(a, b, name="mm").set_output(True).set_name("c")
    row = profiled(g)["mm"]
    assert row.flops == 2 * 2 * 3 * 4 * 5
    assert row.matmul_seconds > 0


def test_outputs_are_those_of_execute_and_inputs_are_left_alone():
    g = new()
    qkv = g.tensor((2, 5, 6, 8), name="qkv")
    f = g.tensor((5, 1, 1, 8), data_type=F32, name="f")
    q, k, v = g.qkv_rope(qkv, freqs=f, split=[2, 2, 2], in_place=True, q_output_scale=0.5)
    o, _ = g.sdpa(q, k, v)
    o.set_output(True).set_name("o")
    pack = buffers(g)
    assert g.plan.graph.rewritten == {"qkv"}
    before = {name: x.clone() for name, x in pack.items()}
    g.profile(pack, seconds=QUICK)
    assert torch.equal(pack["qkv"], before["qkv"])
    want = {name: x.clone() for name, x in before.items()}
    g.execute(want)
    assert torch.equal(pack["o"], want["o"])
    assert not torch.equal(want["qkv"], before["qkv"])


def test_each_launch_reads_what_the_ones_before_wrote():
    for fold in ("off", "symmetric"):
        g = attention(settings={"fold": fold})
        pack, other = buffers(g), buffers(g)
        g.profile(pack, seconds=QUICK)
        g.execute(other)
        for name in ("o", "stats"):
            assert torch.equal(pack[name], other[name])


def found() -> Profile:
    g = attention(settings={"fold": "q"})
    return g.profile(buffers(g), seconds=QUICK)


def test_times_add_up():
    p = found()
    assert all(row.device_seconds > 0 and row.device_seconds == row.host_seconds for row in p.rows)
    assert p.execute_seconds > 0.5 * sum(row.device_seconds for row in p.rows)
    for row in p.rows:
        limit = max(row.copy_seconds, row.matmul_seconds)
        assert row.share == pytest.approx(limit / row.device_seconds)


def test_it_is_shown_as_text_html_and_json():
    p = found()
    text = str(p)
    assert text.startswith("graph 'graph' on cpu: execute() takes ")
    header = text.split("\n")[2]
    assert [header.index(h) for h in HEAD] == sorted(header.index(h) for h in HEAD)
    html = p._repr_html_()
    for row in p.rows:
        assert row.name in text
        assert f"<td>{row.engine}</td>" in html
    data = json.loads(p.to_json())
    assert data == p.to_dict()
    assert [row["name"] for row in data["rows"]] == ["rope_q+rope_k", "attn"]
    assert data["rows"][1]["flops"] == p.rows[1].flops > 0


def test_names_are_escaped_in_html():
    g = new(name="<b>")
    x = g.tensor((1, 2, 3, 4), name="x")
    g.scale(x, 2.0, name="<script>&").set_output(True)
    html = g.profile(buffers(g), seconds=QUICK)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;&amp;" in html


def test_the_plot(monkeypatch: pytest.MonkeyPatch):
    p = found()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib; .*ropegraph\[notebooks\]"):
        p.plot()
    monkeypatch.undo()
    if find_spec("matplotlib") is None:
        missing("matplotlib")
    (axes,) = p.plot().axes
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == [f"{row.name}\n{row.engine}" for row in p.rows]
    widths = [bar.get_width() for bar in axes.containers[0]]
    assert widths == pytest.approx([row.device_seconds * 1e6 for row in p.rows])


@pytest.mark.parametrize("seconds", [0, -1.0, "long", True, float("nan"), None])
def test_bad_seconds(seconds: Any):
    g = attention()
    with pytest.raises(rg.GraphError, match="profile: seconds="):
        g.profile(buffers(g), seconds=seconds)


def test_bad_buffers_are_refused_as_by_execute():
    g = attention()
    pack = buffers(g)
    pack.pop("v")
    with pytest.raises(rg.GraphError, match="no buffer is bound to 'v'"):
        g.profile(pack)
    with pytest.raises(rg.GraphError, match="profile: variant_pack is int"):
        g.profile(5)
