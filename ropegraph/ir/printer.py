"""str(graph): one line a node, the same text every time."""

from __future__ import annotations

from dataclasses import fields

from ropegraph.dtypes import DType, short
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import NormRope, NormRopeBackward, Op, Pair, op_name

# Printed even where they have their default: what folding moves must always be seen.
_ALWAYS = ("output_scale", "attn_scale", "epsilon")


def print_graph(graph: Graph) -> str:
    """The graph as text, inputs first, then a line a node; * marks outputs, + saved values."""
    lines = [f"graph {graph.name!r} fold={graph.fold} fold_log2={graph.fold_log2}"]
    lines += [f"  {_value(graph, name)}" for name in graph.inputs]
    for node in graph.nodes:
        outs = ", ".join(_value(graph, v) for v in node.outputs.values())
        ins = ", ".join(f"{port}={value}" for port, value in node.inputs.items())
        about = "".join(f", {text}" for text in describe(node.attrs))
        lines.append(f"  {outs} = {op_name(node.attrs)} {node.name!r} ({ins}{about})")
    return "\n".join(lines)


def describe(attrs: Op) -> list[str]:
    """The attributes that differ from their defaults, and the scales, as ``name=value``."""
    if isinstance(attrs, Pair):
        return [f"[{'; '.join(describe(part)) or op_name(part)}]" for part in attrs.parts]
    if isinstance(attrs, (NormRope, NormRopeBackward)):
        both = [*describe(attrs.norm), *describe(attrs.rope)]
        return both if attrs.norm_first else [*both, "norm_first=False"]
    texts: list[str] = []
    for f in fields(attrs):
        value = getattr(attrs, f.name)
        if f.name in _ALWAYS or value != f.default:
            texts.append(f"{f.name}={_shown(value)}")
    return texts


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return short(value) if isinstance(value, DType) else str(value)


def _value(graph: Graph, name: str) -> str:
    value = graph.values.get(name)
    if value is None:  # a broken graph is printed too
        return f"{name}: no value"
    mark = "*" if name in graph.visible else "+" if name in graph.saved else ""
    ragged = f" ragged by {value.ragged_offset}" if value.ragged_offset else ""
    return f"{name}{mark}: {short(value.dtype)} {list(value.dim)}{ragged}"
