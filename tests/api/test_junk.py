"""Whatever is given for whichever argument: it is taken, or refused by a GraphError."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ropegraph
from ropegraph import GraphError, UnsupportedError, data_type
from ropegraph.api.tensor import Tensor
from tests.api.graphs import F32, attention, buffers, new, rotation
from tests.api.test_fe_keywords import EXECUTE, PYGRAPH, SDPA, SDPA_BACKWARD

Q, K, V = (2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 4)
JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    2.5,
    float("nan"),
    float("-inf"),
    10**400,
    "",
    "x",
    b"x",
    [],
    (1, 2),
    {"a": 1},
    object(),
    np.array(1.5),
    np.zeros((2, 2)),
    np.bool_(True),
    np.array(["x"]),
    torch.ones(2, 6, 5, 7),
    torch.tensor([1], dtype=torch.int8),
    torch.float32,
    data_type.NOT_SET,
    complex(1, 2),
    range(4),
    len,
    int,
    new().tensor(Q),
]


def unless_refused(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except (GraphError, UnsupportedError):
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def given(g: ropegraph.pygraph, **dims: tuple[int, ...]) -> dict[str, Any]:
    return {n: g.tensor(d, name=n) for n, d in dims.items()}


def rope(g: ropegraph.pygraph, **changed: Any) -> Any:
    return g.rope(**{**given(g, input=Q, freqs=(5, 1, 1, 8)), **changed})


def rope_backward(g: ropegraph.pygraph, **changed: Any) -> Any:
    return g.rope_backward(**{**given(g, dY=Q, freqs=(5, 1, 1, 8)), **changed})


def sdpa(g: ropegraph.pygraph, **changed: Any) -> Any:
    return g.sdpa(**{**given(g, q=Q, k=K, v=V), **changed})[0]


def sdpa_backward(g: ropegraph.pygraph, **changed: Any) -> Any:
    o = (2, 6, 5, 4)
    return g.sdpa_backward(**{**given(g, q=Q, k=K, v=V, o=o, dO=o, stats=(2, 6, 5, 1)), **changed})[
        0
    ]


def scale(g: ropegraph.pygraph, **changed: Any) -> Any:
    return g.scale(**{**given(g, input=Q), "scale": 2.0, **changed})


def mul(g: ropegraph.pygraph, **changed: Any) -> Any:
    return g.mul(**{**given(g, a=Q), "b": 2.0, **changed})


def tensor(g: ropegraph.pygraph, **changed: Any) -> Any:
    return g.scale(g.tensor(**{"dim": Q, **changed}), 2.0)


def tensor_like(g: ropegraph.pygraph, **changed: Any) -> Any:
    return g.scale(g.tensor_like(**{"template": torch.ones(Q), **changed}), 2.0)


CALLS = [rope, rope_backward, sdpa, sdpa_backward, scale, mul, tensor, tensor_like]
MORE = {"sdpa": [*SDPA, "implementation", "max_total_seq_len_q"], "sdpa_backward": [*SDPA_BACKWARD]}


def keywords(method: Any) -> list[str]:
    parameters = inspect.signature(method).parameters.values()
    found = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [n for n in found if n != "self"]


@pytest.mark.parametrize("call", CALLS)
def test_recording(call: Any):
    method = getattr(ropegraph.pygraph, call.__name__)
    for name in [*keywords(method), *MORE.get(call.__name__, [])]:
        for junk in JUNK:
            if name.startswith("score_mod") and callable(junk):
                continue  # what the caller's function raises is the caller's

            def build(name: str = name, junk: Any = junk) -> None:
                g = new()
                call(g, **{name: junk}).set_output(True)
                g.build()

            unless_refused(build, f"{call.__name__}({name}={junk!r:.40})")


def test_settings():
    for name in [*keywords(ropegraph.pygraph.__init__), *PYGRAPH]:
        for junk in JUNK:

            def build(name: str = name, junk: Any = junk) -> None:
                rope(new(**{name: junk})).set_output(True)

            unless_refused(build, f"pygraph({name}={junk!r:.40})")


@pytest.mark.parametrize("setter", [n for n in vars(Tensor) if n.startswith("set_")])
def test_setters(setter: str):
    for junk in JUNK:
        for is_written in (False, True):

            def build(junk: Any = junk, is_written: bool = is_written) -> None:
                g = new()
                x = g.tensor(Q, name="x")
                if not is_written:
                    getattr(x, setter)(junk)
                y = g.scale(x, 2.0).set_output(True)
                if is_written:
                    getattr(y, setter)(junk)
                g.build()

            unless_refused(build, f"{setter}({junk!r:.40}), written: {is_written}")


def test_executing():
    g, whole = rotation(), attention()
    g.build()
    whole.build()
    for junk in JUNK:
        what = f"{junk!r:.40}"
        unless_refused(lambda j=junk: g.execute(j), what)
        for name in ("x", "f", "y"):
            unless_refused(lambda j=junk, n=name: g.execute({**buffers(g), n: j}), f"{name}={what}")
        unless_refused(lambda j=junk: whole.execute(buffers(whole), j), f"workspace={what}")
        unless_refused(lambda j=junk: g.execute(buffers(g), None, j), f"handle={what}")
        for name in EXECUTE:
            unless_refused(lambda j=junk, n=name: g.execute(buffers(g), **{n: j}), f"{name}={what}")
        if getattr(type(junk), "__hash__", None) is not None:
            unless_refused(lambda j=junk: g.execute({**buffers(g), j: 1}), f"key {what}")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: attention().backward_graph(x, ["q"]),
        lambda x: attention().backward_graph([x], ["q"]),
        lambda x: attention().backward_graph(["o"], x),
        lambda x: attention().find_tensor(x),
        lambda x: attention().why_not(x),
        lambda x: attention().to_mermaid(x),
        lambda x: ropegraph.pygraph().deserialize(x),
        lambda x: ropegraph.Graph(inputs=x),
        lambda x: ropegraph.Graph(handle=x),
        lambda x: ropegraph.set_stream(ropegraph.create_handle(), x),
        ropegraph.get_stream,
        ropegraph.destroy_handle,
        ropegraph.create_device_properties,
        lambda x: ropegraph.graph_cache(key_fn=len, maxsize=x),
        lambda x: sdpa(new(), dropout=(x, 1, 0)),
        lambda x: sdpa(new(), dropout=(0.5, x, 0)),
        lambda x: sdpa(new(), score_mod=lambda g, s: g.add(s, x)),
        lambda x: sdpa(new(), score_mod=lambda g, s: x),
    ],
)
def test_other_calls(call: Any):
    for junk in JUNK:
        unless_refused(lambda j=junk: call(j), f"{junk!r:.40}")


def test_the_junk_is_not_all_refused():
    """Otherwise this file would say nothing of what is taken."""
    g = new()
    rope(g, output_scale=2.5, name=3, inverse=np.bool_(True), compute_data_type=F32)
    assert "rope '3'" in str(g)
    assert "inverse=True" in str(g)
