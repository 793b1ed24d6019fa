"""Which operations have a gradient, and by which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ropegraph.api.gradients import attention, linear, mla, norm, rotation
from ropegraph.api.gradients.forward import Forward, through_cache
from ropegraph.api.gradients.tape import Tape
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.ops import Matmul, MlaKvRope, Op, RmsNorm, Rope, Scale, Sdpa, SplitQkv, op_name


class Rule(NamedTuple):
    """The gradient of one kind of node.

    needs: what it reads of the forward; raises GraphError where the forward does not give that.
    record: takes the gradients of the outputs off the tape and puts those of the inputs on it.
    """

    needs: Callable[[Forward, RecordedNode], list[Tensor]]
    record: Callable[[Tape, RecordedNode], None]


RULES: dict[type[Op], Rule] = {
    Rope: Rule(rotation.needs, rotation.record),
    Sdpa: Rule(attention.needs, attention.record),
    RmsNorm: Rule(norm.needs, norm.record),
    MlaKvRope: Rule(mla.needs, mla.record),
    Scale: Rule(linear.nothing, linear.scale),
    SplitQkv: Rule(linear.nothing, linear.split),
    Matmul: Rule(linear.factors, linear.matmul),
}


def rule_of(node: RecordedNode) -> Rule:
    """The rule for a node.  Raises GraphError if no gradient goes through it."""
    if writes_cache(node):
        raise through_cache(node)
    rule = RULES.get(type(node.attrs))
    if rule is None:
        raise GraphError(
            f"backward_graph: {op_name(node.attrs)} {node.name!r} has no gradient of its own; "
            "derive from a forward graph"
        )
    return rule
