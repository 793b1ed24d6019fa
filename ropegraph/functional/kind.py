"""What one differentiable operation is: its tensors, its attributes, and how it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.api.tensor import Tensor, packed_like
from ropegraph.errors import GraphError

Forms = Mapping[str, Form]
Attributes = Mapping[str, Any]
# A name and its type in the schema of a torch operator.
Attribute = tuple[str, str]

TABLES = ("freqs", "cos", "sin", "cos_sin", "inv_freq")
POSITIONS = ("position_ids", "start_positions")
NORMS = ("q_norm", "k_norm")
ROTATION: tuple[Attribute, ...] = (
    ("rope_dim", "int"),
    ("rope_offset", "int?"),
    ("interleaved", "bool"),
    ("interleaved_output", "bool?"),
    ("attention_factor", "float"),
    ("inverse", "bool"),
    ("half_width", "bool"),
    ("table_layout", "str?"),
    ("angle_precision", "str"),
    ("numerics", "str"),
)
Record = Callable[[pygraph, Forms, Attributes, Forms], dict[str, Tensor]]
RecordTurn = Callable[[pygraph, Forms, Attributes, tuple[float, float]], dict[str, Tensor]]


class Shapes(Protocol):
    """The forms of the results; see Kind.forms."""

    def __call__(
        self, forms: Forms, attributes: Attributes, *, training: bool
    ) -> dict[str, Form]: ...


@dataclass(frozen=True, eq=False)
class Kind:
    """An operation on tensors in slots: those of ``data`` are always there, the others may be None.

    results: what the forward gives, the caller's first, then what the backward needs.
    gradients: slots that have a gradient.  turned: slot -> the result that is its rotation, which
    the backward reads in its place, or beside it where a norm came before.
    forms: (forms of the slots, attributes, whether a gradient will be asked for) -> forms of the
    results there are. It also serves fake tensors, whose sizes are symbols.
    record: (graph, forms of the slots, attributes, forms of the results) -> the results recorded.
    turn: (graph, forms, attributes, factors of q and k) -> the rotations alone; None where nothing
    is ever made again.
    settings: attributes -> keywords of pygraph.
    linear: in the first slot, so that its gradient has a gradient, and so on.
    reads_result: whether the backward reads the first result.
    in_place: the last attribute says whether the first slot may be written over.
    changes: slots that are written over in any case. What has some has no gradients.
    """

    name: str
    data: tuple[str, ...]
    optional: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    results: tuple[str, ...]
    gradients: tuple[str, ...]
    turned: Mapping[str, str]
    forms: Shapes
    record: Record
    turn: RecordTurn | None = None
    settings: Callable[[Attributes], dict[str, Any]] = lambda _: {}
    linear: bool = False
    reads_result: bool = True
    in_place: bool = False
    changes: tuple[str, ...] = ()

    @cached_property
    def slots(self) -> tuple[str, ...]:
        return (*self.data, *self.optional)

    @cached_property
    def gradient_slots(self) -> tuple[int, ...]:
        """The places of ``gradients`` among the slots."""
        return tuple(map(self.slots.index, self.gradients))

    @cached_property
    def _constant_slots(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.slots) if name not in self.gradients)

    def named(self, attributes: tuple[Any, ...]) -> dict[str, Any]:
        """Attributes by name, from their order."""
        return dict(zip((name for name, _ in self.attributes), attributes, strict=True))

    def refuse_gradients(self, needs: tuple[bool, ...]) -> None:
        """Raise GraphError if a gradient is asked for of a slot that has none."""
        for i in self._constant_slots:
            if needs[i]:
                name = self.slots[i]
                if not self.gradients:
                    raise GraphError(
                        f"{self.name}: {name} requires grad, but nothing has a gradient here; call "
                        "it within torch.no_grad() or torch.inference_mode()"
                    )
                raise GraphError(
                    f"{self.name}: {name} requires grad but has no gradient; what has one is "
                    f"{', '.join(self.gradients)}; give {name}.detach()"
                )


def fresh(like: Form, dim: tuple[int, ...] | None = None) -> Form:
    """A packed tensor whose axes are nested in memory as those of ``like``, of other dims or not.

    So that heads which lie [b, s, h, d] in memory give results, and gradients, which do too.
    """
    dim = like.dim if dim is None else dim
    return like._replace(dim=dim, stride=packed_like(dim, like.stride))


def declare(graph: pygraph, forms: Forms, *names: str) -> dict[str, Tensor]:
    """The graph's inputs for the slots of these names that are given."""
    return {
        name: graph.tensor(forms[name].dim, forms[name].stride, forms[name].dtype, name=name)
        for name in names
        if name in forms
    }


def rotation(where: str, attributes: Attributes, width: int) -> dict[str, Any]:
    """The attributes that are keywords of pygraph.rope.

    Raises GraphError where a part of ``width`` channels turns and nothing says which: models of
    Hugging Face turn the first ones, cuDNN the last.
    """
    r = attributes["rope_dim"]
    if isinstance(r, int) and 0 < r < width and attributes["rope_offset"] is None:
        raise GraphError(
            f"{where}: rope_dim={r} of heads {width} wide: say which channels turn, rope_offset=0 "
            f"for the first (Hugging Face, TransformerEngine) or rope_offset={width - r} for the "
            "last (cuDNN)"
        )
    return {name: attributes[name] for name, _ in ROTATION}


def has_angles(forms: Container[str]) -> bool:
    """True if anything is rotated."""
    return any(name in forms for name in TABLES)


def has_norms(forms: Container[str]) -> bool:
    """True if Q and K are normalised."""
    return "q_norm" in forms or "k_norm" in forms


def is_prepared(forms: Container[str]) -> bool:
    """True if attention reads what is made of Q and K, normalised or rotated or both."""
    return has_angles(forms) or has_norms(forms)


def widest(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics of data of this type."""
    return torch.float64 if dtype is torch.float64 else torch.float32
