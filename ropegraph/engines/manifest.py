"""The engines by name, in the order in which they are asked. Imports none of them."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ropegraph.errors import GraphError
from ropegraph.lowering.engine import Engine

ENGINES: dict[str, str] = {
    "cudnn.sdpa": "ropegraph.engines.cudnn_sdpa.engine:CudnnSdpa",
    "cudnn.rope_sdpa": "ropegraph.engines.cudnn_rope_sdpa.engine:CudnnRopeSdpa",
    "cuda.rope": "ropegraph.engines.cuda_rope.engine:CudaRope",
    "torch": "ropegraph.engines.torch_executor.engine:TorchExecutor",
    "reference": "ropegraph.engines.reference.engine:Reference",
}
# reference is exact and slow, cudnn.rope_sdpa takes whole graphs: both run only by name.
DEFAULT: tuple[str, ...] = ("cudnn.sdpa", "cuda.rope", "torch")


@cache
def load(name: str) -> Engine:
    """The engine called ``name``.  Raises GraphError listing the names that exist."""
    if name not in ENGINES:
        raise GraphError(f"engines: {name!r} is no engine; use {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(import_module(module), attribute)()
