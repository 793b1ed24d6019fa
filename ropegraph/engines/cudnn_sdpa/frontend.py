"""The part of nvidia-cudnn-frontend that is used here, typed; it ships no types of its own.

``load`` is the one place where the package is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

# The release whose graph API, error types and legality rules this engine is written against.
OLDEST = (1, 32)


class FeTensor(Protocol):
    """A tensor of a graph that is being recorded."""

    def set_output(self, value: bool) -> FeTensor: ...
    def set_uid(self, uid: int) -> FeTensor: ...
    def set_dim(self, dim: Sequence[int]) -> FeTensor: ...
    def set_stride(self, stride: Sequence[int]) -> FeTensor: ...
    def set_data_type(self, dtype: object) -> FeTensor: ...
    def set_name(self, name: str) -> FeTensor: ...
    def set_ragged_offset(self, offset: FeTensor) -> FeTensor: ...
    def set_ragged_offset_multiplier(self, multiplier: int) -> FeTensor: ...


class FePlan(Protocol):
    """One entry of FE's ranked list.  cpp_index: None for an engine that FE wrote in Python."""

    cpp_index: int | None


class FeGraph(Protocol):
    """cudnn.pygraph."""

    plans: Sequence[FePlan]

    def tensor(self, **attributes: Any) -> FeTensor: ...
    def sdpa(self, **arguments: Any) -> list[Any]: ...
    def sdpa_backward(self, **arguments: Any) -> list[Any]: ...
    def rope(self, **arguments: Any) -> FeTensor: ...
    def rope_backward(self, **arguments: Any) -> FeTensor: ...
    def validate(self) -> None: ...
    def build_operation_graph(self) -> None: ...
    def create_execution_plans(self, heuristics: Sequence[object]) -> None: ...
    def select_plan(self, index: int) -> object: ...
    def check_support(self) -> None: ...
    def build_plans(self) -> None: ...
    def get_workspace_size(self) -> int: ...
    def execute(
        self, tensor_dict: Mapping[int, int], workspace: int | None, handle: object
    ) -> None: ...
    def inspect(self) -> dict[str, Any]: ...


class Frontend(Protocol):
    """The module ``cudnn``."""

    data_type: Any
    heur_mode: Any
    diagonal_alignment: Any
    attention_implementation: Any
    cudnnGraphNotSupportedError: type[Exception]  # noqa: N815
    __version__: str

    def pygraph(self, **settings: Any) -> FeGraph: ...
    def create_handle(self) -> Any: ...
    def set_stream(self, handle: object, stream: int) -> None: ...
    def backend_version(self) -> int: ...


def load() -> Frontend:
    """The package.  Raises ImportError, saying what to install, if it is missing or too old."""
    try:
        found = cast(Frontend, import_module("cudnn"))
    except ImportError as error:
        raise ImportError(
            f"cudnn.sdpa needs nvidia-cudnn-frontend {_text(OLDEST)} or newer: {error}"
        ) from error
    if numbers_of(found.__version__) < OLDEST:
        raise ImportError(
            f"cudnn.sdpa needs nvidia-cudnn-frontend {_text(OLDEST)} or newer, "
            f"this is {found.__version__}"
        )
    return found


def numbers_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in version.split(".")[:2] if n.isdigit())


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
