"""Small graphs in which everything has a name, and buffers for them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph
from ropegraph.dtypes import torch_dtype
from ropegraph.testing.inputs import normal, poisoned

F16, F32, F64 = torch.float16, torch.float32, torch.float64
X = (2, 3, 5, 8)


def new(**settings: Any) -> ropegraph.pygraph:
    return ropegraph.pygraph(**{"io_data_type": F32, **settings})


def rotation(dim: tuple[int, ...] = X, width: int = 8, **options: Any) -> ropegraph.pygraph:
    """x, f -> y."""
    g = new(**options.pop("settings", {}))
    x, f = g.tensor(dim, name="x"), g.tensor((dim[2], 1, 1, width), data_type=F32, name="f")
    g.rope(x, f, name="turn", **options).set_output(True).set_name("y")
    return g


def attention(rotated: bool = True, **options: Any) -> ropegraph.pygraph:
    """q, k, v and (rotated) f -> o, stats: q_rot and k_rot are virtual."""
    g = new(**options.pop("settings", {}))
    q, k = g.tensor((2, 6, 5, 8), name="q"), g.tensor((2, 2, 7, 8), name="k")
    v = g.tensor((2, 3, 7, 4), name="v")
    if rotated:
        f = g.tensor((7, 1, 1, 8), data_type=F32, name="f")
        q = g.rope(q, f, name="rope_q").set_name("q_rot")
        k = g.rope(k, f, name="rope_k").set_name("k_rot")
    given = {"attn_scale": 0.3, "generate_stats": True, "name": "attn", **options}
    o, stats = g.sdpa(q, k, v, **given)
    o.set_output(True).set_name("o")
    if stats is not None:
        stats.set_output(True).set_name("stats")
    return g


def buffers(graph: ropegraph.pygraph) -> dict[str, Tensor]:
    """Normal numbers for the inputs, NaN for the outputs, by name."""
    ir = graph.plan.graph
    found: dict[str, Tensor] = {}
    for name in (*ir.inputs, *ir.outputs):
        value = ir.values[name]
        dtype = torch_dtype(value.dtype)
        if name in ir.outputs:
            found[name] = poisoned(value.dim, dtype, stride=value.stride)
        elif dtype.is_floating_point:
            found[name] = normal(value.dim, dtype, seed=len(found)).clone()
        else:
            found[name] = torch.ones(value.dim, dtype=dtype)
    return found


def outputs(graph: ropegraph.pygraph, pack: dict[Any, Any]) -> dict[str, Tensor]:
    return {name: pack[name] for name in graph.plan.graph.outputs if name in pack}


def run(graph: ropegraph.pygraph, **changed: Any) -> dict[str, Tensor]:
    """The outputs by name."""
    pack = buffers(graph) | changed
    graph.execute(pack)
    found = outputs(graph, pack)
    assert not [name for name, x in found.items() if bool(x.isnan().any())]
    return found


def execute(graph: ropegraph.pygraph, pack: dict[str, Any]) -> dict[str, Any]:
    """What was given, and every output: poisoned before, in its declared strides."""
    made = graph.lowered.recorded
    pack = dict(pack)
    for name in made.outputs:
        value = made.values[name]
        pack[name] = poisoned(value.dim, torch_dtype(value.dtype), stride=value.stride)
    graph.execute(pack)
    return pack


def refused(
    graph: ropegraph.pygraph, pack: dict[Any, Any], *parts: str, error: Any = None, **options: Any
) -> None:
    """Executing raises an error that mentions all parts, and no output is touched."""
    before = {name: x.clone() for name, x in outputs(graph, pack).items() if isinstance(x, Tensor)}
    with pytest.raises(error or ropegraph.GraphError) as caught:
        graph.execute(pack, **options)
    for part in parts:
        assert part in str(caught.value)
    for name, old in before.items():
        torch.testing.assert_close(pack[name], old, rtol=0, atol=0, equal_nan=True, msg=name)
