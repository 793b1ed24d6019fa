"""Tensor: the caller's handle on one edge of a graph that is still being recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropegraph.api.checks import as_count, as_dims, as_flag, as_name, as_strides
from ropegraph.dtypes import DType, as_dtype
from ropegraph.errors import GraphError
from ropegraph.ir.graph import row_major

if TYPE_CHECKING:
    from ropegraph.api.recording import Recorder


def settled_strides(dim: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, where an axis of length 1 steps over all that the axes to its right span.

    Such an axis is never stepped over: the stride it came with must not enter a plan or a key.
    """
    if 0 in dim:
        return row_major(dim)
    settled: list[int] = []
    step = 1
    for extent, given in zip(reversed(dim), reversed(stride), strict=True):
        settled.append(given if extent > 1 else step)
        step = max(step, given * extent) if extent > 1 else step
    return tuple(reversed(settled))


def packed_like(dim: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Packed strides whose axes are nested in the order that ``stride`` nests them."""
    if any(s == 0 and n > 1 for n, s in zip(dim, stride, strict=True)):
        return row_major(dim)
    settled = settled_strides(dim, stride)
    # Where strides are equal the left axis is the outer one.
    order = sorted(range(len(dim)), key=lambda i: (settled[i], -i))
    strides, step = [0] * len(dim), 1
    for axis in order:
        strides[axis] = step
        step *= max(dim[axis], 1)
    return tuple(strides)


@dataclass
class Spec:
    """What is declared about a tensor so far; the package reads it, callers use the setters.

    producer: the node that writes it.  constant: the number a host scalar carries.
    bound: the framework tensor it was made from, if any.  in_place_of: what it is written over.
    """

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    name: str = ""
    dtype: DType = DType.NOT_SET
    uid: int | None = None
    is_output: bool = False
    is_saved: bool = False
    pass_by_value: bool = False
    ragged_offset: Tensor | None = None
    ragged_multiplier: int = 1
    alignment: int = 1
    producer: str | None = None
    constant: int | None = None
    bound: Any = None
    in_place_of: Tensor | None = None


class Tensor:
    """A tensor of one graph: dims and strides in elements, and whether the caller binds it.

    Setters return the tensor, so that they chain: ``o.set_output(True).set_name("o")``.
    A tensor is real (bound at execute) after set_output(True) or set_uid, or if it is an input.
    Setters raise GraphError once the graph is built.
    """

    def __init__(self, recorder: Recorder, dim: tuple[int, ...], name: str = "") -> None:
        self.recorder = recorder
        self.spec = Spec(tuple(dim), row_major(dim), name)

    def __repr__(self) -> str:
        return f"Tensor({self.get_name()!r}, dim={list(self.spec.dim)}, {self.spec.dtype!r})"

    def _change(self) -> None:
        self.recorder.require_open(f"change tensor {self.get_name()!r}")

    def _refuse_if_read(self, change: str) -> None:
        """What a node writes depends on what it reads, so that must be settled before."""
        reader = self.recorder.reader(self)
        if reader is not None:
            raise GraphError(
                f"tensor {self.get_name()!r}: {change} is set after {reader!r} has read the "
                "tensor; set it before"
            )

    def set_output(self, is_output: bool = True) -> Tensor:
        """Make a written tensor one that the caller binds; False makes it virtual again."""
        self._change()
        wanted = as_flag(is_output, f"tensor {self.get_name()!r}: set_output")
        if wanted and self.spec.producer is None:
            raise GraphError(
                f"tensor {self.get_name()!r}: set_output(True) on an input; "
                "only what a node writes can be an output"
            )
        self.spec.is_output = wanted
        return self

    def set_saved(self, is_saved: bool = True) -> Tensor:
        """Export the tensor for backward_graph alone, in whatever form folding leaves it."""
        self._change()
        self.spec.is_saved = as_flag(is_saved, f"tensor {self.get_name()!r}: set_saved")
        return self

    def set_is_virtual(self, is_virtual: bool = True) -> Tensor:
        """The opposite of set_output; an input cannot be virtual."""
        where = f"tensor {self.get_name()!r}: is_virtual"
        wanted = as_flag(is_virtual, where)
        if wanted and self.spec.producer is None:
            raise GraphError(f"{where}=True, but no node writes it")
        return self.set_output(not wanted) if self.spec.producer else self

    def set_name(self, name: str) -> Tensor:
        self._change()
        self.spec.name = as_name(name, f"tensor {self.get_name()!r}: name")
        return self

    def set_uid(self, uid: int) -> Tensor:
        """Number the tensor; a written one becomes real by it. -1 unsets, duplicates raise."""
        self._change()
        self.spec.uid = self.recorder.claim_uid(self, uid)
        return self

    def set_data_type(self, data_type: object) -> Tensor:
        self._change()
        self.spec.dtype = as_dtype(data_type, f"tensor {self.get_name()!r}: data_type")
        return self

    def set_dim(self, dim: Iterable[int]) -> Tensor:
        """Declare the dims. Of a written tensor they must be those that the node gives it."""
        self._change()
        new = as_dims(dim, f"tensor {self.get_name()!r}: dim")
        if self.spec.producer is not None and new != self.spec.dim:
            raise GraphError(
                f"tensor {self.get_name()!r}: dim={list(new)}, "
                f"but {self.spec.producer!r} writes {list(self.spec.dim)}"
            )
        if new != self.spec.dim:
            self._refuse_if_read(f"dim={list(new)}")
            self.spec.dim, self.spec.stride = new, row_major(new)
        return self

    def set_stride(self, stride: Iterable[int]) -> Tensor:
        self._change()
        self.spec.stride = as_strides(stride, self.spec.dim, f"tensor {self.get_name()!r}: stride")
        return self

    def set_ragged_offset(self, offset: Tensor | None) -> Tensor:
        """offset: [b + 1, 1, 1, 1] int32 or int64, the first element of each sequence."""
        self._change()
        own = None if offset is None else self.recorder.adopt(offset, "ragged_offset")
        if own is not self.spec.ragged_offset:
            self._refuse_if_read("ragged_offset")
            self.spec.ragged_offset = own
        return self

    def set_ragged_offset_multiplier(self, multiplier: int) -> Tensor:
        self._change()
        where = f"tensor {self.get_name()!r}: ragged_offset_multiplier"
        self.spec.ragged_multiplier = as_count(multiplier, where, 1)
        return self

    def set_is_pass_by_value(self, value: bool = True) -> Tensor:
        self._change()
        where = f"tensor {self.get_name()!r}: is_pass_by_value"
        self.spec.pass_by_value = as_flag(value, where)
        return self

    def set_alignment_value(self, alignment: int) -> Tensor:
        self._change()
        where = f"tensor {self.get_name()!r}: alignment_value"
        self.spec.alignment = as_count(alignment, where, 1)
        return self

    def set_reordering_type(self, reordering: object) -> Tensor:
        self._change()
        if getattr(reordering, "name", str(reordering)) != "NONE":
            raise GraphError(
                f"tensor {self.get_name()!r}: reordering_type={reordering!r} is not supported; "
                "use tensor_reordering.NONE"
            )
        return self

    def get_name(self) -> str:
        return self.spec.name or self.recorder.default_name(self)

    def get_uid(self) -> int:
        return -1 if self.spec.uid is None else self.spec.uid

    def get_dim(self) -> list[int]:
        return list(self.spec.dim)

    def get_stride(self) -> list[int]:
        return list(self.spec.stride)

    def get_data_type(self) -> DType:
        """The declared data type; after validate() the inferred one."""
        return self.spec.dtype

    def get_is_virtual(self) -> bool:
        return not self.is_real

    def get_is_pass_by_value(self) -> bool:
        return self.spec.pass_by_value

    def get_ragged_offset(self) -> Tensor | None:
        return self.spec.ragged_offset

    def get_ragged_offset_multiplier(self) -> int:
        return self.spec.ragged_multiplier

    def get_alignment_value(self) -> int:
        return self.spec.alignment

    def get_is_output(self) -> bool:
        return self.spec.is_output

    @property
    def is_real(self) -> bool:
        """True if the caller binds it: an input, an output, or numbered by set_uid."""
        return self.spec.producer is None or self.spec.is_output or self.spec.uid is not None
