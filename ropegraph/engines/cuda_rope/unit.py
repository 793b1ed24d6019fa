"""One translation unit: a source text, and the macros that specialise it."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Unit(ABC):
    """What is compiled at once.  Frozen dataclasses derive from it, for units are compared."""

    @property
    @abstractmethod
    def code(self) -> str:
        """The source text."""

    @property
    @abstractmethod
    def macros(self) -> dict[str, str]:
        """Macro -> value."""

    @property
    @abstractmethod
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels."""

    @property
    def options(self) -> tuple[str, ...]:
        """The macros as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.macros.items())
