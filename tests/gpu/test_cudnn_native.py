"""cuDNN's own rotation and attention on a device: an oracle that shares no kernel with ours."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.compile import device_of
from ropegraph.engines.cudnn_rope_sdpa import native
from tests.gpu.test_graph import FOLDS, Pair, check, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OLD = rg.backend_version() < 92400


def built(graph: rg.pygraph) -> native.NativeGraph:
    """The graph after the passes, every value that a node writes bound, planned by cuDNN."""
    lowered = graph.lowered.plan.graph
    written = frozenset(v for node in lowered.nodes for v in node.outputs.values())
    return native.build(
        replace(lowered, saved=lowered.saved | written), device_of(torch.device("cuda"))
    )


def run(graph: native.NativeGraph, pack: dict[str, Any]) -> None:
    """Run on the caller's buffers, the others made here."""
    for name in graph.graph.outputs:
        value = graph.graph.values[name]
        dtype = getattr(torch, value.dtype.torch_name)
        if name not in pack:
            made = torch.empty_strided(value.dim, value.stride, dtype=dtype, device="cuda")
            pack[name] = made.fill_(torch.nan)
    graph({n: x for n, x in pack.items() if n in graph.graph.values})


@pytest.mark.skipif(OLD, reason="needs cuDNN 9.24")
@pytest.mark.parametrize(("fold", "log2"), [f for f in FOLDS if f != ("off", True)])
def test_the_native_graph_gives_what_ours_gives(fold, log2):
    x = inputs()
    pair = Pair(x, fold=fold, fold_log2=log2)
    ours = [t.clone() for t in pair.step()]
    check(ours, x)
    for t in (pair.pack["o"], *(pair.back[f"d{n}"] for n in "qkv")):
        t.fill_(torch.nan)
    run(built(pair.forward), pair.pack)
    run(built(pair.backward), pair.back)
    torch.cuda.synchronize()
    theirs = [pair.pack["o"], *(pair.back[f"d{n}"] for n in "qkv")]
    check(theirs, x)
    for a, b in zip(ours, theirs, strict=True):
        # Two bf16 runs, each rounding O or a gradient and the rotated operands before it.
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 6e-3


@pytest.mark.skipif(not OLD, reason="cuDNN is new enough")
def test_an_older_cudnn_is_the_reason():
    pair = Pair(inputs(), fold="off")
    with pytest.raises(rg.UnsupportedError, match=r"needs cuDNN 9\.24 or newer, this is 9"):
        built(pair.forward)


def test_asked_for_by_name_it_says_why_not():
    x = inputs()
    with pytest.raises(rg.UnsupportedError, match="plans rope and sdpa as one graph"):
        Pair(x, engines=("cudnn.rope_sdpa",))
