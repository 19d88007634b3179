"""Keeps the entries that were set last. A look-up is that of a dictionary; `move_to_end` after it keeps an entry that is used.

`Recent`        up to a number of them
`RecentBySize`  up to a sum of their sizes
`Expiring`      each for some time
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """Keeps the last `most` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


class RecentBySize(Recent[K, V]):
    """Keeps the last entries whose sizes are no more than `most` together. A value that is larger is not kept.

    `size` returns the size of a value when it is set; it may change later.
    """

    def __init__(self, most: int, size: Callable[[V], int]) -> None:
        super().__init__(most)
        self.total = 0
        self._size = size
        self._sizes: dict[K, int] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self.total -= self._sizes.pop(key, 0)
        super().pop(key, None)
        size = self._size(value)
        if size > self.most:
            return
        self.total += size
        self._sizes[key] = size
        OrderedDict.__setitem__(self, key, value)
        while self.total > self.most:
            self.pop(next(iter(self)))

    def pop(self, key: K, default: Any = None) -> Any:
        """Remove an entry and return its value, or the default."""
        self.total -= self._sizes.pop(key, 0)
        return super().pop(key, default)

    def clear(self) -> None:
        """Remove all entries."""
        super().clear()
        self._sizes.clear()
        self.total = 0


class Expiring(MutableMapping[K, V]):
    """Keeps each entry for some seconds after it was set; with `most`, no more than so many entries.

    `now` reads a clock that nobody sets.
    """

    def __init__(self, seconds: float, now: Callable[[], float], *, most: float = math.inf) -> None:
        self._seconds, self._now, self._most = seconds, now, most
        self._entries = OrderedDict[K, tuple[float, V]]()  # the first one expires first

    def get(self, key: K) -> V | None:  # type: ignore[override]
        """Return the value of a key; `None` if there is none, or it has expired."""
        entry = self._entries.get(key)
        return entry[1] if entry is not None and self._now() < entry[0] else None

    def renew(self, key: K) -> V | None:
        """Begin the time of a key again, and return its value; `None` if there is none, or it has expired."""
        entry, now = self._entries.get(key), self._now()
        if entry is None or entry[0] <= now:
            return None
        self._entries[key] = now + self._seconds, entry[1]
        self._entries.move_to_end(key)
        return entry[1]

    def __getitem__(self, key: K) -> V:
        until, value = self._entries[key]
        if self._now() >= until:
            raise KeyError(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        now, entries = self._now(), self._entries
        entries[key] = now + self._seconds, value
        entries.move_to_end(key)
        while next(iter(entries.values()))[0] <= now or len(entries) > self._most:
            entries.popitem(last=False)

    def __delitem__(self, key: K) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[K]:
        now = self._now()
        return iter([key for key, (until, _) in self._entries.items() if now < until])

    def __len__(self) -> int:
        now = self._now()
        return sum(now < until for until, _ in self._entries.values())
