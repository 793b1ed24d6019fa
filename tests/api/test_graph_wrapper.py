"""Graph, the context manager, and FE's helpers graph, jit and graph_cache."""

import threading
from typing import Any

import pytest
import torch

import ropegraph
from ropegraph import Graph, GraphError, heur_mode
from tests.api.graphs import F16, F32, X, new

Q, TABLE = torch.randn(1, 2, 4, 8), torch.randn(4, 1, 1, 8)


def expected(q: torch.Tensor = Q) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=0.5)


def attention(**options: Any) -> Graph:
    """q, k and v as one torch tensor, o named "out"."""
    with Graph(io_data_type=F32, **options) as g:
        o, _ = g.sdpa(name="attn", q=Q, k=Q.clone(), v=Q.clone(), attn_scale=0.5,
                      generate_stats=False)  # fmt: skip
        o.set_output(True).set_name("out")
    return g


INPUTS = ["attn::q", "attn::k", "attn::v"]


def test_positional_call():
    g = attention(inputs=INPUTS, outputs=["out"])
    torch.testing.assert_close(g(Q, Q, Q), expected())
    other = torch.randn(1, 2, 4, 8)
    torch.testing.assert_close(g(other, other, other), expected(other))


def test_one_output_is_a_tensor_and_several_are_a_tuple():
    with Graph(io_data_type=F32, inputs=["a::q", "a::k", "a::v"], outputs=["o", "st"]) as g:
        o, stats = g.sdpa(Q, Q.clone(), Q.clone(), name="a")
        o.set_output(True).set_name("o")
        stats.set_output(True).set_name("st")
    made = g(Q, Q, Q)
    assert isinstance(made, tuple)
    assert [tuple(x.shape) for x in made] == [(1, 2, 4, 8), (1, 2, 4, 1)]


@pytest.mark.parametrize("key", ["attn::O", "out", "handle", "uid"])
def test_call_with_a_dict(key: str):
    with Graph(io_data_type=F32) as g:
        o, _ = g.sdpa(Q, Q.clone(), Q.clone(), attn_scale=0.5, name="attn", generate_stats=False)
        o.set_output(True).set_name("out").set_uid(7)
    name: Any = {"handle": o, "uid": 7}.get(key, key)
    buffer = torch.full(Q.shape, torch.nan)
    pack = {**dict.fromkeys(INPUTS, Q), name: buffer}
    assert g(pack) is pack
    torch.testing.assert_close(buffer, expected())


def test_missing_outputs_are_allocated_and_missing_inputs_are_not():
    g = attention()
    pack = dict.fromkeys(INPUTS, Q)
    g(pack)
    torch.testing.assert_close(pack["out"], expected())
    with pytest.raises(GraphError, match=r"no buffer is given for the inputs \['attn::v'\]"):
        g(dict.fromkeys(INPUTS[:2], Q))
    with pytest.raises(GraphError, match="'attn::x' names no tensor; there are attn::q"):
        g({**pack, "attn::x": Q})


def test_outputs_have_the_declared_strides():
    stride = (64, 8, 16, 1)
    with Graph(io_data_type=F32, inputs=INPUTS, outputs=["out"]) as g:
        o, _ = g.sdpa(Q, Q.clone(), Q.clone(), attn_scale=0.5, name="attn", generate_stats=False)
        o.set_output(True).set_name("out").set_dim(Q.shape).set_stride(stride)
    made = g(Q, Q, Q)
    assert made.stride() == stride
    torch.testing.assert_close(made, expected())


def test_names_of_inputs():
    """node::keyword; a tensor that the caller named keeps its name and answers to both."""
    with Graph(io_data_type=F32, inputs=["x", "turn::freqs"], outputs=["turn::output"]) as g:
        x = g.tensor(Q.shape, name="x")
        g.rope(x, TABLE, name="turn").set_output(True)
    y = g(Q, TABLE)
    assert y.shape == Q.shape
    pack = {"turn::input": Q, "turn::freqs": TABLE}
    assert torch.equal(g(pack)["turn::OUT_0"], y)


def test_default_names_count():
    with Graph(io_data_type=F32) as g:
        first = g.rope(Q, TABLE)
        g.rope(first, TABLE).set_output(True)
    assert set(g({"rope.0::input": Q, "rope.0::freqs": TABLE})) == {
        "rope.0::input",
        "rope.0::freqs",
        "rope.1::OUT_0",
    }


