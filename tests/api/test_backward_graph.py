"""backward_graph: what it derives and names, what it needs, and what has no gradient."""

from typing import Any

import pytest
import torch

import ropegraph
from ropegraph import FoldContractError, GraphError
from tests.api.graphs import F64, X, attention, buffers, new, rotation


def test_names_and_what_is_needed():
    g = attention()
    b = g.backward_graph(["o"], ["q", "v"])
    assert b.saved == ["q_rot", "k_rot", "v", "o", "stats", "f"]
    assert set(b.plan.graph.outputs) == {"dq", "dv"}
    assert set(b.plan.graph.inputs) == {"do", *b.saved}
    assert set(g.plan.graph.saved) == {"q_rot", "k_rot"}


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (["o"], ["q"]),
        ("o", "q"),
        (["o", "o"], ["q", "q"]),
        ("handle", "handle"),
    ],
)
def test_tensors_or_names_once_or_repeated(outputs: Any, inputs: Any):
    g = attention()
    if outputs == "handle":
        outputs, inputs = [g.find_tensor("o")], g.find_tensor("q")
    b = g.backward_graph(outputs, inputs)
    assert [n for n in b.plan.graph.inputs if n == "do"] == ["do"]
    assert b.plan.graph.outputs == ("dq",)
    b.execute(buffers(b))


BAD: dict[str, tuple[Any, Any, str]] = {
    "no output": ([], ["q"], "give at least one output and one input"),
    "no input": (["o"], [], "give at least one output and one input"),
    "an unknown name": (
        ["o"],
        ["Q"],
        "'Q' names no tensor (did you mean 'q'?); the names are f, k, k_rot, o, q",
    ),
    "a number": ([5], ["q"], "outputs: 5 is no tensor of this graph"),
    "another graph": (["o"], [attention().find_tensor("q")], "inputs: Tensor('q'"),
    "an input as output": (["q"], ["q"], "output 'q' is an input of the graph"),
    "the output itself": (["o"], ["o"], "'o' is an output itself; its gradient is given"),
    "no dependence": (["q_rot"], ["v"], "the outputs do not depend on 'v'"),
    "stats": (["stats"], ["q"], "Stats of sdpa 'attn' has no gradient; ask for O only"),
    "both": (["o", "stats"], ["q"], "Stats of sdpa 'attn' has no gradient; ask for O only"),
}


@pytest.mark.parametrize(("outputs", "inputs", "text"), BAD.values(), ids=BAD)
def test_what_cannot_be_asked_for(outputs: Any, inputs: Any, text: str):
    with pytest.raises(GraphError) as caught:
        attention().backward_graph(outputs, inputs)
    assert text in str(caught.value)


def padded(**options: Any) -> ropegraph.pygraph:
    g = new()
    q = g.tensor((2, 2, 3, 8), name="q")
    names = ("seq_len_q", "seq_len_kv")
    lengths = {n: g.tensor((2, 1, 1, 1), data_type=torch.int32, name=n) for n in names}
    o, _ = g.sdpa(q, q, q, use_padding_mask=True, name="attn", **lengths, **options)
    o.set_output(True).set_name("o")
    return g


def test_inputs_that_have_no_gradient():
    with pytest.raises(GraphError, match="sdpa 'attn': seq_len_q 'seq_len_q' has no gradient; inp"):
        padded().backward_graph(["o"], ["seq_len_q"])
    g = new()
    q, a = g.tensor((1, 2, 3, 8), name="q"), g.tensor((1, 1, 1, 1), name="a")
    g.sdpa(q, q, q, attn_scale=a, name="attn")[0].set_output(True).set_name("o")
    with pytest.raises(
        GraphError, match="attn_scale 'a' has no gradient; inputs that have one are"
    ):
        g.backward_graph(["o"], ["a"])


def test_pages_have_no_gradient():
    g = new()
    q, pool = g.tensor((2, 2, 3, 8), name="q"), g.tensor((6, 2, 4, 8), name="pool")
    tables = {f"paged_attention_{n}_table": g.tensor((2, 1, 2, 1), data_type=torch.int32)
              for n in "kv"}  # fmt: skip
    o, _ = g.sdpa(q, pool, pool, paged_attention_max_seq_len_kv=8, name="attn", **tables)
    o.set_output(True).set_name("o")
    with pytest.raises(GraphError, match="sdpa 'attn' reads paged k and v, which have no gradient"):
        g.backward_graph(["o"], ["q"])


