"""Every exception the package raises: whose fault it is decides the type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class GraphError(ValueError):
    """The caller's graph or buffers are wrong; the text says what would work."""


class PositionError(GraphError, IndexError):
    """A position, offset or length points outside the table or buffer it indexes."""


class FoldContractError(GraphError):
    """Forward and backward disagree about a folded scale or another attribute."""


class UnsupportedError(RuntimeError):
    """The graph is right, but no allowed engine takes it.

    reasons: engine name -> every rule that the node breaks there, not only the first.
    """

    def __init__(self, message: str, reasons: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(message)
        self.reasons = {engine: tuple(broken) for engine, broken in (reasons or {}).items()}


class InternalError(RuntimeError):
    """A fault of ropegraph itself: please report it with the graph in the message."""
