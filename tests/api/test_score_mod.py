"""score_mod: a callback traced once, with FE's pointwise names and keywords."""

from collections.abc import Callable
from math import exp, inf, nan
from typing import Any

import pytest
import torch

import ropegraph
from ropegraph import GraphError
from ropegraph.ir.score_mod import BINARY, INDEX, TERNARY, UNARY
from tests.api.graphs import F32, F64, new, run

Callback = Callable[[Any, Any], Any]
SCORES = torch.tensor([-2.5, -1.0, -0.25, 0.0, 0.75, 1.0, 3.0], dtype=F64)


def scored(callback: Callback, scores: torch.Tensor = SCORES, **given: torch.Tensor) -> list[float]:
    """What the callback makes of each score: with one key, Stats is the score itself."""
    n = len(scores)
    g = new(io_data_type=F64)
    q, k = g.tensor((1, 1, n, 1), name="q"), g.tensor((1, 1, 1, 1), name="k")
    t = {name: g.tensor_like(x, name=name) for name, x in given.items()}
    made = g.sdpa(q, k, k, score_mod=lambda graph, s: callback(graph, s, **t), name="attn")
    made[1].set_output(True).set_name("stats")
    pack = {"q": scores.reshape(1, 1, n, 1), "k": torch.ones(1, 1, 1, 1, dtype=F64), **given}
    stats = torch.full((1, 1, n, 1), nan, dtype=F64)
    g.execute({**pack, "stats": stats})
    return stats.reshape(-1).tolist()


POSITIVE = SCORES.abs() + 0.5
OPS: dict[str, tuple[Callback, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "neg": (lambda g, s: g.neg(s), torch.neg, SCORES),
    "exp": (lambda g, s: g.exp(s), torch.exp, SCORES),
    "log": (lambda g, s: g.log(s), torch.log, POSITIVE),
    "tanh": (lambda g, s: g.tanh(s), torch.tanh, SCORES),
    "sigmoid": (lambda g, s: g.sigmoid(s), torch.sigmoid, SCORES),
    "abs": (lambda g, s: g.abs(s), torch.abs, SCORES),
    "sqrt": (lambda g, s: g.sqrt(s), torch.sqrt, POSITIVE),
    "rsqrt": (lambda g, s: g.rsqrt(s), torch.rsqrt, POSITIVE),
    "reciprocal": (lambda g, s: g.reciprocal(s), torch.reciprocal, POSITIVE),
    "relu": (lambda g, s: g.relu(s), torch.relu, SCORES),
    "sin": (lambda g, s: g.sin(s), torch.sin, SCORES),
    "cos": (lambda g, s: g.cos(s), torch.cos, SCORES),
    "floor": (lambda g, s: g.floor(s), torch.floor, SCORES),
    "ceil": (lambda g, s: g.ceil(s), torch.ceil, SCORES),
    "identity": (lambda g, s: g.identity(s), lambda x: x, SCORES),
    "logical_not": (lambda g, s: g.logical_not(s), lambda x: (x == 0).double(), SCORES),
    "add": (lambda g, s: g.add(s, 2.0), lambda x: x + 2, SCORES),
    "sub": (lambda g, s: g.sub(s, 2.0), lambda x: x - 2, SCORES),
    "mul": (lambda g, s: g.mul(s, s), lambda x: x * x, SCORES),
    "div": (lambda g, s: g.div(1.0, s), lambda x: 1 / x, POSITIVE),
    "max": (lambda g, s: g.max(s, 0.5), lambda x: x.clamp(min=0.5), SCORES),
    "min": (lambda g, s: g.min(s, 0.5), lambda x: x.clamp(max=0.5), SCORES),
    "pow": (lambda g, s: g.pow(s, 1.5), lambda x: x**1.5, POSITIVE),
    "mod": (lambda g, s: g.mod(s, 2.0), lambda x: torch.fmod(x, 2), SCORES),
    "cmp_eq": (lambda g, s: g.cmp_eq(s, 1.0), lambda x: (x == 1).double(), SCORES),
    "cmp_neq": (lambda g, s: g.cmp_neq(s, 1.0), lambda x: (x != 1).double(), SCORES),
    "cmp_gt": (lambda g, s: g.cmp_gt(s, 1.0), lambda x: (x > 1).double(), SCORES),
    "cmp_ge": (lambda g, s: g.cmp_ge(s, 1.0), lambda x: (x >= 1).double(), SCORES),
    "cmp_lt": (lambda g, s: g.cmp_lt(s, 1.0), lambda x: (x < 1).double(), SCORES),
    "cmp_le": (lambda g, s: g.cmp_le(s, 1.0), lambda x: (x <= 1).double(), SCORES),
    "logical_and": (
        lambda g, s: g.logical_and(g.cmp_gt(s, -1.0), g.cmp_lt(s, 1.0)),
        lambda x: ((x > -1) & (x < 1)).double(),
        SCORES,
    ),
    "logical_or": (
        lambda g, s: g.logical_or(g.cmp_le(s, -1.0), g.cmp_ge(s, 1.0)),
        lambda x: ((x <= -1) | (x >= 1)).double(),
        SCORES,
    ),
    "binary_select": (
        lambda g, s: g.binary_select(s, -7.0, g.cmp_gt(s, 0.0)),
        lambda x: torch.where(x > 0, x, -7.0),
        SCORES,
    ),
    "gen_index": (
        lambda g, s: g.add(s, g.gen_index(s, axis=2)),
        lambda x: x + torch.arange(len(x)),
        SCORES,
    ),
}


def test_every_name_is_tried():
    assert set(OPS) == {*UNARY, *BINARY, *TERNARY, *INDEX}


@pytest.mark.parametrize(("callback", "want", "scores"), OPS.values(), ids=OPS)
def test_every_operation(callback: Callback, want: Any, scores: torch.Tensor):
    assert scored(callback, scores) == pytest.approx(want(scores).tolist(), rel=1e-14, abs=1e-15)


@pytest.mark.parametrize(
    ("callback", "want"),
    [
        # the order of keywords does not count, their names do
        (lambda g, s: g.sub(b=5.0, a=s), SCORES - 5),
        (lambda g, s: g.sub(a=5.0, b=s), 5 - SCORES),
        (lambda g, s: g.sub(5.0, b=s), 5 - SCORES),
        (lambda g, s: g.cmp_gt(comparison=0.0, input=s), (SCORES > 0).double()),
        (lambda g, s: g.max(input1=s, input0=0.0), SCORES.clamp(min=0)),
        (
            lambda g, s: g.binary_select(mask=g.cmp_gt(s, 0.0), input1=-1.0, input0=s),
            torch.where(SCORES > 0, SCORES, -1.0),
        ),
        (lambda g, s: g.neg(input=s, name="n", compute_data_type=torch.float32), -SCORES),
        (lambda g, s: g.relu(s, lower_clip=None), SCORES.relu()),
        (lambda g, s: s, SCORES),
        (lambda g, s: g.mul(s, 1).set_data_type(F32).set_name("x").set_output(False), SCORES),
        (lambda g, s: g.gen_index(s, 2), torch.arange(7.0)),
        (lambda g, s: g.add(s, float(s.get_dim()[2])), SCORES + 7),
    ],
)
def test_operands(callback: Callback, want: torch.Tensor):
    assert scored(callback) == pytest.approx(want.tolist(), rel=1e-15)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 7, 1)])
