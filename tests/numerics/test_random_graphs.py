"""Properties of random graphs: no fold changes what the caller sees, and gradients are exact."""

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ropegraph.passes import pipeline
from ropegraph.testing.budget import assert_within
from tests.numerics.attention import FOLDS, execute
from tests.numerics.random_graphs import Problem, problems, read_by_attention, seen
from tests.numerics.random_runs import data, evaluate, record

ENGINES = st.sampled_from(["torch", "reference"])
QUICK = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)


def near(want: torch.Tensor, tolerance: float) -> float:
    """An absolute error: gradients may be sums that cancel to nearly nothing."""
    finite = torch.where(torch.isfinite(want), want.double().abs(), 0.0)
    return tolerance * (1.0 + (float(finite.max()) if finite.numel() else 0.0))


@QUICK
@given(problems(), st.sampled_from(FOLDS[1:]), ENGINES)
def test_no_fold_changes_a_visible_value(problem: Problem, setting, engine):
    fold, log2 = setting
    inputs = data(problem)
    plain = execute(record(problem, inputs, fold="off", engines=engine), inputs)
    graph = record(problem, inputs, fold=fold, fold_log2=log2, engines=engine)
    folded = execute(graph, inputs)
    # An explicit fold may scale a Q_rot or K_rot that the caller bound, and nothing else.
    may_change = seen(problem) if fold != "auto" else set[str]()
    assert set(folded) == set(plain)
    for name in sorted(set(plain) - may_change):
        assert_within(folded[name], plain[name], near(plain[name], 1e-12), name)
    once = graph.plan.graph
    assert pipeline.run(once)[-1].graph == once


@QUICK
@given(problems(), st.sampled_from(FOLDS), ENGINES, st.integers(0, 3))
def test_gradients_are_those_of_autograd(problem: Problem, setting, engine, extra: int):
    fold, log2 = setting
    inputs = data(problem)
    graph = record(problem, inputs, fold=fold, fold_log2=log2, engines=engine)
    # Sometimes also, or only, of what the attentions read, where a fold may have put a scale.
    inner = read_by_attention(problem) if extra >= 2 else []
    asked = inner if extra == 3 and inner else [*problem.leaves, *inner]
    backward = graph.backward_graph(problem.outputs, asked)
    results = execute(graph, inputs)
    gradients = execute(backward, {**inputs, **results})
    assert set(gradients) == {f"d{name}" for name in asked}
    want = evaluate(problem, inputs)
    for name in (*problem.outputs, *gradients):
        got = (results | gradients)[name]
        assert_within(got, want[name], near(want[name], 1e-11), name)
    # The contract is about the graph as recorded; what it asked for is done.
    once = replace(backward.plan.graph, contract=None)
    assert pipeline.run(once)[-1].graph == once


@QUICK
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), ENGINES)
def test_narrow_types_only_round(draw, dtype: torch.dtype, engine):
    problem = draw.draw(problems(dtype))
    inputs = data(problem)
    want = evaluate(problem, inputs)
    # Logits may reach 20 before the softmax: what they round by is multiplied by that.
    tolerance = 50 * torch.finfo(dtype).eps
    for fold, log2 in (("off", False), ("auto", True)):
        graph = record(problem, inputs, fold=fold, fold_log2=log2, engines=engine)
        got = execute(graph, inputs)
        for name in problem.outputs:
            assert got[name].dtype == dtype
            assert_within(got[name], want[name], near(want[name], tolerance), name)
