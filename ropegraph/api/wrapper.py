"""Graph, the context manager that builds on exit and is then called like a function.

FE's helpers graph, jit and graph_cache stand beside it.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from ropegraph.api.checks import as_count, as_list
from ropegraph.api.enums import data_type, heur_mode
from ropegraph.api.handle import Handle, create_handle
from ropegraph.api.pygraph import pygraph
from ropegraph.api.variant_pack import keys_of
from ropegraph.errors import GraphError
from ropegraph.ir.ops import op_name

R = TypeVar("R")
HEURISTICS = (heur_mode.A, heur_mode.FALLBACK)

# Recording methods whose tensors get canonical names, ``<node>::<keyword>``.
_OPS = ("rope", "rope_backward", "sdpa", "sdpa_backward", "scale", "mul")
# Managed by the wrapper: calling them inside the block would build half a graph.
_BLOCKED = (
    "validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans",
    "build", "execute",
)  # fmt: skip


class Graph:
    """A graph recorded in a ``with`` block, built when it ends, then called.

    handle: a handle, "auto" (the current device and stream), or None.
    inputs, outputs: names in the order of a positional call, ``node::keyword`` or set_name's.
    workspace_alloc: False leaves the workspace to the caller (``workspace=``).
    Further keywords go to pygraph.
    Called with tensors, it returns the outputs (one alone, several as a tuple); called with one
    dict, missing outputs are allocated and added to it.
    """

    def __init__(
        self,
        handle: Handle | str | None = None,
        inputs: Sequence[Any] | None = None,
        outputs: Sequence[Any] | None = None,
        heuristics: Sequence[Any] | None = None,
        workspace_alloc: bool = True,
        **pygraph_kwargs: Any,
    ) -> None:
        if isinstance(handle, str):
            if handle != "auto":
                raise GraphError(f"Graph: handle={handle!r}; use a handle, 'auto' or None")
            handle = create_handle()
        self._handle = handle
        self._graph = pygraph(handle=self._handle, **pygraph_kwargs)
        self._heuristics = list(heuristics or HEURISTICS)
        self._workspace_alloc = workspace_alloc
        given = {"inputs": inputs, "outputs": outputs}
        lists = [[] if x is None else as_list(x, f"Graph: {n}") for n, x in given.items()]
        self._order = lists[0], lists[1]
        self._names: dict[Any, str] = {}  # filled when the graph is built, and fixed from then on

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self._graph.build(self._heuristics)
            self._names = self._look_up()
            if self._order[0] or self._order[1]:
                self.set_io_tuples(*self._order)

    def __getattr__(self, name: str) -> Any:
        if name in _BLOCKED:
            raise GraphError(f"Graph: {name}() is called for you when the with block ends")
        method = getattr(self._graph, name)
        if name not in _OPS:
            return method
        return functools.partial(self._record, method)

    def _record(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record, and give inputs made from framework tensors their canonical names."""
        result = method(*args, **kwargs)
        node = self._graph.recorder.nodes[-1]
        for port, tensor in node.inputs.items():
            if not tensor.spec.name and tensor.spec.producer is None:
                tensor.spec.name = f"{node.name}::{port}"
        return result

    def set_io_tuples(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """The order of a positional call.  Every tensor the caller binds must be listed once."""
        graph = self._graph.lowered.recorded
        names = [[self._resolve(t) for t in side] for side in (inputs, outputs)]
        names_of = self._graph.recorder.names()
        bound = {n for t, n in names_of.items() if t.spec.bound is not None}
        missing = {*graph.inputs, *graph.visible} - {*names[0], *names[1]} - bound
        if missing:
            raise GraphError(f"Graph: {sorted(missing)} are listed in neither inputs nor outputs")
        listed = [*names[0], *names[1]]
        for name in listed:
            if listed.count(name) > 1:
                raise GraphError(f"Graph: {name!r} is listed twice in inputs and outputs")
        for name in names[0]:
            if graph.producer(name) is not None:
                raise GraphError(f"Graph: input {name!r} is written by the graph; list an input")
        for name in names[1]:
            if graph.producer(name) is None:
                raise GraphError(f"Graph: output {name!r} is an input of the graph")
            if name not in graph.visible | graph.saved:
                raise GraphError(f"Graph: output {name!r} is virtual; call set_output(True) on it")
        self._order = names[0], names[1]

    def _look_up(self) -> dict[Any, str]:
        """What a variant pack may use as a key, or a canonical name -> the name in the graph."""
        names = self._graph.recorder.names()
        canonical = {
            f"{node.name}::{port}": names[tensor]
            for node in self._graph.recorder.nodes
            for port, tensor in {**node.inputs, **node.outputs}.items()
        }
        return {**canonical, **keys_of(self._graph.recorder)}

    def _resolve(self, given: Any) -> str:
        names = self._names or self._look_up()
        name = names.get(given) if isinstance(given, Hashable) else None
        if name is not None:
            return name
        known = [
            f"{n.name}::{p} ({op_name(n.attrs)})"
            for n in self._graph.recorder.nodes
            for p in n.inputs
        ]
        raise GraphError(f"Graph: {given!r} names no tensor; there are {', '.join(known)}")

    def __call__(self, *args: Any, handle: Handle | None = None, workspace: Any = None) -> Any:
        """Run on positional tensors in the order of ``inputs``, or on one dict."""
        if not self._names:
            raise GraphError("Graph: called before its with block ended")
        if len(args) == 1 and isinstance(args[0], dict):
            return self._call_with_dict(cast("dict[Any, Any]", args[0]), handle, workspace)
        inputs, outputs = self._order
        if len(args) != len(inputs):
            raise GraphError(
                f"Graph: called with {len(args)} tensors for {len(inputs)} inputs {inputs}"
            )
        pack = dict(zip(inputs, args, strict=True))
        # What backward_graph marked to be saved is written too, listed or not.
        written = self._graph.lowered.recorded.outputs
        results = {name: self._allocate(name, args) for name in dict.fromkeys((*outputs, *written))}
        self._run({**pack, **results}, handle, workspace)
        made = tuple(results[name] for name in outputs)
        return made[0] if len(made) == 1 else made

    def _call_with_dict(self, given: dict[Any, Any], handle: Handle | None, workspace: Any) -> Any:
        graph = self._graph.lowered.recorded
        pack: dict[str, Any] = {}
        for key, buffer in given.items():
            if key is None or (isinstance(key, int) and key not in self._names):
                continue  # as FE does, and execute()
            name = self._resolve(key)
            if pack.setdefault(name, buffer) is not buffer:
                raise GraphError(f"Graph: {name!r} is given two buffers, the second by {key!r}")
        # A number given when recording stays; an example tensor is no input of later calls.
        own = {
            n
            for t, n in self._graph.recorder.names().items()
            if t.spec.bound is not None and t.spec.pass_by_value
        }
        own |= {n for n, value in graph.values.items() if value.constant is not None}
        if missing := [n for n in graph.inputs if n not in pack and n not in own]:
            raise GraphError(f"Graph: no buffer is given for the inputs {missing}")
        for name in graph.outputs:
            if name not in pack:
                pack[name] = given[name] = self._allocate(name, list(pack.values()))
        self._run(pack, handle, workspace)
        return given

    def _run(self, pack: dict[str, Any], handle: Handle | None, workspace: Any) -> None:
        if workspace is None and not self._workspace_alloc and self._graph.get_workspace_size():
            raise GraphError(
                "Graph: workspace_alloc=False, so pass workspace= of "
                f"{self._graph.get_workspace_size()} bytes"
            )
        self._graph.execute(pack, workspace, handle or self._handle)

    def _allocate(self, name: str, like: Sequence[Any]) -> torch.Tensor:
        """An output buffer with the declared dims and strides, where the inputs are."""
        tensors = [t for t in like if isinstance(t, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        return self._graph.allocate(name, device=device)[name]


@contextmanager
def graph(
    handle: Handle | None = None,
    name: str = "graph",
    io: Any = data_type.HALF,
    intermediate: Any = data_type.FLOAT,
    compute: Any = data_type.FLOAT,
    **pygraph_kwargs: Any,
) -> Generator[tuple[pygraph, list[Any]]]:
    """FE's ``with cudnn.graph(handle) as (g, _):``; building is left to jit or the caller."""
    yield (
        pygraph(
            name=name,
            io_data_type=io,
            intermediate_data_type=intermediate,
            compute_data_type=compute,
            handle=handle,
            **pygraph_kwargs,
        ),
        [],
    )


def jit(heur_modes: Sequence[Any] = HEURISTICS) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Build the graph that the decorated function returns, alone or first in a tuple."""

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            result = function(*args, **kwargs)
            made: Any = result
            if isinstance(made, tuple):
                made = cast("tuple[Any, ...]", made)[0]
            if not isinstance(made, pygraph):
                raise GraphError(f"jit: {function.__name__} returned {made!r:.60}, not a graph")
            made.build(list(heur_modes))
            return result

        return wrapper

    return decorate


def graph_cache(
    key_fn: Callable[..., Any], maxsize: int = 256
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Keep what the decorated function returned, by key_fn(*args, **kwargs); least used goes.

    Thread-safe: one key is made once.
    """
    limit = as_count(maxsize, "graph_cache: maxsize", 1)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        kept: OrderedDict[Any, R] = OrderedDict()
        lock = threading.RLock()

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            key = key_fn(*args, **kwargs)
            with lock:
                if key not in kept:
                    kept[key] = function(*args, **kwargs)
                    if len(kept) > limit:
                        kept.popitem(last=False)
                kept.move_to_end(key)
                return kept[key]

        return wrapper

    return decorate
