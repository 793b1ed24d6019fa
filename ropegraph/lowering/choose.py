"""Which engine takes which node, and why the others did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ropegraph.dtypes import short
from ropegraph.errors import UnsupportedError
from ropegraph.ir.graph import Graph, Node
from ropegraph.ir.ops import Attention, Op, SdpaBackward, op_name
from ropegraph.lowering.engine import Device, Engine, Step

# (node, engine) -> why the engine could not compile the node after all.
Refused = Mapping[tuple[str, str], tuple[str, ...]]


def slots_of(graph: Graph) -> dict[str, int]:
    """A place for every value in the list of tensors that executables are called with."""
    return {name: i for i, name in enumerate(graph.values)}


def reasons(
    graph: Graph,
    step: Step,
    device: Device,
    engines: Sequence[Engine],
    allowed: Sequence[str],
    refused: Refused,
) -> dict[str, tuple[str, ...]]:
    """Engine name -> every rule the step breaks there; empty for an engine that can run it.

    refused: reasons that came up when an engine compiled a node.
    """
    node = step.node
    only = _engine_of_the_mask(graph, node)
    found: dict[str, tuple[str, ...]] = {}
    for engine in engines:
        if engine.name not in allowed:
            found[engine.name] = (f"left out by engines={tuple(allowed)}",)
        elif only and engine.name != only:
            found[engine.name] = (f"the forward drew its dropout mask on {only!r}",)
        elif not isinstance(node.attrs, engine.ops):
            found[engine.name] = (f"has no {op_name(node.attrs)}",)
        else:
            compiled = refused.get((node.name, engine.name), ())
            found[engine.name] = (*engine.why_not(step, device), *compiled)
    return found


def choose(
    graph: Graph,
    device: Device,
    engines: Sequence[Engine],
    allowed: Sequence[str],
    refused: Refused,
) -> tuple[Step, ...]:
    """One step per node that launches something, with the first allowed engine that can run it.

    Raises UnsupportedError listing every broken rule of every engine.
    """
    slots = slots_of(graph)
    steps: list[Step] = []
    for node in filter(graph.launches, graph.nodes):
        step = Step(node, graph.values, "", slots)
        broken = reasons(graph, step, device, engines, allowed, refused)
        able = [name for name in allowed if not broken[name]]
        if not able:
            raise UnsupportedError(_message(graph, node, device, broken), broken)
        steps.append(replace(step, engine=able[0]))
    return tuple(steps)


def _engine_of_the_mask(graph: Graph, node: Node[Op]) -> str:
    """The engine a backward with dropout must run on: mask generators differ."""
    attrs = node.attrs
    if graph.contract is None or not isinstance(attrs, SdpaBackward) or attrs.dropout_p is None:
        return ""
    return graph.contract.entry_for(node.name).engine


def _message(
    graph: Graph, node: Node[Op], device: Device, broken: Mapping[str, tuple[str, ...]]
) -> str:
    first = graph.values[next(iter(node.inputs.values()))]
    facts = [short(first.dtype)]
    if isinstance(node.attrs, Attention):
        facts += [f"d_qk={first.dim[3]}", f"d_v={graph.values[node.inputs['v']].dim[3]}"]
    lines = [
        f"no engine can run {op_name(node.attrs)} {node.name!r} ({', '.join(facts)}) on {device}:"
    ]
    lines += [f"  {engine:<16} {rule}" for engine, rules in broken.items() for rule in rules]
    return "\n".join(lines)