def test_a_second_derivative():
    b = attention().backward_graph(["o"], ["q"])
    with pytest.raises(GraphError, match="has no gradient of its own; derive from a forward graph"):
        b.backward_graph(["dq"], ["do"])


def test_stats_are_needed():
    with pytest.raises(
        GraphError, match="sdpa 'attn' gives no Stats; record it with generate_stat"
    ):
        attention(generate_stats=False).backward_graph(["o"], ["q"])


def test_stats_of_another_attention_are_not_needed():
    g = attention()
    given = [g.find_tensor(n) for n in ("q_rot", "k_rot", "v")]
    g.sdpa(*given, generate_stats=False, attn_scale=0.3, name="other")[0].set_output(True)
    b = g.backward_graph(["o"], ["q"])
    assert [s.name for s in b.plan.steps] == ["attn_backward", "rope_q_backward"]


def test_a_forward_that_is_built_must_export_what_is_needed():
    g = attention()
    g.build()
    with pytest.raises(
        GraphError, match="is built and does not export 'q_rot', 'k_rot'; call back"
    ):
        g.backward_graph(["o"], ["q"])
    g = attention()
    for name in ("q_rot", "k_rot"):
        g.find_tensor(name).set_saved(True)
    g.build()
    assert set(g.backward_graph(["o"], ["q"]).plan.graph.outputs) == {"dq"}


def test_the_gradient_of_a_rotated_tensor_itself():
    """Folded or not, dq_rot is the gradient of what the unfolded graph calls q_rot."""

    def gradient(fold: str) -> torch.Tensor:
        g = attention(settings={"fold": fold, "io_data_type": F64})
        b = g.backward_graph(["o"], ["q_rot"])
        pack = buffers(g)
        g.execute(pack)
        grads = buffers(b)
        grads |= {n: pack[n] for n in b.plan.graph.inputs if n in pack}
        b.execute(grads)
        return grads["dq_rot"]

    for fold in ("auto", "q", "symmetric"):
        torch.testing.assert_close(gradient(fold), gradient("off"), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inputs", [["x"], ["f"], ["x", "f"]])
def test_the_gradient_of_angles_only_when_asked_for(inputs: list[str]):
    g = rotation()
    b = g.backward_graph(["y"], inputs)
    assert set(b.plan.graph.outputs) == {f"d{n}" for n in inputs}
    assert b.saved == (["f", "x"] if "f" in inputs else ["f"])
    with_gradient = buffers(b)
    b.execute(with_gradient)
    assert not any(bool(with_gradient[f"d{n}"].isnan().any()) for n in inputs)


def test_angles_of_ragged_inputs_have_none():
    g = new()
    at = g.tensor((3, 1, 1, 1), data_type=torch.int32, name="at")
    x = g.tensor(X, ragged_offset=at, name="x")
    g.rope(x, g.tensor((5, 1, 1, 8), name="f"), name="turn").set_output(True).set_name("y")
    with pytest.raises(GraphError, match="rope 'turn': freqs has no gradient for a ragged input"):
        g.backward_graph(["y"], ["f"])


def test_a_backward_made_by_hand_from_a_folded_forward_needs_the_contract():
    g = attention(settings={"fold": "q"})
    t = attention(settings={"fold": "q"})
    assert g.fold_contract == t.fold_contract
    b = new(fold="q")
    dims = {"q": (2, 6, 5, 8), "k": (2, 2, 7, 8), "v": (2, 3, 7, 4), "o": (2, 6, 5, 4)}
    given = {n: b.tensor(d, name=n) for n, d in dims.items()}
    given |= {"dO": b.tensor(dims["o"]), "stats": b.tensor((2, 6, 5, 1))}
    b.sdpa_backward(**given, attn_scale=0.3, name="attn")[0].set_output(True)
    with pytest.raises(FoldContractError, match="needs the forward's contract; pass fold_contract"):
        b.build()
