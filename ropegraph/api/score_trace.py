"""Trace a score_mod callback once into a ScoreProgram: the callable itself is not kept."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from ropegraph.api.checks import as_count, as_number, refuse_unknown
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir import score_mod as ir

# FE's names of the operands, in order.
_AB, _INPUTS, _COMPARED = ("a", "b"), ("input0", "input1"), ("input", "comparison")
_KEYWORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "logical_and", "logical_or"), _AB),
    **dict.fromkeys(("max", "min", "pow", "mod"), _INPUTS),
    **dict.fromkeys((n for n in ir.BINARY if n.startswith("cmp_")), _COMPARED),
    **dict.fromkeys(ir.UNARY, ("input",)),
    "binary_select": ("input0", "input1", "mask"),
}
# What FE's relu takes beside its input, and what its pointwise methods take for the engine.
_RELU: dict[str, None] = dict.fromkeys(("negative_slope", "lower_clip", "upper_clip"))
_HINTS = ("name", "compute_data_type")


class Score:
    """A value inside a score_mod callback: shaped like the scores, [b, h_q, s_q, s_kv]."""

    def __init__(self, trace: ScoreTrace, ref: ir.Ref) -> None:
        self.trace, self.ref = trace, ref

    def set_data_type(self, data_type: object) -> Score:
        """Accepted as in FE; the program runs in the compute type of the node."""
        return self

    def set_output(self, is_output: bool) -> Score:
        if is_output:
            raise GraphError(
                f"{self.trace.where}: score_mod: a value inside the callback cannot be an output"
            )
        return self

    def set_name(self, name: str) -> Score:
        return self

    def get_dim(self) -> list[int]:
        return list(self.trace.dim)


class ScoreTrace:
    """The graph a score_mod callback sees: FE's pointwise names, tensor or host operands."""

    def __init__(
        self, where: str, dim: tuple[int, ...], adopt: Callable[[Any, str], Tensor]
    ) -> None:
        self.where, self.dim, self.adopt = where, dim, adopt
        self.instructions: list[ir.Instruction] = []
        self.ports: dict[str, Tensor] = {}

    def __getattr__(self, op: str) -> Callable[..., Score]:
        if op in _KEYWORDS:
            return lambda *args, **kwargs: self._pointwise(op, *args, **kwargs)
        known = ", ".join((*ir.UNARY, *ir.BINARY, *ir.TERNARY, *ir.INDEX))
        raise GraphError(f"{self.where}: score_mod calls {op!r}, which is none of {known}")

    def gen_index(
        self,
        input: object = None,  # noqa: A002 - FE's name
        axis: int = 3,
        compute_data_type: object = None,
        name: str = "",
    ) -> Score:
        """The position of each score along ``axis``: 0 batch, 1 head, 2 query, 3 key."""
        chosen = as_count(axis, f"{self.where}: score_mod gen_index axis")
        if chosen > 3:
            raise GraphError(f"{self.where}: score_mod gen_index axis={axis}; use 0 to 3")
        return self._add(ir.Instruction("gen_index", (), chosen))

    def _pointwise(self, op: str, *args: Any, **kwargs: Any) -> Score:
        names = _KEYWORDS[op]
        repeated = [name for name in names[: len(args)] if name in kwargs]
        given = dict(zip(names, args, strict=False)) | kwargs
        if repeated or len(args) > len(names) or not set(names) <= set(given):
            raise GraphError(
                f"{self.where}: score_mod {op} takes {', '.join(names)}, once each; got "
                f"{len(args)} by position and {sorted(kwargs)} by name"
            )
        rest = {n: value for n, value in given.items() if n not in (*names, *_HINTS)}
        defaults: dict[str, None] = _RELU if op == "relu" else {}
        refuse_unknown(f"{self.where}: score_mod {op}", rest, defaults)
        operands = tuple(self._operand(op, given[name]) for name in names)
        return self._add(ir.Instruction(op, operands))

    def _add(self, instruction: ir.Instruction) -> Score:
        self.instructions.append(instruction)
        return Score(self, ir.Ref(len(self.instructions) - 1))

    def _number(self, op: str, given: float) -> float:
        """A finite number, or an infinity, which masks."""
        if given in (inf, -inf):
            return given
        return as_number(given, f"{self.where}: score_mod {op} operand")

    def _operand(self, op: str, given: Any) -> ir.Operand:
        if isinstance(given, Score):
            if given.trace is not self:
                raise GraphError(f"{self.where}: score_mod {op} reads a value of another callback")
            return given.ref
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            return self._number(op, given)
        tensor = self.adopt(given, f"{self.where}: score_mod {op} operand")
        dim = tensor.get_dim()
        if len(dim) != 4 or any(n not in (1, m) for n, m in zip(dim, self.dim, strict=True)):
            raise GraphError(
                f"{self.where}: score_mod {op} operand {dim} does not broadcast to the scores "
                f"{list(self.dim)}"
            )
        for port, known in self.ports.items():
            if known is tensor:
                return ir.Port(port)
        port = f"score_mod.{len(self.ports)}"
        self.ports[port] = tensor
        return ir.Port(port)


def trace(
    where: str,
    callback: Callable[[Any, Any], Any],
    dim: tuple[int, ...],
    adopt: Callable[[Any, str], Tensor],
) -> tuple[ir.ScoreProgram, dict[str, Tensor]]:
    """The program that ``callback(graph, scores)`` records, and the tensors it reads by port."""
    if not callable(callback):
        raise GraphError(f"{where}: score_mod={callback!r:.60} is no function of (graph, scores)")
    graph = ScoreTrace(where, dim, adopt)
    try:
        result = callback(graph, Score(graph, ir.Ref(-1)))
    except TypeError as error:
        raise GraphError(
            f"{where}: score_mod failed: {error}; inside it the graph's methods compute, as in "
            "graph.mul(scores, 2.0)"
        ) from error
    if not isinstance(result, Score) or result.trace is not graph:
        raise GraphError(
            f"{where}: score_mod returned {result!r:.60}; return a value computed from its scores"
        )
    return ir.ScoreProgram(tuple(graph.instructions), result.ref), graph.ports
