"""Rotations that no sdpa of the graph pairs become one launch where they share a table."""

from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.dtypes import DType
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import Rope
from ropegraph.passes.merge_lone_ropes import merge_lone_ropes
from tests.ir.build import Build
from tests.passes.text import run

DIMS = {"q": [2, 6, 5, 8], "k": [2, 2, 5, 8]}


@pytest.mark.parametrize("op", ["rope", "rope_backward"])
def test_q_and_k_of_an_attention_elsewhere(op):
    def graph(engines: str) -> rg.pygraph:
        g = rg.pygraph(io_data_type=torch.float64, engines=engines)
        f = g.tensor([5, 1, 1, 8], data_type=torch.float32, name="f")
        for name, scale in (("q", 0.5), ("k", -3.0)):
            x = g.tensor(DIMS[name], name=name)
            getattr(g, op)(x, f, scale, name=f"r_{name}").set_output(True).set_name(f"{name}2")
        return g

    torch.manual_seed(0)
    pack = {n: torch.randn(d, dtype=torch.float64) for n, d in DIMS.items()}
    pack["f"] = torch.randn(5, 1, 1, 8)
    results = []
    for engine in ("torch", "reference"):
        g = graph(engine)
        assert [s.name for s in g.plan.steps] == ["r_q+r_k"]
        out = {f"{n}2": torch.full(d, torch.nan, dtype=torch.float64) for n, d in DIMS.items()}
        g.execute(pack | out)
        results.append(out)
    for name in ("q2", "k2"):
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("difference", ["table", "rotation", "chain"])
def test_what_stays_apart(difference):
    b = Build()
    b.tensor("q", 2, 2, 5, 8), b.tensor("k", 2, 2, 5, 8)
    b.rope("rope_q", "q", "q_rot")
    if difference == "table":
        b.tensor("other", 5, 1, 1, 8)
        op = Rope(rope_dim=8, rope_offset=0)
        b.node("rope_k", op, {"input": "k", "freqs": "other"}, {"output": "k_rot"})
    elif difference == "rotation":
        b.rope("rope_k", "k", "k_rot", inverse=True)
    else:
        b.rope("rope_k", "q_rot", "k_rot")
    g = b.graph("q_rot", "k_rot")
    assert run(merge_lone_ropes, g) == g


def turned(q: dict[str, str], k: dict[str, str], **attrs: Any) -> Graph:
    """Two rotations by inv_freq or tables: what each reads beside its data."""
    b = Build()
    b.tensor("q", 1, 2, 6, 8), b.tensor("k", 1, 1, 6, 8)
    b.tensor("inv", 4), b.tensor("cos", 9, 1, 1, 8), b.tensor("sin", 9, 1, 1, 8)
    b.tensor("cos2", 9, 1, 1, 8)
    for name in ("at", "at2"):
        b.tensor(name, 1, dtype=DType.INT32)
    b.tensor("ids", 1, 6, dtype=DType.INT32), b.tensor("cu", 2, dtype=DType.INT32)
    op = Rope(8, 0, **attrs)
    b.node("rope_q", op, {"input": "q", **q}, {"output": "q_rot"})
    b.node("rope_k", op, {"input": "k", **k}, {"output": "k_rot"})
    return b.graph("q_rot", "k_rot")


INV, TABLES = {"inv_freq": "inv"}, {"cos": "cos", "sin": "sin"}


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (INV, INV),
        (TABLES, TABLES),
        ({**INV, "start_positions": "at"}, {**INV, "start_positions": "at"}),
        ({**INV, "start_positions": "at"}, {**INV, "start_positions": "at2"}),
        ({**TABLES, "position_ids": "ids"}, {**TABLES, "position_ids": "ids"}),
    ],
)
def test_one_source_and_one_kind_of_positions_go_together(q, k):
    attrs = {"angles": "inv_freq" if "inv_freq" in q else "cos_sin"}
    after = run(merge_lone_ropes, turned(q, k, **attrs))
    (pair,) = after.nodes
    ports = {"input0": "q", "input1": "k"}
    ports |= {f"{p}0": v for p, v in q.items()} | {f"{p}1": v for p, v in k.items()}
    assert pair.inputs == ports


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (INV, {**INV, "start_positions": "at"}),
        ({**INV, "position_ids": "ids"}, {**INV, "start_positions": "at"}),
        ({**INV, "cu_seqlens": "cu"}, INV),
        (TABLES, {**TABLES, "cos": "cos2"}),
    ],
)
def test_other_sources_or_positions_stay_apart(q, k):
    g = turned(q, k, angles="inv_freq" if "inv_freq" in q else "cos_sin")
    assert run(merge_lone_ropes, g) == g