def test_tensors_from_outside(shape: tuple[int, ...]):
    table = torch.rand(shape, dtype=F64)
    got = scored(lambda g, s, table: g.mul(g.add(s, table), table), table=table)
    assert got == pytest.approx(((SCORES + table.reshape(-1)) * table.reshape(-1)).tolist())


def test_a_framework_tensor_is_captured():
    table = torch.rand(1, 1, 7, 1, dtype=F64)
    assert scored(lambda g, s: g.add(s, table)) == pytest.approx(
        (SCORES + table.reshape(-1)).tolist()
    )


def attention(callback: Any, **options: Any) -> ropegraph.pygraph:
    g = new()
    q = g.tensor((1, 2, 3, 8), name="q")
    o, _ = g.sdpa(q, q, q, score_mod=callback, name="attn", **options)
    o.set_output(True).set_name("o")
    return g


BAD: dict[str, tuple[Any, str]] = {
    "unknown op": (lambda g, s: g.matmul(s, s), "score_mod calls 'matmul', which is none of neg"),
    "too few": (lambda g, s: g.add(s), "score_mod add takes a, b, once each; got 1 by position"),
    "too many": (lambda g, s: g.neg(s, s), "score_mod neg takes input, once each; got 2"),
    "too many of three": (lambda g, s: g.binary_select(s, s, s, s), "input0, input1, mask, once"),
    "twice": (lambda g, s: g.add(s, a=s), "once each; got 1 by position and ['a'] by name"),
    "another name": (lambda g, s: g.add(x=s, y=s), "and ['x', 'y'] by name"),
    "one name more": (lambda g, s: g.add(s, s, alpha=2), "add: alpha=2 is no argument"),
    "relu with a clip": (lambda g, s: g.relu(s, upper_clip=6.0), "upper_clip=6.0 is not supported"),
    "axis": (lambda g, s: g.gen_index(s, axis=4), "gen_index axis=4; use 0 to 3"),
    "negative axis": (lambda g, s: g.gen_index(s, axis=-1), "gen_index axis=-1; use 0 or more"),
    "a word": (lambda g, s: g.add(s, "1"), "score_mod add operand='1' is not a tensor"),
    "a flag": (lambda g, s: g.add(s, True), "score_mod add operand=True is not a tensor"),
    "NaN": (lambda g, s: g.add(s, nan), "score_mod add operand=nan is not finite"),
    "nothing": (lambda g, s: None, "score_mod returned None; return a value computed from"),
    "a number": (lambda g, s: 5.0, "score_mod returned 5.0"),
    "an output": (lambda g, s: g.neg(s).set_output(True), "value inside the callback cannot be an"),
    "a tensor of another shape": (
        lambda g, s: g.add(s, torch.ones(1, 3, 3, 3)),
        "operand [1, 3, 3, 3] does not broadcast to the scores [1, 2, 3, 3]",
    ),
    "a tensor of rank 1": (lambda g, s: g.add(s, torch.ones(3)), "operand [3] does not broadcast"),
    "no function": ("tanh", "score_mod='tanh' is no function of (graph, scores)"),
}