def test_the_workspace():
    def graph(**options: Any) -> Graph:
        with Graph(io_data_type=F32, inputs=["a::input", "a::freqs"], outputs=["out"],
                   **options) as g:  # fmt: skip
            q = g.rope(Q, TABLE, name="a")
            g.sdpa(q, q, q, generate_stats=False)[0].set_output(True).set_name("out")
        return g

    want = graph()(Q, TABLE)
    g = graph(workspace_alloc=False)
    size = g.get_workspace_size()
    with pytest.raises(GraphError, match=f"pass workspace= of {size} bytes"):
        g(Q, TABLE)
    assert torch.equal(g(Q, TABLE, workspace=torch.empty(size, dtype=torch.uint8)), want)


@pytest.mark.parametrize("handle", [None, "auto", ropegraph.create_handle()])
def test_handles(handle: Any):
    g = attention(handle=handle, inputs=INPUTS, outputs=["out"])
    torch.testing.assert_close(g(Q, Q, Q), expected())
    torch.testing.assert_close(g(Q, Q, Q, handle=ropegraph.create_handle()), expected())


@pytest.mark.parametrize(
    "name",
    ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans",
     "build", "execute"],
)  # fmt: skip
def test_steps_are_taken_for_the_caller(name: str):
    g = attention()
    with pytest.raises(GraphError, match=rf"{name}\(\) is called for you when the with block ends"):
        getattr(g, name)()


def test_what_is_wrong_is_said_at_the_right_time():
    with pytest.raises(GraphError, match="handle='cuda'; use a handle, 'auto' or None"):
        Graph(handle="cuda")
    with pytest.raises(GraphError, match="has no operation"), Graph(io_data_type=F32):
        pass
    g = Graph(io_data_type=F32)
    g.rope(Q, TABLE, name="a")
    with pytest.raises(GraphError, match="another node has that name"):
        g.rope(Q, TABLE, name="a")
    g = Graph(io_data_type=F32)
    with pytest.raises(GraphError, match="called before its with block ended"):
        g(Q)
    g = attention()
    with pytest.raises(GraphError, match="cannot record scale after build"):
        g.scale(Q, 2.0)
    with pytest.raises(AttributeError):
        g.no_such_method()


def test_an_error_inside_the_block_is_not_hidden_by_another():
    g = Graph(io_data_type=F32)
    with pytest.raises(ZeroDivisionError), g:
        raise ZeroDivisionError
    with pytest.raises(GraphError, match="called before its with block ended"):
        g(Q)


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (["x"], ["out"], r"\['f'\] are listed in neither inputs nor outputs"),
        (["x", "f"], [], r"\['out'\] are listed in neither inputs nor outputs"),
        (["x", "f", "nowhere"], ["out"], "'nowhere' names no tensor; there are a::input"),
        (["x", "f"], ["out", "a::OUT_0"], "output 'a::OUT_0' is virtual; call set_output"),
        (["x"], ["out", "f"], "output 'f' is an input of the graph"),
        (["x", "f", "out"], [], "input 'out' is written by the graph; list an input"),
        (["x", "f", "x"], ["out"], "'x' is listed twice"),
        (["x", "f"], ["out", "b::output"], "'out' is listed twice"),
    ],
)
def test_lists_that_do_not_fit(inputs: list[str], outputs: list[str], text: str):
    g = Graph(io_data_type=F32)
    with g:
        x, f = g.tensor(Q.shape, name="x"), g.tensor(TABLE.shape, name="f")
        g.rope(g.rope(x, f, name="a"), f, name="b").set_output(True).set_name("out")
    with pytest.raises(GraphError, match=text):
        g.set_io_tuples(inputs, outputs)


def test_a_list_that_does_not_fit_ends_the_block():
    g = Graph(io_data_type=F32, inputs=["a::input"], outputs=["nowhere"])
    g.rope(Q, TABLE, name="a").set_output(True)
    with pytest.raises(GraphError, match="'nowhere' names no tensor"):
        g.__exit__(None, None, None)


def test_a_tensor_given_while_recording_need_not_be_listed():
    """It is bound already: a table of angles, say."""
    with Graph(io_data_type=F32, inputs=["a::input"], outputs=["y"]) as g:
        g.rope(Q, TABLE, name="a").set_output(True).set_name("y")
    other = torch.randn(Q.shape)
    whole = g({"a::input": other, "a::freqs": TABLE})["y"]
    assert torch.equal(g(other), whole)


@pytest.mark.parametrize("n", [0, 2, 4])
def test_another_number_of_tensors(n: int):
    g = attention(inputs=INPUTS, outputs=["out"])
    with pytest.raises(GraphError, match=f"called with {n} tensors for 3 inputs"):
        g(*[Q] * n)


