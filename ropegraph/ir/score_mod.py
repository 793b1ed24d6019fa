"""A score_mod callback as data: a straight-line program over one block of logits.

The callback is traced once. What remains is this tuple of instructions, which engines evaluate,
printers print, serializers store and keys hash; the Python callable itself is never kept.
"""

from __future__ import annotations

from dataclasses import dataclass

UNARY = (
    "neg", "exp", "log", "tanh", "sigmoid", "abs", "sqrt", "rsqrt", "reciprocal", "relu",
    "sin", "cos", "floor", "ceil", "logical_not", "identity",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "max", "min", "pow", "mod",
    "cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le",
    "logical_and", "logical_or",
)  # fmt: skip
TERNARY = ("binary_select",)
INDEX = ("gen_index",)


@dataclass(frozen=True)
class Ref:
    """The result of instruction ``index``; index -1 is the incoming scores."""

    index: int


@dataclass(frozen=True)
class Port:
    """A tensor from outside, read through the node's port ``name``; it broadcasts to the scores."""

    name: str


Operand = Ref | Port | float


@dataclass(frozen=True)
class Instruction:
    """One pointwise operation on logits of shape [b, h_q, s_q, s_kv].

    gen_index reads no operand and gives the position along ``axis`` (0 b, 1 h, 2 row, 3 column).
    binary_select(a, b, mask) gives a where mask is true and b elsewhere.
    """

    op: str
    args: tuple[Operand, ...]
    axis: int | None = None


@dataclass(frozen=True)
class ScoreProgram:
    """Instructions in order, and the one whose result replaces the scores."""

    instructions: tuple[Instruction, ...]
    result: Ref

    @property
    def ports(self) -> tuple[str, ...]:
        """The ports it reads, in order of first use."""
        names = (a.name for i in self.instructions for a in i.args if isinstance(a, Port))
        return tuple(dict.fromkeys(names))


def softcap(cap: float) -> ScoreProgram:
    """cap * tanh(scores / cap), as Gemma 2 limits its logits."""
    return ScoreProgram(
        (
            Instruction("div", (Ref(-1), cap)),
            Instruction("tanh", (Ref(0),)),
            Instruction("mul", (Ref(1), cap)),
        ),
        Ref(2),
    )