@pytest.mark.parametrize(("callback", "text"), BAD.values(), ids=BAD)
def test_a_callback_that_cannot_be_traced(callback: Any, text: str):
    with pytest.raises(GraphError, match=r"^sdpa 'attn': ") as caught:
        attention(callback)
    assert text in str(caught.value)


def test_values_do_not_leave_their_callback():
    kept: list[Any] = []
    attention(lambda g, s: kept.append(g.neg(s)) or s)
    with pytest.raises(GraphError, match="score_mod add reads a value of another callback"):
        attention(lambda g, s: g.add(s, kept[0]))
    with pytest.raises(GraphError, match="score_mod returned"):
        attention(lambda g, s: kept[0])


def test_a_callback_is_called_once():
    calls: list[int] = []

    def callback(g: Any, s: Any) -> Any:
        calls.append(1)
        return g.tanh(s)

    g = attention(callback)
    g.backward_graph(["o"], ["q"]).build()
    for _ in range(3):
        run(g)
    assert calls == [1]


def test_an_error_of_the_callback_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        attention(lambda g, s: 1 / 0)


def test_the_key_knows_what_was_traced_and_not_who_traced_it():
    """C35: two callables both named <lambda>."""
    first = attention(lambda g, s: g.mul(s, 2.0)).key
    assert attention(lambda g, s: g.mul(s, 2.0)).key == first
    assert attention(lambda g, s: g.mul(s, 2.5)).key != first
    assert attention(lambda g, s: g.add(s, 2.0)).key != first
    assert attention(lambda g, s: g.mul(2.0, s)).key != first
    cap = attention(None, softcap=3.0).key
    assert cap == attention(lambda g, s: g.mul(g.tanh(g.div(s, 3.0)), 3.0)).key
    assert cap != attention(None, softcap=3.5).key


def test_the_order_on_the_logits():
    """C27: scale, then score_mod, then bias and masks: neither scale nor cap touches the bias."""
    g = new(io_data_type=F64)
    q, k = g.tensor((1, 1, 1, 1), name="q"), g.tensor((1, 1, 2, 1), name="k")
    v, bias = g.tensor((1, 1, 2, 1), name="v"), g.tensor((1, 1, 1, 2), name="bias")
    o, _ = g.sdpa(q, k, v, attn_scale=0.5, bias=bias, score_mod=lambda g, s: g.mul(s, 3.0))
    o.set_output(True).set_name("o")
    got = run(
        g,
        q=torch.ones(1, 1, 1, 1, dtype=F64),
        k=torch.tensor([0.0, 0.4], dtype=F64).reshape(1, 1, 2, 1),
        v=torch.tensor([0.0, 1.0], dtype=F64).reshape(1, 1, 2, 1),
        bias=torch.tensor([0.0, 1.0], dtype=F64).reshape(1, 1, 1, 2),
    )["o"].item()
    assert got == pytest.approx(1 / (1 + exp(-(0.4 * 0.5 * 3 + 1))), rel=1e-14)


def test_infinity_as_a_mask():
    got = scored(lambda g, s: g.binary_select(s, -inf, g.cmp_gt(s, 0.0)))
    want = [x if x > 0 else -inf for x in SCORES.tolist()]
    assert got == pytest.approx(want, rel=1e-15)


def test_a_program_survives_serialization():
    table = torch.rand(1, 2, 3, 1)

    def graph() -> ropegraph.pygraph:
        g = new()
        q = g.tensor((1, 2, 3, 8), name="q")
        t = g.tensor((1, 2, 3, 1), name="table")
        callback = lambda g, s: g.add(g.tanh(s), g.mul(t, g.gen_index(s, axis=3)))  # noqa: E731
        g.sdpa(q, q, q, score_mod=callback, name="attn")[0].set_output(True).set_name("o")
        return g

    back = ropegraph.pygraph().deserialize(graph().serialize())
    assert back.key == graph().key
    assert torch.equal(run(back, table=table)["o"], run(graph(), table=table)["o"])