def test_bad_tensors_are_refused_by_name():
    g = attention(inputs=INPUTS, outputs=["out"])
    with pytest.raises(GraphError, match="'attn::k' is declared"):
        g(Q, Q[:, :, :3], Q)
    with pytest.raises(
        GraphError, match=r"'attn::q' is declared fp32 but bound to a torch\.float16"
    ):
        g(Q.half(), Q, Q)


def test_tuples_may_be_set_later():
    g = attention()
    g.set_io_tuples(INPUTS[::-1], ["out"])
    a, b, c = Q, 2 * Q, 3 * Q
    torch.testing.assert_close(
        g(c, b, a), torch.nn.functional.scaled_dot_product_attention(a, b, c, scale=0.5)
    )


# graph, jit, graph_cache


def test_graph_yields_a_pygraph():
    with ropegraph.graph(name="mine", io=F32) as (g, rest):
        assert isinstance(g, ropegraph.pygraph)
        assert rest == []
        g.rope(g.tensor(X), g.tensor((5, 1, 1, 8))).set_output(True)
    assert str(g).startswith("graph 'mine'")
    handle = ropegraph.create_handle()
    with ropegraph.graph(handle, fold="off") as (g, _):
        t = g.tensor(X)
        g.scale(t, 2.0).set_output(True)
    g.build()
    assert t.get_data_type() is ropegraph.data_type.HALF, "io is HALF by default, as in FE"


def record(n: int = 2) -> ropegraph.pygraph:
    g = new()
    g.scale(g.tensor((1, 1, n, 4), name="x"), 2.0).set_output(True).set_name("y")
    return g


def test_jit_builds_what_the_function_returns():
    @ropegraph.jit(heur_modes=[heur_mode.A])
    def alone(n: int) -> ropegraph.pygraph:
        """Its own docstring."""
        return record(n)

    @ropegraph.jit()
    def first(n: int) -> tuple[ropegraph.pygraph, int]:
        return record(n), n

    @ropegraph.jit()
    def neither() -> int:
        return 5

    assert alone.__doc__ == "Its own docstring."
    for g in (alone(3), first(4)[0]):
        with pytest.raises(GraphError, match=r"after build\(\)"):
            g.tensor(X)
    with pytest.raises(GraphError, match="jit: neither returned 5, not a graph"):
        neither()


def test_graph_cache_makes_one_graph_a_key():
    made: list[int] = []

    @ropegraph.graph_cache(key_fn=lambda n, **_: n, maxsize=2)
    def cached(n: int, note: str = "") -> ropegraph.pygraph:
        made.append(n)
        return record(n)

    assert cached(1) is cached(1, note="not in the key")
    cached(2)
    cached(1)
    cached(3)  # 2 has not been used for the longest time
    assert cached(1) is cached(1)
    cached(2)
    assert made == [1, 2, 3, 2]


def test_graph_cache_in_threads():
    made: list[int] = []

    @ropegraph.graph_cache(key_fn=lambda n: n)
    def cached(n: int) -> ropegraph.pygraph:
        made.append(n)
        return record(n)

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(cached(5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [5]
    assert len({id(g) for g in found}) == 1


def test_graph_cache_keeps_no_failure():
    calls: list[int] = []

    @ropegraph.graph_cache(key_fn=lambda n: n)
    def sometimes(n: int) -> ropegraph.pygraph:
        calls.append(n)
        if len(calls) == 1:
            raise GraphError("first")
        return record(n)

    with pytest.raises(GraphError, match="first"):
        sometimes(1)
    assert isinstance(sometimes(1), ropegraph.pygraph)


@pytest.mark.parametrize("maxsize", [0, -1, 1.5, None])
def test_a_cache_that_keeps_nothing(maxsize: Any):
    with pytest.raises(GraphError, match="graph_cache: maxsize="):
        ropegraph.graph_cache(key_fn=lambda n: n, maxsize=maxsize)(record)


def test_io_types():
    g = ropegraph.Graph(io_data_type=F16)
    with g:
        y = g.scale(g.tensor(X, name="x"), 2.0).set_output(True)
    assert y.get_data_type() is ropegraph.data_type.HALF


def test_the_order_may_be_set_while_recording_goes_on():
    with Graph(io_data_type=F32) as g:
        y = g.rope(Q, TABLE, name="turn").set_output(True).set_name("y")
        g.set_io_tuples(["turn::input", "turn::freqs"], ["y"])
        g.scale(y, 2.0, name="double").set_output(True).set_name("z")
        g.set_io_tuples(["turn::input", "turn::freqs"], ["z", "y"])
    z, y = g(Q, TABLE)
    torch.testing.assert_close(z, 2 * y)
