"""Rotations that no sdpa of the graph pairs become one launch where they share a table."""

import pytest
import torch

import ropegraph as rg
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
