"""Where the boxes of a picture go: layers from top to bottom, few crossings, straight lines.

The way of Sugiyama, Tagawa and Toda (1981): layers by topological generations, waypoints where a
line passes a layer, then sweeps that put each thing near the mean of what it is connected to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations, pairwise
from typing import Any

GAP_X = 26.0
GAP_Y = 30.0
SWEEPS = 8
RELAXATIONS = 40
# How much more a bend between two waypoints weighs than one at a box.
STRAIGHT = 8.0


@dataclass(frozen=True)
class Layout:
    """Centres by id, every waypoint included, and the waypoints of each line between two ids."""

    centres: Mapping[str, tuple[float, float]]
    waypoints: Mapping[tuple[str, str], tuple[str, ...]]
    heights: Mapping[str, float]


def lay_out(sizes: Mapping[str, tuple[float, float]], lines: Sequence[tuple[str, str]]) -> Layout:
    """Place things of the given widths and heights.  lines: pairs of ids, each at most once."""
    nx: Any = import_module("networkx")
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(sizes)
    graph.add_edges_from(lines)
    rank: dict[str, int] = {}
    for i, generation in enumerate(nx.topological_generations(graph)):
        rank.update(dict.fromkeys(generation, i))
    for name in sizes:
        # What nothing leads to stands right above its first reader.
        if not graph.in_degree(name) and graph.out_degree(name):
            rank[name] = min(rank[after] for after in graph.successors(name)) - 1
    waypoints = {line: _add_waypoints(graph, rank, *line) for line in lines}
    place = {name: i for i, name in enumerate(graph.nodes)}
    layers: list[list[str]] = [[] for _ in range(1 + max(rank.values(), default=0))]
    for name in nx.lexicographical_topological_sort(graph, key=place.__getitem__):
        layers[rank[name]].append(name)
    layers = _untangled([layer for layer in layers if layer], graph)
    width = {name: sizes.get(name, (4.0, 0.0))[0] for name in graph.nodes}
    across = _across(layers, graph, width)
    centres: dict[str, tuple[float, float]] = {}
    heights: dict[str, float] = {}
    top = 0.0
    for layer in layers:
        tall = max(sizes.get(name, (0.0, 0.0))[1] for name in layer)
        for name in layer:
            centres[name] = across[name], top + tall / 2
            heights[name] = sizes[name][1] if name in sizes else tall
        top += tall + GAP_Y
    return Layout(centres, waypoints, heights)


def _add_waypoints(graph: Any, rank: dict[str, int], source: str, target: str) -> tuple[str, ...]:
    """Cut a line that spans several layers into one piece a layer, shared with its siblings."""
    between = range(rank[source] + 1, rank[target])
    made = {f"{source}@{layer}": layer for layer in between}
    if made:
        graph.remove_edge(source, target)
        graph.add_edges_from(pairwise((source, *made, target)))
        rank.update(made)
    return tuple(made)


def _untangled(layers: list[list[str]], graph: Any) -> list[list[str]]:
    """The order within each layer with the fewest crossings that a few sweeps find."""
    best, fewest = layers, _crossings(layers, graph)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        towards = graph.predecessors if down else graph.successors
        layers = [list(layer) for layer in layers]
        spot = {name: float(i) for layer in layers for i, name in enumerate(layer)}
        for layer in layers if down else layers[::-1]:
            layer.sort(key=lambda name: _mean(towards(name), spot))
            spot.update({name: float(i) for i, name in enumerate(layer)})
        if (found := _crossings(layers, graph)) < fewest:
            best, fewest = layers, found
    return best


def _mean(names: Any, spot: Mapping[str, float]) -> float:
    found = [spot[name] for name in names]
    return sum(found) / len(found) if found else 0.0


def _crossings(layers: list[list[str]], graph: Any) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        spot = {name: i for i, name in enumerate(lower)}
        ends = [[spot[after] for after in graph.successors(name)] for name in upper]
        count += sum(a > b for left, right in combinations(ends, 2) for a in left for b in right)
    return count


def _across(layers: list[list[str]], graph: Any, width: Mapping[str, float]) -> dict[str, float]:
    """Horizontal centres: near what each is connected to, never closer than the gap."""
    x: dict[str, float] = {}
    for layer in layers:
        x.update(_spread(layer, width, lambda _: 0.0))

    def wish(name: str) -> float:
        near = [*graph.predecessors(name), *graph.successors(name)]
        weights = [STRAIGHT if "@" in name and "@" in other else 1.0 for other in near]
        total = sum(w * x[other] for w, other in zip(weights, near, strict=True))
        return total / sum(weights) if near else x[name]

    for i in range(RELAXATIONS):
        for layer in layers if i % 2 else layers[::-1]:
            x.update(_spread(layer, width, wish))
    left = min(x[name] - width[name] / 2 for name in x)
    return {name: at - left for name, at in x.items()}


def _spread(
    layer: list[str], width: Mapping[str, float], wish: Callable[[str], float]
) -> dict[str, float]:
    """The centres nearest to the wishes, in least squares, that keep order and gaps.

    Without its share of widths and gaps each centre may equal the one before: pooling those that
    would be out of order (isotonic regression) is the exact answer.
    """
    offset, offsets = 0.0, [0.0]
    for one, other in pairwise(layer):
        offset += (width[one] + width[other]) / 2 + GAP_X
        offsets.append(offset)
    pools: list[tuple[float, int]] = []
    for name, off in zip(layer, offsets, strict=True):
        total, count = wish(name) - off, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, number = pools.pop()
            total, count = total + before, count + number
        pools.append((total, count))
    bases = [total / count for total, count in pools for _ in range(count)]
    return {name: b + off for name, b, off in zip(layer, bases, offsets, strict=True)}
