"""The mutable half of a graph: tensors and nodes as they are recorded, until they are frozen."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ropegraph.api.checks import as_count, as_dims, as_name
from ropegraph.api.tensor import Tensor, packed_like
from ropegraph.dtypes import DType, as_dtype
from ropegraph.errors import GraphError
from ropegraph.execution.overlap import refuse_negative_strides
from ropegraph.ir.graph import Graph, is_in_place
from ropegraph.ir.ops import NAMES, Op, op_name
from ropegraph.ir.shapes import infer


@dataclass
class RecordedNode:
    """One op as the caller wrote it; ports lead to handles."""

    name: str
    attrs: Op
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Recorder:
    """Tensors and nodes in the order of recording; freeze.py turns them into an ir.Graph."""

    def __init__(self, name: str, io: DType, compute: DType) -> None:
        self.name, self.io, self.compute = name, io, compute
        self.tensors: list[Tensor] = []
        self.nodes: list[RecordedNode] = []
        self.closed_by = ""
        self._adopted: dict[int, tuple[object, Tensor]] = {}

    def require_open(self, action: str) -> None:
        """Raise GraphError if the graph can no longer change."""
        if self.closed_by:
            raise GraphError(
                f"graph {self.name!r}: cannot {action} after {self.closed_by}; "
                "record everything first, or start a new graph"
            )

    def add_tensor(self, dim: object, name: str = "") -> Tensor:
        self.require_open("add a tensor")
        name = as_name(name, "tensor: name")
        tensor = Tensor(self, as_dims(dim, f"tensor {name!r}: dim"), name)
        self.tensors.append(tensor)
        return tensor

    def host_integer(self, number: int) -> Tensor:
        """A host scalar that carries its own value."""
        tensor = self.add_tensor([1, 1, 1, 1])
        tensor.set_data_type(DType.INT64).set_is_pass_by_value(True)
        tensor.spec.constant = number
        return tensor

    def add_like(self, template: Any, name: str = "", where: str = "tensor_like") -> Tensor:
        """A handle with the dims, strides and data type of a framework or graph tensor."""
        if isinstance(template, Tensor):
            tensor = self.add_tensor(template.get_dim(), name)
            tensor.spec.stride, tensor.spec.dtype = (
                tuple(template.get_stride()),
                template.get_data_type(),
            )
            return tensor
        array = _as_torch(template, where)
        dtype = as_dtype(array.dtype, f"{where}: data_type")
        tensor = self.add_tensor(array.shape, name)
        return tensor.set_stride(array.stride()).set_data_type(dtype)

    def adopt(self, given: Any, where: str) -> Tensor:
        """The handle for an argument: the caller's own, or one bound to a framework tensor."""
        if isinstance(given, Tensor):
            if given.recorder is not self:
                raise GraphError(f"{where}: tensor {given.get_name()!r} belongs to another graph")
            return given
        if isinstance(given, torch.Tensor) or hasattr(given, "__dlpack__"):
            if id(given) not in self._adopted:
                tensor = self.add_like(given, where=where)
                tensor.spec.bound = given.detach() if isinstance(given, torch.Tensor) else given
                # The pair keeps the object alive, so that its id stays its own.
                self._adopted[id(given)] = given, tensor
            return self._adopted[id(given)][1]
        raise GraphError(f"{where}={given!r:.60} is not a tensor of this graph or a torch tensor")

    def adopt_all(self, given: Mapping[str, Any], where: str) -> dict[str, Tensor]:
        """The handles of several arguments, by port."""
        return {port: self.adopt(tensor, f"{where}: {port}") for port, tensor in given.items()}

    def node_name(self, kind: type[Op], given: object) -> str:
        """The caller's name, or ``<op>.<n>``.  Raises GraphError on a duplicate."""
        taken, word = {n.name for n in self.nodes}, NAMES[kind]
        name = as_name(given, f"{word}: name")
        if name in taken:
            raise GraphError(f"{word} {name!r}: another node has that name")
        if name:
            return name
        count = sum(isinstance(n.attrs, kind) for n in self.nodes)
        while f"{word}.{count}" in taken:
            count += 1
        return f"{word}.{count}"

    def record(
        self,
        attrs: Op,
        name: str,
        inputs: Mapping[str, Tensor],
        outputs: tuple[str, ...],
        given: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Add a node and its output tensors.  given: output handles that the caller made.

        Raises GraphError, and leaves the graph as it was, if a shape does not fit.
        """
        self.require_open(f"record {op_name(attrs)}")
        name = self.node_name(type(attrs), name)
        dims = infer(name, attrs, {p: tuple(t.get_dim()) for p, t in inputs.items()})
        made: dict[str, Tensor] = {}
        for port in outputs:
            tensor = (given or {}).get(port)
            if tensor is None:
                tensor = Tensor(self, dims[port])
            elif tuple(tensor.get_dim()) != dims[port]:
                raise GraphError(
                    f"{op_name(attrs)} {name!r}: {port} is {tensor.get_dim()}; "
                    f"use {list(dims[port])}"
                )
            made[port] = tensor
        for port, tensor in made.items():
            tensor.spec.producer = name
            if port in (given or {}):
                tensor.spec.is_output = True
            else:
                self.tensors.append(tensor)
        self.nodes.append(RecordedNode(name, attrs, dict(inputs), made))
        return made

    @contextmanager
    def all_or_none(self) -> Generator[None]:
        """What is recorded inside stays only if all of it can be: else the graph is as it was."""
        nodes, tensors, adopted = len(self.nodes), len(self.tensors), dict(self._adopted)
        try:
            yield
        except BaseException:
            del self.nodes[nodes:], self.tensors[tensors:]
            self._adopted = adopted
            raise

    def producer(self, tensor: Tensor) -> RecordedNode | None:
        """The node that writes a tensor, None for an input."""
        return next((n for n in self.nodes if n.name == tensor.spec.producer), None)

    def reader(self, tensor: Tensor) -> str | None:
        """The first node that reads a tensor, None if no node does so far."""
        return next((n.name for n in self.nodes if tensor in n.inputs.values()), None)

    def claim_uid(self, tensor: Tensor, uid: int) -> int | None:
        """The uid to store, None for -1.  Raises GraphError if another tensor has it."""
        number = as_count(uid, f"tensor {tensor.get_name()!r}: uid", -1)
        if number == -1:
            return None
        for other in self.tensors:
            if other is not tensor and other.get_uid() == number:
                raise GraphError(
                    f"tensor {tensor.get_name()!r}: uid={number} belongs to {other.get_name()!r}; "
                    "use another"
                )
        return number

    def default_name(self, tensor: Tensor) -> str:
        """``<node>::<port>`` of its producer, else of its first reader, else ``tensor.<n>``."""
        for node in self.nodes:
            for port, other in node.outputs.items():
                if other is tensor:
                    generic = port in ("output", "dX")
                    return f"{node.name}::{'OUT_0' if generic else port}"
        for node in self.nodes:
            for port, other in node.inputs.items():
                if other is tensor:
                    return f"{node.name}::{port}"
        for other in self.tensors:
            if other.get_ragged_offset() is tensor:
                return f"{other.get_name()}::ragged_offset"
        index = next((i for i, t in enumerate(self.tensors) if t is tensor), len(self.tensors))
        return f"tensor.{index}"

    def names(self) -> dict[Tensor, str]:
        """A name of its own for every tensor; a repeated one gets ``#<n>``."""
        found: dict[Tensor, str] = {}
        taken: set[str] = set()
        for tensor in self.tensors:
            name, count = tensor.get_name(), 1
            while name in taken:
                count += 1
                name = f"{tensor.get_name()}#{count}"
            taken.add(name)
            found[tensor] = name
        return found

    def load(self, frozen: Graph) -> None:
        """Record a frozen graph again: the same names, ports and declarations."""
        handles: dict[str, Tensor] = {}
        for value in frozen.values.values():
            tensor = Tensor(self, value.dim, value.name)
            tensor.spec.stride, tensor.spec.dtype = value.stride, value.dtype
            tensor.spec.uid, tensor.spec.pass_by_value = value.uid, value.is_host
            tensor.spec.ragged_multiplier = value.ragged_multiplier
            tensor.spec.constant = value.constant
            tensor.spec.is_output = value.name in frozen.visible
            tensor.spec.is_saved = value.name in frozen.saved
            handles[value.name] = tensor
        for value in frozen.values.values():
            if value.ragged_offset is not None:
                handles[value.name].spec.ragged_offset = handles[value.ragged_offset]
        self.name = frozen.name
        self.tensors = list(handles.values())
        for node in frozen.nodes:
            outputs = {port: handles[v] for port, v in node.outputs.items()}
            for tensor in outputs.values():
                tensor.spec.producer = node.name
            inputs = {port: handles[v] for port, v in node.inputs.items()}
            rotated = node.inputs.get("cache", next(iter(node.inputs.values())))
            for value in node.outputs.values():
                if is_in_place(frozen, rotated, value):
                    handles[value].spec.in_place_of = handles[rotated]
            self.nodes.append(RecordedNode(node.name, node.attrs, inputs, outputs))

    def close(self, frozen: Graph, by: str) -> None:
        """Refuse changes from now on; undeclared data types become the inferred ones."""
        self.closed_by = by
        for tensor, name in self.names().items():
            if name in frozen.values:
                tensor.spec.dtype = frozen.values[name].dtype


def _as_torch(given: Any, where: str) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    if not hasattr(given, "__dlpack__"):
        raise GraphError(
            f"{where}: {given!r:.60} is no torch tensor, graph tensor or object with __dlpack__"
        )
    refuse_negative_strides(where, given)
    try:
        return torch.from_dlpack(given)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise GraphError(f"{where}: {given!r:.60} cannot be read by DLPack: {error}") from error


def nested_like(tensor: Tensor, source: Tensor) -> Tensor:
    """Give an output packed strides whose axes are nested in memory as those of ``source`` are."""
    return tensor.set_stride(packed_like(tuple(tensor.get_dim()), tuple(source.get_stride())))


def shaped_like(tensor: Tensor, source: Tensor) -> Tensor:
    """Give an output the layout of the tensor it comes from: the same memory order, packed.

    A ragged one keeps strides and offsets exactly, for its offsets count in those strides.
    """
    if tuple(tensor.get_dim()) == tuple(source.get_dim()):
        if (offset := source.get_ragged_offset()) is not None:
            tensor.set_stride(source.get_stride()).set_ragged_offset(offset)
            tensor.set_ragged_offset_multiplier(source.get_ragged_offset_multiplier())
        else:
            nested_like(tensor, source)
    return tensor
