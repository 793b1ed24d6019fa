"""A traced score_mod, evaluated in fp64 on the whole matrix of logits.

Comparisons and logical operations give 1.0 or 0.0; anything but 0 counts as true. ``mod`` keeps
the sign of its first operand, as C's fmod and cuDNN do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ropegraph.ir.score_mod import Operand, Port, Ref, ScoreProgram

_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "logical_not": lambda a: (a == 0).double(),
    "identity": lambda a: a,
}
_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "pow": torch.pow,
    "mod": torch.fmod,
    "cmp_eq": lambda a, b: (a == b).double(),
    "cmp_neq": lambda a, b: (a != b).double(),
    "cmp_gt": lambda a, b: (a > b).double(),
    "cmp_ge": lambda a, b: (a >= b).double(),
    "cmp_lt": lambda a, b: (a < b).double(),
    "cmp_le": lambda a, b: (a <= b).double(),
    "logical_and": lambda a, b: ((a != 0) & (b != 0)).double(),
    "logical_or": lambda a, b: ((a != 0) | (b != 0)).double(),
}


def evaluate(program: ScoreProgram, scores: Tensor, ports: Mapping[str, Tensor]) -> Tensor:
    """The modified logits [b, h_q, s_q, s_kv]; differentiable in ``scores`` and ``ports``."""
    results: list[Tensor] = []

    def read(operand: Operand) -> Tensor:
        if isinstance(operand, Ref):
            return scores if operand.index == -1 else results[operand.index]
        if isinstance(operand, Port):
            return ports[operand.name]
        return torch.tensor(operand, dtype=torch.float64, device=scores.device)

    for instruction in program.instructions:
        args = [read(operand) for operand in instruction.args]
        if instruction.op == "gen_index":
            results.append(_positions(scores, instruction.axis or 0))
        elif instruction.op == "binary_select":
            results.append(torch.where(args[2] != 0, args[0], args[1]))
        elif len(args) == 1:
            results.append(_ONE[instruction.op](args[0]))
        else:
            results.append(_TWO[instruction.op](args[0], args[1]))
    return read(program.result).expand(scores.shape)


def _positions(scores: Tensor, axis: int) -> Tensor:
    """The index along ``axis``, shaped to broadcast to the scores."""
    shape = [1, 1, 1, 1]
    shape[axis] = scores.shape[axis]
    index = torch.arange(scores.shape[axis], dtype=torch.float64, device=scores.device)
    return index.reshape(shape)
