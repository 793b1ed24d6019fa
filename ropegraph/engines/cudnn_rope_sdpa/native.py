"""Run a whole graph by cuDNN's own rotation and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ropegraph.dtypes import torch_dtype
from ropegraph.engines.cudnn_rope_sdpa.record import record, uids_of
from ropegraph.engines.cudnn_rope_sdpa.rules import why_not
from ropegraph.engines.cudnn_sdpa.frontend import load
from ropegraph.engines.cudnn_sdpa.handles import handle_of
from ropegraph.engines.cudnn_sdpa.plans import finish
from ropegraph.errors import UnsupportedError
from ropegraph.ir.graph import Graph
from ropegraph.lowering.engine import Device


class NativeGraph:
    """A built graph.  Values that the caller does not bind live in buffers of its own."""

    def __init__(self, graph: Graph, device: Device) -> None:
        self.graph, self.index = graph, device.index
        self.fe = load()
        handle = handle_of(self.fe, device.index, 0)
        self.built = record(self.fe, graph, device, handle)
        finish(self.fe, self.built)
        self.uids = uids_of(graph)
        where = torch.device("cuda", device.index)
        size = max(self.built.get_workspace_size(), 1)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=where)
        self.own = {
            name: torch.empty_strided(
                value.dim, value.stride, dtype=torch_dtype(value.dtype), device=where
            )
            for name, value in graph.values.items()
            if graph.is_virtual(name)
        }

    def __call__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Run on torch's current stream.  buffers: value name -> tensor, inputs and outputs."""
        stream = torch.cuda.current_stream(self.index).cuda_stream
        bound: dict[str, Any] = {**self.own, **buffers}
        pack = {self.uids[name]: tensor.data_ptr() for name, tensor in bound.items()}
        handle = handle_of(self.fe, self.index, stream)
        self.built.execute(pack, self.workspace.data_ptr(), handle)


def build(graph: Graph, device: Device) -> NativeGraph:
    """Record and plan a graph.

    Raises UnsupportedError listing every broken rule, or with cuDNN's own words as the cause.
    """
    reasons = why_not(graph, device)
    if reasons:
        raise UnsupportedError(
            "cudnn.rope_sdpa cannot take the graph:\n  " + "\n  ".join(reasons),
            {"cudnn.rope_sdpa": reasons},
        )
    try:
        return NativeGraph(graph, device)
    except (ImportError, ValueError, RuntimeError) as error:
        text = f"cuDNN has no plan: {error}"
        raise UnsupportedError(f"cudnn.rope_sdpa: {text}", {"cudnn.rope_sdpa": (text,)}) from error
