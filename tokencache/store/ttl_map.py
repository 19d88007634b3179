"""Values that fade: for a store in memory, what a time to live is in Redis."""

import time
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class Fading(Generic[V]):
    """Values by name, each gone so many seconds after it was set or used last; the one that goes first stands first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held: dict[str, tuple[V, float]] = {}

    def __len__(self) -> int:
        self._drop_faded()
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        self._drop_faded()
        return iter(list(self._held))

    def __getitem__(self, name: str) -> V:
        self._drop_faded()
        return self._held[name][0]

    def get(self, name: str) -> V | None:
        """Look a value up; that is no use of it."""
        return self[name] if name in self._held and name in self else None

    def __contains__(self, name: str) -> bool:
        self._drop_faded()
        return name in self._held

    def use(self, name: str) -> V | None:
        """Look a value up, and let it last."""
        value = self.get(name)
        return None if value is None else self.put(name, value)

    def put(self, name: str, value: V) -> V:
        """Set a value."""
        self._held.pop(name, None)
        self._held[name] = value, time.monotonic() + self._seconds
        return value

    def pop(self, name: str) -> V | None:
        """Take a value away."""
        value = self.get(name)
        self._held.pop(name, None)
        return value

    def clear(self) -> None:
        """Take all away."""
        self._held.clear()

    def _drop_faded(self) -> None:
        now = time.monotonic()
        while self._held and next(iter(self._held.values()))[1] <= now:
            del self._held[next(iter(self._held))]
