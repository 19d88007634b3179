"""Keeps the queue of finished sessions, and the times of watched ones, in this process's memory. `memory.MemoryStore` contains it."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice, takewhile

from msgspec.structs import replace

from tokencache.recent import Expiring
from tokencache.store.base import MOST_OVERDUE, REMEMBER_SECONDS, Overdue, QueueEntry, RemoveOutcome
from tokencache.store.clock import SteadyClock, monotonic


class MemoryQueue:
    """The queue's methods of `base.Store`. No method awaits anything, so each is atomic."""

    def __init__(self) -> None:
        self._clock = SteadyClock()
        self._entries: dict[str, QueueEntry] = {}
        self._deliveries: dict[str, tuple[str, ...]] = {}
        self._demands: dict[str, bytes] = {}
        self._watched: dict[str, float] = {}  # when the time of a session has passed
        self._due: list[tuple[float, str]] = []  # the same, in the order of these times
        self._removed: Expiring[str, bool] = Expiring(REMEMBER_SECONDS, monotonic)

    async def watch(self, session: str, seconds: float) -> None:
        self._forget(session)
        self._watched[session] = due = self._clock.now() + seconds
        insort(self._due, (due, session))

    async def overdue(self) -> Overdue:
        now = self._clock.now()
        return Overdue(now, [session for _, session in takewhile(lambda due: due[0] <= now, islice(self._due, MOST_OVERDUE))])

    async def unwatch(self, session: str) -> None:
        if self._watched.get(session, math.inf) <= self._clock.now():
            self._forget(session)

    def _forget(self, session: str) -> None:
        due = self._watched.pop(session, None)
        if due is not None:
            del self._due[bisect_left(self._due, (due, session))]

    async def offer(self, session: str, epoch: str, at: float) -> None:
        held = self._entries.get(session)
        if (held is None or held.epoch != epoch) and _offered(session, epoch) not in self._removed:
            self._entries[session] = QueueEntry(session, epoch, at)

    async def queue(self) -> list[QueueEntry]:
        now = self._clock.now()
        entries = [replace(entry, leased=entry.until > now) for entry in self._entries.values()]
        return sorted(entries, key=lambda entry: (entry.at, entry.session))

    async def queue_length(self) -> int:
        return len(self._entries)

    async def lease(self, sessions: Sequence[str], delivery: str, consumer: str, seconds: float) -> bool:
        now = self._clock.now()
        entries = [self._entries.get(session) for session in sessions]
        taken = [entry for entry in entries if entry is not None and (entry.until <= now or entry.delivery == delivery)]
        if len(taken) < len(entries):
            return False
        for entry in taken:
            self._deliveries.pop(entry.delivery, None)
            self._entries[entry.session] = replace(
                entry, delivery=delivery, consumer=consumer, until=now + seconds, attempt=entry.attempt + 1
            )
        self._deliveries[delivery] = tuple(sessions)
        return True

    async def extend(self, delivery: str, seconds: float) -> bool:
        until = self._clock.now() + seconds
        for entry in self._delivered(delivery):
            self._entries[entry.session] = replace(entry, until=until)
        return delivery in self._deliveries

    async def release(self, delivery: str) -> bool:
        for entry in self._delivered(delivery):
            self._entries[entry.session] = replace(entry, delivery="", consumer="", until=0.0)
        return self._deliveries.pop(delivery, None) is not None

    async def remove(self, delivery: str) -> RemoveOutcome:
        if delivery not in self._deliveries:
            return RemoveOutcome.REPEATED if delivery in self._removed else RemoveOutcome.EXPIRED
        for entry in self._delivered(delivery):
            del self._entries[entry.session]
            self._removed[_offered(entry.session, entry.epoch)] = True
        del self._deliveries[delivery]
        self._removed[delivery] = True
        return RemoveOutcome.REMOVED

    async def withdraw(self, session: str, epoch: str) -> None:
        held = self._entries.get(session)
        if held is not None and held.epoch == epoch:
            del self._entries[session]

    async def put_demand(self, consumer: str, demand: bytes) -> None:
        self._demands[consumer] = demand

    async def drop_demand(self, consumer: str) -> None:
        self._demands.pop(consumer, None)

    async def demands(self) -> list[bytes]:
        return list(self._demands.values())

    def _delivered(self, delivery: str) -> list[QueueEntry]:
        """Return the entries that a delivery has now."""
        held = [self._entries.get(session) for session in self._deliveries.get(delivery, ())]
        return [entry for entry in held if entry is not None and entry.delivery == delivery]


def _offered(session: str, epoch: str) -> str:
    """Name an offer in the memory of removed ones; no delivery's id contains a space."""
    return f"{epoch} {session}"
