"""Which engine takes which node, and what is said where none does."""

from typing import Any

import pytest

from ropegraph.compile import lower
from ropegraph.errors import GraphError, UnsupportedError
from ropegraph.ir.contract import FoldContract
from ropegraph.ir.graph import Graph
from ropegraph.lowering.engine import Device
from ropegraph.lowering.memory import ALIGNMENT
from ropegraph.passes import pipeline
from tests.ir.build import Build, backward, forward, rotated


def bit_exact() -> Graph:
    b = Build()
    b.tensor("x", 1, 2, 3, 8)
    b.rope("turn", "x", "y", numerics="nemo")
    return b.graph("y")


def test_the_first_engine_that_can_takes_a_node():
    graph = forward(fold="auto").graph("o")
    for engines, want in ((None, "torch"), (("torch",), "torch"), (("reference",), "reference")):
        plan = lower(graph, Device(), engines).plan
        assert {step.engine for step in plan.steps} == {want}
    plan = lower(graph, Device(), ("reference", "torch")).plan
    assert {step.engine for step in plan.steps} == {"reference"}, "in the order asked for"


@pytest.mark.parametrize("engines", [("reference",), ("cuda.rope", "reference")])
def test_every_rule_of_every_engine_is_listed(engines: Any):
    with pytest.raises(UnsupportedError) as caught:
        lower(bit_exact(), Device(), engines)
    message, reasons = str(caught.value), caught.value.reasons
    assert message.startswith("no engine can run rope 'turn' (fp32) on cpu:\n")
    assert "numerics='nemo'" in reasons["reference"][0]
    assert reasons["torch"] == (f"left out by engines={engines}",)
    for engine, rules in reasons.items():
        for rule in rules:
            assert f"{engine:<16} {rule}" in message


def test_the_message_says_what_an_attention_is():
    with pytest.raises(
        UnsupportedError, match=r"sdpa_backward 'attn' \(fp32, d_qk=8, d_v=4\) on cpu"
    ):
        lower(with_dropout_of("cudnn.sdpa"), Device(), None)


def with_dropout_of(engine: str) -> Graph:
    """A backward whose forward drew its mask on an engine that is not here."""
    f = rotated(fold="off")
    f.sdpa("attn", "q_rot", "k_rot", "v", attn_scale=1.0, dropout_p=0.5)
    made = pipeline.contract_of(pipeline.run(f.graph("o")), {"attn": engine})
    b = backward(1.0, fold="auto", contract=FoldContract(made.entries))
    b.nodes[0] = b.nodes[0].with_attrs(dropout_p=0.5)
    return b.graph("dq", "dk", "dv")


def test_dropout_runs_where_the_forward_drew_its_mask():
    plan = lower(with_dropout_of("torch"), Device(), ("reference", "torch")).plan
    assert [step.engine for step in plan.steps] == ["torch", "reference"]
    with pytest.raises(UnsupportedError) as caught:
        lower(with_dropout_of("cudnn.sdpa"), Device(), None)
    assert caught.value.reasons["torch"] == ("the forward drew its dropout mask on 'cudnn.sdpa'",)


def test_an_engine_that_does_not_exist():
    with pytest.raises(GraphError, match="'cudnn' is no engine; use"):
        lower(bit_exact(), Device(), ("cudnn",))


# The workspace


def chain(n: int) -> Graph:
    b = Build()
    name = b.tensor("x0", 1, 1, 1, 100)
    for i in range(n):
        name = b.sum(f"s{i}", [name, name], f"x{i + 1}")
    return b.graph(name)


@pytest.mark.parametrize(("n", "values"), [(1, 0), (2, 1), (3, 2), (8, 2)])
def test_memory_is_used_again_after_the_last_use(n: int, values: int):
    """A chain needs room for one value and the one made from it, however long it is."""
    plan = lower(chain(n), Device(), None).plan
    assert plan.workspace_bytes == values * 2 * ALIGNMENT
    assert all(start % ALIGNMENT == 0 for start in plan.workspace.values())


def test_values_alive_at_once_do_not_overlap():
    b = Build()
    b.tensor("x", 1, 1, 1, 100)
    names = [b.sum(f"s{i}", ["x", "x"], f"y{i}") for i in range(5)]
    b.sum("all", names, "z")
    plan = lower(b.graph("z"), Device(), None).plan
    starts = sorted(plan.workspace[name] for name in names)
    assert starts == [i * 2 * ALIGNMENT for i in range(5)]
    assert plan.workspace_bytes == 5 * 2 * ALIGNMENT


def test_an_output_that_nobody_reads_still_has_a_place():
    """O of an attention whose Stats alone are bound."""
    b = rotated()
    b.sdpa("attn", "q_rot", "k_rot", "v", stats="stats")
    plan = lower(b.graph("stats"), Device(), None).plan
    assert "o" in plan.workspace
    assert "o" not in plan.graph.outputs
