"""What a pass made of a graph, and why it left the rest: as text."""

import re

from ropegraph.ir.graph import Graph
from ropegraph.ir.verify import verify
from ropegraph.passes.rewrite import Rule


def nodes(graph: Graph) -> list[str]:
    """The lines of str(graph) that are nodes, without data types, dims and whole-head widths."""
    lines = [line.strip() for line in str(graph).split("\n") if " = " in line]
    plain = [re.sub(r": \w+ \[[\d, ]*\]", "", line) for line in lines]
    return [line.replace("rope_dim=8, rope_offset=0, ", "") for line in plain]


def run(rule: Rule, graph: Graph) -> Graph:
    """The graph after one pass; a second run of it must change nothing."""
    after, _ = rule.run(graph)
    verify(after, after=rule.name)
    again, decisions = rule.run(after)
    assert again == after
    assert not [d for d in decisions if d.applied]
    return after


def done(rule: Rule, graph: Graph) -> list[str]:
    """What the pass did, a line a node."""
    return [f"{d.node}: {d.text}" for d in rule.run(graph)[1] if d.applied]


def declines(rule: Rule, graph: Graph) -> dict[str, str]:
    """Why the pass left nodes as they are; it must not have changed any."""
    after, decisions = rule.run(graph)
    assert after == graph
    return {d.node: d.text for d in decisions if not d.applied}
