"""Prefixes at hand: the exact ids of recent turns, packed and as JSON, so that a warm history costs no store read.

Only a cache: everything in it can be read from the store again, and any replica can. A turn's prefix takes the place of
its parent's, so a session that grows costs one prefix.
"""

from collections import OrderedDict

import msgspec

from tokencache.core import ids
from tokencache.core.turn import Prefix
from tokencache.store.base import Store


class Held(msgspec.Struct, frozen=True):
    """A prefix, packed and as a JSON fragment in pieces; `chain` is that of the conversation it answers, where that is at hand."""

    prefix: Prefix
    fragment: ids.Pieces
    chain: tuple[bytes, ...] = ()

    @property
    def size(self) -> int:
        """Bytes held."""
        return len(self.prefix.ids) + sum(map(len, self.fragment))


class Prefixes:
    """The most recently used prefixes, up to `max_bytes`."""

    def __init__(self, store: Store, *, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._latest: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0

    async def get(self, session: str, turn: str) -> Held:
        """Return a turn's prefix, from here or from the store.

        Raises:
            KeyError: there is no such turn.
            StoreError: the store cannot be read.
        """
        held = self._held.get(turn)
        if held is None:
            prefix = await self._store.prefix(session, turn)
            held = Held(prefix, ids.extended((), prefix.ids))
            self._put(turn, held)
        else:
            self._held.move_to_end(turn)
        return held

    def add(self, epoch: str, turn: str, held: Held, *, instead_of: str | None) -> None:
        """Hold the prefix of a turn that was just recorded in this life of a session, in place of its parent's."""
        if instead_of is not None:
            self._drop(instead_of)
        self._put(turn, held)
        self._latest[epoch] = turn
        self._latest.move_to_end(epoch)
        while len(self._latest) > len(self._held):
            self._latest.popitem(last=False)

    def nearby(self, epoch: str, turn: str | None) -> list[tuple[str, Held]]:
        """Prefixes at hand that a new prompt may begin with: that of `turn`, and of the latest turn in this life of its session."""
        names = [name for name in dict.fromkeys((turn, self._latest.get(epoch))) if name is not None]
        return [(name, self._held[name]) for name in names if name in self._held]

    def _put(self, turn: str, held: Held) -> None:
        self._drop(turn)
        self._held[turn] = held
        self._bytes += held.size
        while self._bytes > self._max_bytes and len(self._held) > 1:
            _, old = self._held.popitem(last=False)
            self._bytes -= old.size

    def _drop(self, turn: str) -> None:
        old = self._held.pop(turn, None)
        if old is not None:
            self._bytes -= old.size
