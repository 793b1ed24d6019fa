"""Handles: inert without a GPU, closed once destroyed."""

from typing import Any

import pytest
import torch

import ropegraph
from ropegraph import GraphError
from tests.api.graphs import buffers, refused, rotation

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU alone answers")


@CPU_ONLY
def test_without_a_gpu():
    handle = ropegraph.create_handle()
    assert ropegraph.backend_version() == 0
    assert ropegraph.backend_version_string() == "0.0.0"
    assert ropegraph.get_stream(handle) == 0
    ropegraph.set_stream(handle, 5)
    assert ropegraph.get_stream(handle) == 5
    properties = ropegraph.create_device_properties()
    assert (properties.type, properties.sm_version) == ("cpu", 0)
    assert ropegraph.create_device_properties("cpu") == properties


@CPU_ONLY
@pytest.mark.parametrize("where", ["graph", "execute", "both"])
def test_a_graph_runs_on_a_handle(where: str):
    handle = ropegraph.create_handle()
    g = rotation(settings={"handle": handle} if where != "execute" else {})
    pack = buffers(g)
    g.execute(pack, None, handle if where != "graph" else None)
    assert not bool(pack["y"].isnan().any())


def test_a_destroyed_handle_is_refused():
    handle = ropegraph.create_handle()
    g = rotation(settings={"handle": handle})
    g.build()
    other = rotation()
    ropegraph.destroy_handle(handle)
    refused(g, buffers(g), "this handle was destroyed; make another with create_handle()")
    refused(other, buffers(other), "this handle was destroyed", handle=handle)
    for call in (
        lambda: ropegraph.set_stream(handle, 0),
        lambda: ropegraph.get_stream(handle),
        lambda: ropegraph.destroy_handle(handle),
        lambda: ropegraph.pygraph(handle=handle),
        lambda: ropegraph.Graph(handle=handle),
    ):
        with pytest.raises(GraphError, match="this handle was destroyed"):
            call()
    g.execute(buffers(g), None, ropegraph.create_handle())


@pytest.mark.parametrize("given", [5, "cuda", object()])
def test_what_is_no_handle(given: Any):
    g = rotation()
    refused(g, buffers(g), "use what create_handle() returns", handle=given)
    for call in (ropegraph.get_stream, ropegraph.destroy_handle):
        with pytest.raises(GraphError, match=r"use what create_handle\(\) returns"):
            call(given)


@pytest.mark.parametrize("given", ["0", 1.5, None, -1])
def test_what_is_no_stream(given: Any):
    handle = ropegraph.create_handle()
    with pytest.raises(GraphError, match="stream="):
        ropegraph.set_stream(handle, given)
