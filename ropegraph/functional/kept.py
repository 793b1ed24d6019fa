"""A bounded dict for hot paths: a hit takes no lock and moves nothing."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Keeps at most ``limit`` values: half of them young. What was not asked for since the last
    time the young half was full is forgotten when it is full again.

    Threads may share it: each operation is one step of a dict, and a value that is lost in a race
    is only made again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(limit // 2, 1)
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        """What was kept under a key, or None."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Keep a value."""
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young[key] = value
