"""ropegraph: a graph frontend for rotary attention.

Record rope and sdpa with cuDNN Frontend's names, fold the softmax scale into the rotation, run the
graph on a GPU or, by torch, anywhere. ``import ropegraph as cudnn`` ports a script.
"""

from importlib import import_module
from types import ModuleType

from ropegraph.api.enums import (
    attention_implementation,
    build_plan_policy,
    data_type,
    diagonal_alignment,
    heur_mode,
    norm_forward_phase,
    tensor_reordering,
)
from ropegraph.api.handle import (
    backend_version,
    backend_version_string,
    create_device_properties,
    create_handle,
    destroy_handle,
    get_stream,
    set_stream,
)
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor as tensor  # noqa: N813 - FE's name
from ropegraph.api.wrapper import Graph, graph, graph_cache, jit
from ropegraph.errors import (
    FoldContractError,
    GraphError,
    InternalError,
    PositionError,
    UnsupportedError,
)
from ropegraph.ir.contract import FoldContract

__version__ = "0.1.0"

# Imported when first asked for: a graph needs none of them.
_PACKAGES = ("angles", "compat", "functional", "nn")


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return import_module(f"ropegraph.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# FE's name for a graph that no engine takes.
cudnnGraphNotSupportedError = UnsupportedError  # noqa: N816

__all__ = [
    "FoldContract",
    "FoldContractError",
    "Graph",
    "GraphError",
    "InternalError",
    "PositionError",
    "UnsupportedError",
    "__version__",
    "attention_implementation",
    "backend_version",
    "backend_version_string",
    "build_plan_policy",
    "create_device_properties",
    "create_handle",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "diagonal_alignment",
    "get_stream",
    "graph",
    "graph_cache",
    "heur_mode",
    "jit",
    "norm_forward_phase",
    "pygraph",
    "set_stream",
    "tensor",
    "tensor_reordering",
]
