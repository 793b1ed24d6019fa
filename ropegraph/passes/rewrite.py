"""Rule, Edit, Decline: how a rewrite is written. A rule is pure; a "no" is an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ropegraph.ir.graph import Graph, Node


@dataclass(frozen=True)
class Edit:
    """Nodes to put in place of those with the same names, nodes to remove, and what was done."""

    nodes: tuple[Node[Any], ...] = ()
    removed: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Decline:
    """Why a rule leaves a node as it is, in one sentence."""

    reason: str


@dataclass(frozen=True)
class Decision:
    """What a rule did at a node (applied) or why it did nothing there."""

    rule: str
    node: str
    applied: bool
    text: str

    def __str__(self) -> str:
        mark = "folded  " if self.applied else "declined"
        return f"{mark} {self.rule:<16} {self.node}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """A named rewrite, tried at every node whose op is one of ``root``.

    apply(graph, node) gives Edit, Decline, or None where the rule has nothing to say.
    """

    name: str
    root: tuple[type[Any], ...]
    apply: Callable[[Graph, Node[Any]], Edit | Decline | None]

    def run(self, graph: Graph) -> tuple[Graph, tuple[Decision, ...]]:
        """Apply at every node until nothing changes; the declines are those of the last state."""
        applied: list[Decision] = []
        while True:
            declined: list[Decision] = []
            for node in graph.nodes:
                if not isinstance(node.attrs, self.root):
                    continue
                answer = self.apply(graph, node)
                if isinstance(answer, Edit):
                    graph = graph.edited(answer.nodes, answer.removed)
                    applied.append(Decision(self.name, node.name, applied=True, text=answer.note))
                    break
                if isinstance(answer, Decline):
                    declined.append(
                        Decision(self.name, node.name, applied=False, text=answer.reason)
                    )
            else:
                done = {d.node for d in applied}
                return graph, (*applied, *(d for d in declined if d.node not in done))
