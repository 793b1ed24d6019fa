"""Recipe -> finished plan: heuristics A, then FALLBACK; kept, for a plan costs up to a second."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from ropegraph.engines.cudnn_sdpa.frontend import FeGraph, Frontend, load
from ropegraph.engines.cudnn_sdpa.handles import handle_of
from ropegraph.engines.cudnn_sdpa.recipe import Recipe
from ropegraph.engines.cudnn_sdpa.record import record
from ropegraph.errors import UnsupportedError

# A training script meets some tens of shapes; each plan holds compiled kernels.
MOST_PLANS = 128


@dataclass(frozen=True)
class BuiltPlan:
    """A graph of FE that is ready to run, by any thread with its own handle.

    index: the entry of graph.plans that was built.  uids: every tensor that was recorded.
    """

    fe: Frontend
    graph: FeGraph
    index: int
    uids: list[int]
    workspace_bytes: int


_lock = threading.Lock()
_plans: OrderedDict[Recipe, BuiltPlan] = OrderedDict()


def plan_of(recipe: Recipe, name: str) -> BuiltPlan:
    """The plan of a recipe, built the first time.

    Raises UnsupportedError, with cuDNN's own words as the cause, if it has none.
    """
    with _lock:
        found = _plans.get(recipe)
        if found is not None:
            _plans.move_to_end(recipe)
            return found
    # Built outside the lock: two threads may both build one, which is only slow.
    made = build(recipe, name)
    with _lock:
        _plans[recipe] = made
        while len(_plans) > MOST_PLANS:
            _plans.popitem(last=False)
    return made


def forget_plans() -> None:
    """Empty the cache."""
    with _lock:
        _plans.clear()


def build(recipe: Recipe, name: str) -> BuiltPlan:
    """A new plan, past the cache."""
    try:
        fe = load()
    except ImportError as error:
        raise UnsupportedError(str(error), {"cudnn.sdpa": (str(error),)}) from error
    # FE picks its unified node by features alone; where that one has no plan the other may.
    attempts = ("AUTO",) if recipe.is_backward else ("AUTO", "COMPOSITE")
    failure: Exception | None = None
    for implementation in attempts:
        try:
            with torch.cuda.device(recipe.device.index):
                handle = handle_of(fe, recipe.device.index, 0)
                graph = record(fe, recipe, handle, implementation)
                index = finish(fe, graph)
            uids = [uid for uid, _, _ in recipe]
            return BuiltPlan(fe, graph, index, uids, graph.get_workspace_size())
        except (fe.cudnnGraphNotSupportedError, ValueError, RuntimeError) as error:  # noqa: PERF203
            failure = failure or error
    text = f"cuDNN has no plan: {failure}"
    message = f"cudnn.sdpa, node {name!r}: {text}"
    raise UnsupportedError(message, {"cudnn.sdpa": (text,)}) from failure


def finish(fe: Frontend, graph: FeGraph) -> int:
    """Take a recorded graph through FE's life cycle; the index of cuDNN's first plan that builds.

    Raises FE's own exceptions.
    """
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([fe.heur_mode.A, fe.heur_mode.FALLBACK])
    failure: Exception | None = None
    for index, plan in enumerate(graph.plans):
        # Engines that FE wrote in Python are another peer's kernels, with other numerics.
        if plan.cpp_index is None:
            continue
        graph.select_plan(index)
        try:
            graph.check_support()
            graph.build_plans()
            return index
        except fe.cudnnGraphNotSupportedError as error:
            failure = error
    raise failure or fe.cudnnGraphNotSupportedError("its heuristics name no engine")
