"""The caller's buffers, checked against the plan before anything is written.

A set of buffers is checked once: as long as pointers, shapes, strides, dtypes and devices stay the
same, the answer does too. Where the pointers alone change, only they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import index
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ropegraph.dtypes import short, torch_dtype
from ropegraph.errors import GraphError
from ropegraph.execution.overlap import disjoint, refuse_negative_strides
from ropegraph.execution.sharing import check_sharing, pairs_of
from ropegraph.execution.signature import Signature, addresses_of, form_check, forms_of
from ropegraph.ir.graph import Value, span
from ropegraph.lowering.plan import Plan


class _Checked(NamedTuple):
    """A set of buffers that was found right; others like it are right wherever they lie apart.

    has_form: says of others whether they are like these but for their addresses.
    reshaped: those whose shape must become the declared one.  spans: bytes that each reaches over.
    is_settled: False where what is overwritten requires grad: whether it is a leaf, which its form
    does not tell, decides if it may be.
    """

    signature: Signature
    has_form: Callable[..., bool]
    reshaped: list[tuple[int, Value]]
    spans: list[int]
    is_settled: bool = True


class Binder:
    """Fills the list of tensors that executables read, from what the caller gave.

    aligned: values whose address must be a multiple of 16, for an engine that loads 16 bytes.
    """

    def __init__(self, plan: Plan, aligned: Collection[str] = ()) -> None:
        graph = plan.graph
        self.plan = plan
        self.values = graph.values
        self.required = [(name, plan.slots[name]) for name in (*graph.inputs, *graph.outputs)]
        self.dtypes = {n: torch_dtype(graph.values[n].dtype) for n, _ in self.required}
        self.hosts = {name for name, _ in self.required if graph.values[name].is_host}
        self.constants = {
            name: torch.full(value.dim, value.constant, dtype=self.dtypes[name], device="cpu")
            for name, value in graph.values.items()
            if value.constant is not None
        }
        self.aligned = [i for i, (name, _) in enumerate(self.required) if name in aligned]
        self._apart = pairs_of(graph, [name for name, _ in self.required])
        # Replaced as a whole: threads may see an old one, never half of one.
        self._known = _Checked(Signature((), ()), _is_nothing, [], [])

    def bind(
        self, buffers: Mapping[str, Any], env: list[Any], workspace: Tensor | None = None
    ) -> Signature:
        """Put the buffers of all inputs and outputs into ``env``; return what identifies them.

        buffers: value name -> torch tensor, DLPack object or (host scalars) number.
        workspace: the caller's own, which must not be one of the buffers as well.
        Raises GraphError naming the value, what was given and what would work.
        """
        bound: list[Tensor] = []
        for name, slot in self.required:
            try:
                buffer = buffers[name]
            except KeyError:
                if name not in self.constants:
                    raise self._missing(name) from None
                buffer = self.constants[name]
            if type(buffer) is not Tensor:
                buffer = self._as_tensor(name, buffer)
            env[slot] = buffer
            bound.append(buffer)
        known = self._known
        try:
            addresses = addresses_of(bound)
            forms = known.signature.forms if known.has_form(*bound) else forms_of(bound)
        except RuntimeError as error:
            raise self._without_memory(bound, error) from error
        if workspace is not None:
            addresses = (*addresses, workspace.data_ptr())
        signature, is_alike = Signature(addresses, forms), forms == known.signature.forms
        if not known.is_settled or not is_alike or addresses != known.signature.addresses:
            if known.is_settled and is_alike and self._lie_apart(addresses, known.spans):
                known = known._replace(signature=signature)
            else:
                known = self._checked(signature, env, workspace)
            self._known = known
        for slot, value in known.reshaped:
            env[slot] = env[slot].as_strided(value.dim, value.stride)
        return known.signature

    def _without_memory(self, bound: list[Tensor], error: RuntimeError) -> GraphError:
        for (name, _), buffer in zip(self.required, bound, strict=True):
            if not _has_memory(buffer):
                return GraphError(
                    f"{name!r} is bound to a tensor without plain memory ({buffer.layout}, "
                    f"{buffer.device}); use a strided one, outside of vmap and torch.func "
                    "transforms"
                )
        return GraphError(f"a buffer has no plain memory: {error}")

    def _lie_apart(self, addresses: tuple[int, ...], spans: list[int]) -> bool:
        """True if buffers of known forms are right where they are; False means: look closely."""
        # An address more is that of a workspace; none is that of an empty buffer, or of no memory.
        if len(addresses) != len(spans) or 0 in addresses:
            return False
        for i, j, _, _ in self._apart:
            if addresses[i] < addresses[j] + spans[j] and addresses[j] < addresses[i] + spans[i]:
                return False
        return all(not addresses[i] & 15 for i in self.aligned)

    def _checked(self, signature: Signature, env: list[Any], workspace: Tensor | None) -> _Checked:
        """Check everything.  Raises GraphError for the first wrong buffer."""
        reshaped = self._check(env, workspace)
        bound = [env[slot] for _, slot in self.required]
        spans = [span(x.shape, x.stride()) * x.element_size() for x in bound]
        is_settled = not any(bound[i].requires_grad for i in self._overwritten(bound))
        return _Checked(signature, form_check(bound), reshaped, spans, is_settled)

    def _overwritten(self, bound: list[Tensor]) -> list[int]:
        """Which of the buffers are read and written over."""
        rewritten = self.plan.graph.rewritten
        found = [i for i, (name, _) in enumerate(self.required) if name in rewritten]
        found += (
            pair.other
            for pair in self._apart
            if pair.may_be_in_place
            and bound[pair.output].data_ptr() == bound[pair.other].data_ptr()
        )
        return found

    @property
    def is_settled(self) -> bool:
        """True if buffers like the last ones need no closer look."""
        return self._known.is_settled

    def _as_tensor(self, name: str, buffer: object) -> Tensor:
        if isinstance(buffer, Tensor):
            return buffer
        if hasattr(buffer, "__dlpack__"):
            return self._from_dlpack(name, buffer)
        if name in self.hosts:
            return self._from_number(name, buffer)
        raise GraphError(
            f"{name!r} is bound to {type(buffer).__name__} {buffer!r:.60}; "
            "bind a torch tensor or an object with __dlpack__"
        )

    def _from_dlpack(self, name: str, buffer: Any) -> Tensor:
        refuse_negative_strides(name, buffer)
        # DLPack forgets that numpy memory may be read-only.
        graph = self.plan.graph
        is_written = name in graph.rewritten or graph.producer(name) is not None
        if is_written and not getattr(getattr(buffer, "flags", None), "writeable", True):
            what = "an output" if graph.producer(name) else "written in place"
            raise GraphError(f"{name!r} is {what}, but its buffer is read-only")
        try:
            return torch.from_dlpack(buffer)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise GraphError(f"{name!r}: its buffer cannot be read by DLPack: {error}") from error

    def _from_number(self, name: str, number: Any) -> Tensor:
        """A host scalar as a tensor, if its type can hold the number."""
        value, dtype = self.values[name], self.dtypes[name]
        try:
            if isinstance(number, (bool, str)):
                raise TypeError
            exact = float(number) if value.dtype.is_float else index(number)
            return torch.tensor(exact, dtype=dtype, device="cpu").reshape(value.dim)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise GraphError(
                f"{name!r} is bound to {type(number).__name__} {number!r:.60}, which is no "
                f"{short(value.dtype)} number; bind a number of that type or a CPU tensor"
            ) from None

    def _missing(self, name: str) -> GraphError:
        return GraphError(f"no buffer is bound to {name!r} {self._wanted(name)}")

    def _wanted(self, name: str) -> str:
        """Who uses a value, and what may be bound to it: the end of a message."""
        users = [
            f"{port} of {node.name!r}"
            for node in self.plan.graph.singles
            for port, value in (*node.inputs.items(), *node.outputs.items())
            if value == name
        ]
        value = self.values[name]
        role = ", ".join(users) or "offsets of a ragged tensor"
        return f"({role}); bind a tensor {list(value.dim)} of {short(value.dtype)}"

    def _check(self, env: list[Any], workspace: Tensor | None) -> list[tuple[int, Value]]:
        """Raise GraphError for the first wrong buffer; return the values that need their dim."""
        reshaped: list[tuple[int, Value]] = []
        for name, slot in self.required:
            value, buffer = self.values[name], cast(Tensor, env[slot])
            self._check_place(value, buffer)
            if value.ragged_offset is None and self._check_shape(value, buffer):
                reshaped.append((slot, value))
        for i in self.aligned:
            name, slot = self.required[i]
            if env[slot].data_ptr() & 15:
                raise GraphError(
                    f"the buffer of {name!r} starts at {env[slot].data_ptr():#x}, "
                    f"which is no multiple of 16 bytes {self._wanted(name)} that is"
                )
        bound = {name: env[slot] for name, slot in self.required}
        check_sharing(self.plan.graph, self._apart, bound)
        if workspace is not None:
            for name, slot in self.required:
                if not disjoint(workspace, env[slot]):
                    raise GraphError(
                        f"the workspace shares memory with the buffer of {name!r}; "
                        "use separate buffers"
                    )
        return reshaped

    def _check_place(self, value: Value, buffer: Tensor) -> None:
        if buffer.dtype is not self.dtypes[value.name]:
            raise GraphError(
                f"{value.name!r} is declared {short(value.dtype)} but bound to a "
                f"{buffer.dtype} buffer {list(buffer.shape)} {self._wanted(value.name)}"
            )
        if buffer.numel() and not buffer.data_ptr():
            kind = "meta tensor" if buffer.is_meta else type(buffer).__name__
            raise GraphError(f"{value.name!r} is bound to a {kind} that has no memory")
        wanted = "cpu" if value.is_host else self.plan.device.type
        number = self.plan.device.index if wanted == "cuda" else None
        if buffer.device.type != wanted or (number is not None and buffer.device.index != number):
            where = "the CPU (it is passed by value)" if value.is_host else str(self.plan.device)
            raise GraphError(
                f"{value.name!r} is bound to a buffer on {buffer.device}, but must be on {where}"
            )

    def _check_shape(self, value: Value, buffer: Tensor) -> bool:
        """Raise if shape or strides differ; True if the shapes differ in size-1 dims only."""
        shape, stride = tuple(buffer.shape), buffer.stride()
        if _steps(shape, stride) == _steps(value.dim, value.stride):
            return shape != value.dim
        if [n for n in shape if n != 1] != [n for n in value.dim if n != 1]:
            raise GraphError(
                f"{value.name!r} is declared {list(value.dim)} but bound to a buffer {list(shape)} "
                f"{self._wanted(value.name)}"
            )
        if 0 in value.dim:
            return shape != value.dim
        raise GraphError(
            f"{value.name!r} is declared with strides {list(value.stride)} but its buffer "
            f"{list(shape)} has {list(stride)}; declare them with set_stride or tensor_like"
        )


def _is_nothing(*_: Tensor) -> bool:
    """The form check of a binder that has seen no buffers."""
    return False


def _has_memory(buffer: Tensor) -> bool:
    try:
        addresses_of([buffer])
        forms_of([buffer])
    except RuntimeError:
        return False
    return True


def _steps(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """(extent, stride) of the axes that are stepped over: an axis of length 1 has no stride."""
    return [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]
