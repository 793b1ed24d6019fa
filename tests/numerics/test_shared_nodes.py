"""C32: what else reads a rotated tensor, or sees it, decides whether a scale may move into it."""

from collections.abc import Callable

import pytest
import torch

import ropegraph
from ropegraph.passes import pipeline
from ropegraph.testing import oracle
from ropegraph.testing.budget import assert_within, relative
from ropegraph.testing.inputs import normal
from tests.numerics.attention import FOLDS, execute, scales

F64 = torch.float64
DIM = (2, 2, 5, 4)
EXPLICIT = tuple(f for f in FOLDS if f[0] in ("q", "symmetric"))

Graph = ropegraph.pygraph
Tensors = dict[str, ropegraph.tensor]


def inputs() -> dict[str, torch.Tensor]:
    found = {name: normal(DIM, F64, seed=i) for i, name in enumerate("qkv")}
    return found | {"freqs": oracle.angles(5, 4).reshape(5, 1, 1, 2)}


def turned(name: str, output_scale: float = 1.0) -> torch.Tensor:
    return oracle.rope(inputs()[name], oracle.angles(5, 4), output_scale=output_scale)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_scale: float) -> torch.Tensor:
    return oracle.attention(q, k, v, attn_scale=attn_scale)[0]


def run(
    build: Callable[[Graph, Tensors], dict[str, ropegraph.tensor]], fold: str, log2: bool
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph that ``build`` records, and its outputs by the names that it returns."""
    given = inputs()
    g = Graph(io_data_type=F64, fold=fold, fold_log2=log2)
    for name, tensor in build(g, {n: g.tensor_like(x, name=n) for n, x in given.items()}).items():
        tensor.set_output(True).set_name(name)
    got = execute(g, given)
    final = g.plan.graph
    assert pipeline.run(final)[-1].graph == final
    return g, got


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, x in want.items():
        assert_within(got[name], x, relative(x, 1e-12), name)


def rope(g: Graph, t: Tensors, name: str, output_scale: float = 1.0) -> ropegraph.tensor:
    return g.rope(t[name], t["freqs"], output_scale, half_width=True, name=f"rope_{name}")


def reasons(g: Graph, node: str = "attn") -> str:
    return "; ".join(d.text for d in g.fold_decisions if d.node == node and not d.applied)


def visible_q(g: Graph, t: Tensors) -> dict[str, ropegraph.tensor]:
    q = rope(g, t, "q")
    o, _ = g.sdpa(q, rope(g, t, "k"), t["v"], 0.5, name="attn")
    return {"o": o, "q_rot": q}


@pytest.mark.parametrize("log2", [False, True])
def test_auto_leaves_a_visible_q_alone(log2):
    g, got = run(visible_q, "auto", log2)
    q, k, v = turned("q"), turned("k"), inputs()["v"]
    check(got, {"o": attend(q, k, v, 0.5), "q_rot": q})
    assert scales(g)["attn"] == (0.5, False)
    assert "'q_rot' is a visible output" in reasons(g)


@pytest.mark.parametrize(("fold", "log2"), EXPLICIT)
def test_an_explicit_fold_scales_a_visible_q_and_nothing_else(fold, log2):
    g, got = run(visible_q, fold, log2)
    factor = scales(g)["rope_q"]
    assert factor != 1.0
    q, k, v = turned("q"), turned("k"), inputs()["v"]
    check(got, {"o": attend(q, k, v, 0.5), "q_rot": factor * q})


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("second", [0.5, 0.25])
def test_two_attentions_fold_together_or_not_at_all(fold, log2, second):
    def build(g: Graph, t: Tensors) -> dict[str, ropegraph.tensor]:
        q, k = rope(g, t, "q"), rope(g, t, "k")
        o1, _ = g.sdpa(q, k, t["v"], 0.5, name="attn")
        o2, _ = g.sdpa(q, k, t["v"], second, use_causal_mask=True, name="attn2")
        return {"o1": o1, "o2": o2}

    g, got = run(build, fold, log2)
    q, k, v = turned("q"), turned("k"), inputs()["v"]
    causal = oracle.attention(q, k, v, attn_scale=second, keep=oracle.band(5, 5, right=0))[0]
    check(got, {"o1": attend(q, k, v, 0.5), "o2": causal})
    found = scales(g)
    if fold == "off" or second != 0.5:
        assert (found["attn"], found["attn2"]) == ((0.5, False), (second, False))
        assert (found["rope_q"], found["rope_k"]) == (1.0, 1.0)
    else:
        assert found["attn"] == found["attn2"] == (1.0, log2)
    if fold != "off" and second != 0.5:
        assert "with another attn_scale" in reasons(g)


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_a_shared_k_ties_nothing_unless_it_is_scaled(fold, log2):
    def build(g: Graph, t: Tensors) -> dict[str, ropegraph.tensor]:
        k = rope(g, t, "k")
        o1, _ = g.sdpa(rope(g, t, "q"), k, t["v"], 0.5, name="attn")
        other = g.rope(t["v"], t["freqs"], half_width=True, name="rope_other")
        o2, _ = g.sdpa(other, k, t["v"], 0.25, name="attn2")
        return {"o1": o1, "o2": o2}

    g, got = run(build, fold, log2)
    q, k, v = turned("q"), turned("k"), inputs()["v"]
    check(got, {"o1": attend(q, k, v, 0.5), "o2": attend(turned("v"), k, v, 0.25)})
    folds = fold in ("q", "auto")
    assert scales(g)["attn"] == ((1.0, log2) if folds else (0.5, False))
    assert scales(g)["attn2"] == ((1.0, log2) if folds else (0.25, False))


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("also", ["k", "v", "both"])
def test_a_tensor_in_two_roles_is_left_alone(fold, log2, also):
    def build(g: Graph, t: Tensors) -> dict[str, ropegraph.tensor]:
        q = rope(g, t, "q")
        k = q if also in ("k", "both") else rope(g, t, "k")
        o, _ = g.sdpa(q, k, q if also in ("v", "both") else t["v"], 0.5, name="attn")
        return {"o": o}

    g, got = run(build, fold, log2)
    q = turned("q")
    k = q if also in ("k", "both") else turned("k")
    v = q if also in ("v", "both") else inputs()["v"]
    check(got, {"o": attend(q, k, v, 0.5)})
    assert scales(g)["attn"] == (0.5, False)
    if fold != "off":
        roles = {"k": "q and k", "v": "q and v", "both": "q and k and v"}[also]
        assert f"is {roles} of 'attn'" in reasons(g)


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("reader", ["scale", "rope", "v of another"])
def test_a_q_that_something_else_reads_is_left_alone(fold, log2, reader):
    def build(g: Graph, t: Tensors) -> dict[str, ropegraph.tensor]:
        q, k = rope(g, t, "q"), rope(g, t, "k")
        o, _ = g.sdpa(q, k, t["v"], 0.5, name="attn")
        if reader == "scale":
            other = g.scale(q, 3.0)
        elif reader == "rope":
            other = g.rope(q, t["freqs"], half_width=True)
        else:
            other = g.sdpa(t["q"], t["k"], q, 0.5, name="attn2")[0]
        return {"o": o, "other": other}

    g, got = run(build, fold, log2)
    q, k, given = turned("q"), turned("k"), inputs()
    want = {
        "scale": 3.0 * q,
        "rope": oracle.rope(q, oracle.angles(5, 4)),
        "v of another": attend(given["q"], given["k"], q, 0.5),
    }
    check(got, {"o": attend(q, k, given["v"], 0.5), "other": want[reader]})
    assert scales(g)["attn"] == (0.5, False)


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("side", ["q", "k"])
def test_an_input_of_the_graph_cannot_carry_a_scale(fold, log2, side):
    def build(g: Graph, t: Tensors) -> dict[str, ropegraph.tensor]:
        q, k = (t[n] if n == side else rope(g, t, n) for n in "qk")
        o, _ = g.sdpa(q, k, t["v"], 0.5, name="attn")
        return {"o": o}

    g, got = run(build, fold, log2)
    q, k = (inputs()[n] if n == side else turned(n) for n in "qk")
    check(got, {"o": attend(q, k, inputs()["v"], 0.5)})
    # A plain K does not matter to a fold of Q alone.
    is_free = side == "k" and fold in ("q", "auto")
    assert scales(g)["attn"] == ((1.0, log2) if is_free else (0.5, False))
    if fold != "off" and not is_free:
        assert f"{side!r} is an input of the graph" in reasons(g)


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
def test_a_scale_of_the_users_own_multiplies(fold, log2):
    def build(g: Graph, t: Tensors) -> dict[str, ropegraph.tensor]:
        q, k = rope(g, t, "q", 3.0), rope(g, t, "k", -0.5)
        o, _ = g.sdpa(q, k, t["v"], 0.5, name="attn")
        return {"o": o}

    _, got = run(build, fold, log2)
    check(got, {"o": attend(turned("q", 3.0), turned("k", -0.5), inputs()["v"], 0.5)})
    _, plain = run(build, "off", log2=False)
    assert_within(got["o"], plain["o"], relative(plain["o"], 1e-12), "o")


@pytest.mark.parametrize(("fold", "log2"), FOLDS)
@pytest.mark.parametrize("wanted", ["q_rot", "k_rot"])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("is_visible", [False, True])
def test_the_gradient_of_a_rotated_tensor_does_not_show_the_fold(
    fold, log2, wanted, alone, is_visible
):
    given = inputs()
    g = Graph(io_data_type=F64, fold=fold, fold_log2=log2)
    t = {n: g.tensor_like(x, name=n) for n, x in given.items()}
    q, k = (rope(g, t, n).set_output(is_visible).set_name(f"{n}_rot") for n in "qk")
    o, _ = g.sdpa(q, k, t["v"], 0.5, name="attn")
    o.set_output(True).set_name("o")
    backward = g.backward_graph(["o"], [wanted] if alone else ["q", "k", "v", wanted])
    given["do"] = normal(DIM, F64, seed=9)
    got = execute(g, given)
    got |= execute(backward, given | got)
    leaves = {"q_rot": oracle.leaf(turned("q")), "k_rot": oracle.leaf(turned("k"))}
    want = attend(leaves["q_rot"], leaves["k_rot"], given["v"], 0.5)
    (grad,) = oracle.gradients(want, [leaves[wanted]], given["do"])
    assert_within(got[f"d{wanted}"], grad, relative(grad, 1e-12), wanted)
