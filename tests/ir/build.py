"""Graphs put together by hand, with no recording API in between."""

from collections.abc import Iterable
from typing import Any

from ropegraph.dtypes import DType
from ropegraph.ir.graph import Graph, Node, Value
from ropegraph.ir.ops import Op, Rope, RopeBackward, Scale, Sdpa, SdpaBackward, Sum
from ropegraph.ir.shapes import infer

Dim = tuple[int, ...]


def row_major(dim: Dim) -> Dim:
    strides, step = [], 1
    for extent in reversed(dim):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def value(name: str, dim: Dim, dtype: DType = DType.FLOAT, **rest: Any) -> Value:
    return Value(name, dim, rest.pop("stride", row_major(dim)), dtype, **rest)


class Build:
    """Nodes in the order of the calls; every method returns the name of what it made.

    An input is made at its first mention by ``tensor``; ``dtype`` is that of all data.
    """

    def __init__(self, dtype: DType = DType.FLOAT, **settings: Any) -> None:
        self.dtype, self.settings = dtype, {"fold": "q", **settings}
        self.values: dict[str, Value] = {}
        self.nodes: list[Node[Op]] = []

    def tensor(self, name: str, *dim: int, dtype: DType | None = None, **rest: Any) -> str:
        self.values[name] = value(name, dim, dtype or self.dtype, **rest)
        return name

    def node(self, name: str, attrs: Op, inputs: dict[str, str], outputs: dict[str, str]) -> None:
        dims = infer(name, attrs, {port: self.values[v].dim for port, v in inputs.items()})
        for port, made in outputs.items():
            self.tensor(made, *dims[port])
        self.nodes.append(Node(name, attrs, inputs, outputs))

    def rope(self, name: str, x: str, out: str, **attrs: Any) -> str:
        return self._rotate(Rope, name, ("input", "output"), x, out, attrs)

    def rope_backward(self, name: str, dy: str, out: str, **attrs: Any) -> str:
        return self._rotate(RopeBackward, name, ("dY", "dX"), dy, out, attrs)

    def _rotate(
        self, kind: Any, name: str, ports: tuple[str, str], x: str, out: str, attrs: dict[str, Any]
    ) -> str:
        op = kind(**{"rope_dim": self.values[x].dim[3], "rope_offset": 0, **attrs})
        table = "freqs" if op.rope_dim == 8 else f"freqs{op.rope_dim}"
        if table not in self.values:
            self.tensor(table, 16, 1, 1, op.rope_dim, dtype=DType.FLOAT)
        self.node(name, op, {ports[0]: x, "freqs": table}, {ports[1]: out})
        return out

    def scale(self, name: str, x: str, out: str, factor: float) -> str:
        self.node(name, Scale(factor), {"input": x}, {"output": out})
        return out

    def sum(self, name: str, terms: Iterable[str], out: str) -> str:
        self.node(name, Sum(), {str(i): t for i, t in enumerate(terms)}, {"output": out})
        return out

    def sdpa(self, name: str, q: str, k: str, v: str, out: str = "o", **attrs: Any) -> str:
        ports = {"q": q, "k": k, "v": v, **attrs.pop("ports", {})}
        outputs = {"O": out, **({"Stats": attrs.pop("stats")} if "stats" in attrs else {})}
        self.node(name, Sdpa(**attrs), ports, outputs)
        return out

    def sdpa_backward(
        self, name: str, q: str, k: str, v: str, grads: dict[str, str], **attrs: Any
    ) -> None:
        """grads: dQ, dK, dV (any of them) -> the value written. o, do, stats are made here."""
        (b, h, s, _), d_v = self.values[q].dim, self.values[v].dim[3]
        for given, dim in (("o", (b, h, s, d_v)), ("do", (b, h, s, d_v)), ("stats", (b, h, s, 1))):
            if given not in self.values:
                self.tensor(given, *dim)
        ports = {"q": q, "k": k, "v": v, "o": "o", "dO": "do", "stats": "stats"}
        self.node(name, SdpaBackward(**attrs), ports | attrs.pop("ports", {}), grads)

    def graph(self, *visible: str, saved: Iterable[str] = (), name: str = "g") -> Graph:
        """The graph, in which the caller binds ``visible``."""
        return Graph(
            name,
            dict(self.values),
            tuple(self.nodes),
            visible=frozenset(visible),
            saved=frozenset(saved),
            **self.settings,
        ).without_unused_values()


def rotated(dtype: DType = DType.FLOAT, **settings: Any) -> Build:
    """rope_q and rope_k over GQA heads: q, k -> q_rot, k_rot; and v."""
    b = Build(dtype, **settings)
    b.tensor("q", 2, 6, 5, 8), b.tensor("k", 2, 2, 7, 8), b.tensor("v", 2, 3, 7, 4)
    b.rope("rope_q", "q", "q_rot")
    b.rope("rope_k", "k", "k_rot")
    return b


def forward(attn_scale: float = 0.25, dtype: DType = DType.FLOAT, **settings: Any) -> Build:
    """``rotated`` and attn: q_rot, k_rot, v -> o."""
    b = rotated(dtype, **settings)
    b.sdpa("attn", "q_rot", "k_rot", "v", attn_scale=attn_scale)
    return b


def backward(attn_scale: float = 0.25, dtype: DType = DType.FLOAT, **settings: Any) -> Build:
    """The gradients of ``forward``: q_rot, k_rot, v, o, do, stats -> dq, dk, dv."""
    b = Build(dtype, **settings)
    b.tensor("q_rot", 2, 6, 5, 8), b.tensor("k_rot", 2, 2, 7, 8), b.tensor("v", 2, 3, 7, 4)
    _gradients(b, "attn", attn_scale)
    return b


def joint(attn_scale: float = 0.25, dtype: DType = DType.FLOAT, **settings: Any) -> Build:
    """``forward`` and its gradients in one graph: nothing comes from another graph's fold."""
    b = rotated(dtype, **settings)
    b.sdpa("attn", "q_rot", "k_rot", "v", stats="stats", attn_scale=attn_scale)
    _gradients(b, "bwd", attn_scale)
    return b


def _gradients(b: Build, name: str, attn_scale: float) -> None:
    grads = {"dQ": "dq_rot", "dK": "dk_rot", "dV": "dv"}
    b.sdpa_backward(name, "q_rot", "k_rot", "v", grads, attn_scale=attn_scale)
    b.rope_backward("rope_q_b", "dq_rot", "dq")
    b.rope_backward("rope_k_b", "dk_rot", "dk")
