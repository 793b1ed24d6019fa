"""explain(): what was folded, by how much, who runs what, and why not more."""

from __future__ import annotations

from typing import Any

from ropegraph.compile import Lowered
from ropegraph.ir.graph import Graph, origins
from ropegraph.ir.ops import Attention, Rotation, Scale, op_name
from ropegraph.passes.rewrite import Decision


def explain(lowered: Lowered) -> str:
    """The report as text: settings, scales before and after, decisions, launches."""
    recorded, plan = lowered.recorded, lowered.plan
    before, after = _scales(recorded), _scales(plan.graph)
    settings = f"fold={recorded.fold}, fold_log2={recorded.fold_log2}"
    if (contract := recorded.contract) is not None:
        settings = f"fold={contract.fold}, fold_log2={contract.fold_log2} by the forward's contract"
    counts = f"{len(recorded.nodes)} nodes recorded, {len(plan.steps)} launches on {plan.device}"
    lines = [
        f"graph {recorded.name!r}: {settings}, {counts}",
        "",
        f"{'node':<24} {'recorded':<28} lowered",
    ]
    for name, text in before.items():
        now = after.get(name, "removed")
        lines.append(f"{name:<24} {text:<28} {'the same' if now == text else now}")
    lines += ["", "passes"]
    lines += [f"  {_line(d)}" for d in lowered.decisions] or ["  nothing to do"]
    lines += ["", "launches"]
    wide = max(24, *(len(s.name) for s in plan.steps))
    lines += [f"  {s.name:<{wide}} {op_name(s.node.attrs):<16} {s.engine}" for s in plan.steps]
    return "\n".join(lines)


def _line(decision: Decision) -> str:
    mark = "did" if decision.applied else "did not"
    return f"{decision.rule} {mark}, at {decision.node}: {decision.text}"


def _scales(graph: Graph) -> dict[str, str]:
    """Node name -> its scale as text, the parts of a merged launch under their own names."""
    done = {name: attrs for node in graph.nodes for name, attrs in origins(node).items()}
    return {name: text for name, attrs in done.items() if (text := _scale(attrs))}


def _scale(attrs: Any) -> str:
    if isinstance(attrs, Rotation):
        return f"output_scale={attrs.output_scale:.9g}"
    if isinstance(attrs, Scale):
        return f"factor={attrs.factor:.9g}"
    if isinstance(attrs, Attention):
        scale = "tensor" if attrs.attn_scale is None else f"{attrs.attn_scale:.9g}"
        return f"attn_scale={scale}{' log2' if attrs.softmax_input_is_log2 else ''}"
    return ""
