"""A score_mod program on one tile of logits, and its derivative.

Truth values are booleans until arithmetic reads them, then 1 and 0; positions are floats.
The derivative is autograd's, on the tile alone, whatever grad or inference mode the caller is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ropegraph.engines.torch_executor.problem import Tile
from ropegraph.ir.score_mod import Instruction, Operand, Port, Ref, ScoreProgram

_ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {
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
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
    "pow": torch.pow,
    "mod": torch.fmod,
    "cmp_eq": torch.eq,
    "cmp_neq": torch.ne,
    "cmp_gt": torch.gt,
    "cmp_ge": torch.ge,
    "cmp_lt": torch.lt,
    "cmp_le": torch.le,
}

_LOGIC: dict[str, Callable[..., torch.Tensor]] = {
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
}


@dataclass(frozen=True)
class ScoreMod:
    """A program with the tensors that its ports read in one problem.

    ports: each expanded to [b, h_q, s_q, s_kv].  batch0: the problem's first batch in the graph.
    """

    program: ScoreProgram
    ports: Mapping[str, torch.Tensor]
    batch0: int = 0

    def apply(self, scores: torch.Tensor, tile: Tile) -> torch.Tensor:
        """The scores that replace ``scores``; a fresh tensor of the tile's shape."""
        result = self._run(scores, tile)
        index = self.program.result.index
        is_fresh = index < 0 or self.program.instructions[index].op != "identity"
        if result.shape == tile.shape and is_fresh:
            return result
        # Steps in place follow: a view of an operand will not do.
        return result.expand(tile.shape).clone(memory_format=torch.contiguous_format)

    def apply_with_pullback(
        self, scores: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """As ``apply``, and the map from a gradient of the result to one of ``scores``."""
        with torch.inference_mode(mode=False), torch.enable_grad():
            source = _plain(scores).requires_grad_()
            result = self._run(source, tile).expand(tile.shape)

        def pull(grad: torch.Tensor) -> torch.Tensor:
            if not result.requires_grad:
                return torch.zeros_like(grad)
            with torch.inference_mode(mode=False):
                return torch.autograd.grad(result, source, _plain(grad))[0]

        return result.detach().clone(memory_format=torch.contiguous_format), pull

    def _run(self, scores: torch.Tensor, tile: Tile) -> torch.Tensor:
        results: list[torch.Tensor] = []

        def read(operand: Operand) -> torch.Tensor:
            match operand:
                case Ref(index):
                    return scores if index < 0 else results[index]
                case Port(name):
                    part = self.ports[name][tile.b, tile.h, tile.rows, tile.columns]
                    return _plain(part.to(scores.dtype) if part.dtype != torch.bool else part)
                case number:
                    return scores.new_full((), number)

        for instruction in self.program.instructions:
            if instruction.op == "gen_index":
                results.append(self._positions(instruction, scores, tile))
            else:
                args = [read(a) for a in instruction.args]
                results.append(_evaluate(instruction.op, args, scores.dtype))
        return _as_number(read(self.program.result), scores.dtype)

    def _positions(self, what: Instruction, like: torch.Tensor, tile: Tile) -> torch.Tensor:
        axis = what.axis or 0
        start = (tile.b.start + self.batch0, tile.h.start, tile.row0, tile.col0)[axis]
        count = tile.shape[axis]
        index = torch.arange(start, start + count, device=like.device, dtype=like.dtype)
        return index.view([count if a == axis else 1 for a in range(4)])


def _evaluate(op: str, args: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if op in _LOGIC:
        return _LOGIC[op](*args)
    if op == "binary_select":
        chosen, other, mask = args
        return torch.where(mask != 0, _as_number(chosen, dtype), _as_number(other, dtype))
    numbers = [_as_number(a, dtype) for a in args]
    return numbers[0] if op == "identity" else _ARITHMETIC[op](*numbers)


def _as_number(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.dtype == torch.bool else x


def _plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` cut off from the caller's graph, in a form that autograd may save."""
    return x.clone() if x.is_inference() else x.detach()
