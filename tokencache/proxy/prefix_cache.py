"""Keeps the exact ids of recent turns in memory, packed and as JSON, so that a warm history needs no store read.

This is only a cache: any replica can read the same data from the store. A turn's prefix replaces its parent's, so a growing session has one
entry.
"""

from collections.abc import Iterable

import msgspec

from tokencache.core import ids
from tokencache.core.turn import Prefix
from tokencache.recent import Recent, RecentBySize
from tokencache.store.base import Store

MOST_SESSIONS = 65_536
"""Maximum number of sessions, and models in them, with a remembered latest turn."""
PER_PREFIX = 700
"""Estimated bytes of a prefix without its ids: the objects that hold them."""


class CachedPrefix(msgspec.Struct, frozen=True):
    """A prefix, packed and as a JSON fragment; `chain` is the chain of the conversation that it answers, `()` if unknown."""

    prefix: Prefix
    fragment: ids.Fragment
    chain: tuple[bytes, ...] = ()


class PrefixCache:
    """Keeps the most recently used prefixes, up to `max_bytes`, and at least one of any size."""

    def __init__(self, store: Store, *, max_bytes: int) -> None:
        self._store = store
        self._prefixes: RecentBySize[str, CachedPrefix] = RecentBySize(max(max_bytes, 1), self._size)
        self._most = max_bytes or 1
        self._latest: Recent[tuple[str, str], str] = Recent(MOST_SESSIONS)

    def _size(self, cached: CachedPrefix) -> int:
        """Return the size of a prefix in bytes; one that is larger than all that is kept counts as so many."""
        return min(PER_PREFIX + len(cached.prefix.ids) + cached.fragment.size, self._most)

    async def get(self, session: str, turn: str) -> CachedPrefix:
        """Return a turn's prefix, from memory or from the store.

        Raises:
            KeyError: there is no such turn.
            StoreError: the store cannot be read.
        """
        known = self._prefixes.get(turn)
        if known is None:
            prefix = await self._store.prefix(session, turn)
            known = self._prefixes[turn] = CachedPrefix(prefix, ids.Fragment.of(prefix.ids))
        else:
            self._prefixes.move_to_end(turn)
        return known

    def add(self, epoch: str, turn: str, model: str, prefix: CachedPrefix, *, instead_of: str | None) -> None:
        """Keep the prefix of a model's turn that was just recorded in this epoch; it replaces that of the parent `instead_of`."""
        if instead_of is not None:
            self._prefixes.pop(instead_of, None)
        self._prefixes[turn] = prefix
        self._latest[epoch, model] = turn

    def forget(self, epoch: str, turns: Iterable[str]) -> None:
        """Forget the latest turns of an epoch, and these, because the store may have lost them."""
        for known in [known for known in self._latest if known[0] == epoch]:
            del self._latest[known]
        for turn in turns:
            self._prefixes.pop(turn, None)

    def nearby(self, epoch: str, model: str, turn: str | None) -> list[tuple[str, CachedPrefix]]:
        """List cached prefixes with which a new prompt of a model may begin: those of `turn`, and of its latest turn in this epoch."""
        names = [name for name in dict.fromkeys((turn, self._latest.get((epoch, model)))) if name is not None]
        return [(name, known) for name in names if (known := self._prefixes.get(name)) is not None]
