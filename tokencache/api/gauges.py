"""Looks at the queue and at the store for those who ask regularly: Prometheus and viewers.

To describe the groups in the queue may take a look at every session. So a description is kept for 20 times as long as it took.
"""

import asyncio
import contextlib
import math
import time
from typing import Any

import msgspec

from tokencache import metrics
from tokencache.api.queue import SessionQueue
from tokencache.store.base import Store, StoreError
from tokencache.trajectories.values import GroupState, QueueState

_KEPT_SECONDS, _KEPT_FACTOR = 1.0, 20
_GROUP_STATES = ("ready", "short", "unrewarded", "unasked")


class Gauges:
    """The state of the queue, kept for a while, and the metrics of the queue and the store."""

    def __init__(self, queue: SessionQueue, store: Store) -> None:
        self._queue, self._store = queue, store
        self._lock = asyncio.Lock()
        self._state = QueueState(candidates=0, ready=0, taken=0, consumers={})
        self._expires = 0.0

    async def queue(self) -> QueueState:
        """Return the state of the queue, as it was at most a second ago, or 20 times as long as that took.

        Raises:
            StoreError: the store failed.
        """
        async with self._lock:
            if time.monotonic() >= self._expires:
                began = time.monotonic()
                found: dict[str, Any] = await self._queue.counts()
                self._state = msgspec.convert(found, QueueState)
                self._expires = time.monotonic() + max(_KEPT_SECONDS, _KEPT_FACTOR * (time.monotonic() - began))
            return self._state

    async def groups(self) -> dict[str, GroupState]:
        """Return the groups of which sessions are in the queue and not taken, by name. Raises as `queue`."""
        return {one.group: one for one in (await self.queue()).groups if one.group}

    async def update(self) -> None:
        """Set the metrics of the queue and the store. While the store fails, they keep their values."""
        with contextlib.suppress(StoreError):
            usage, state = await self._store.usage(), await self.queue()
            metrics.STORE_BYTES.set(usage.used)
            metrics.STORE_SHARE.set(math.nan if usage.share is None else usage.share)
            sessions = {"ready": state.ready, "in_flight": state.candidates - state.ready, "taken": state.taken, "invalid": state.invalid}
            for name, count in sessions.items():
                metrics.QUEUE_SESSIONS.labels(name).set(count)
            for name in _GROUP_STATES:
                waited = [one.waited for one in state.groups if _state_of(one) == name]
                metrics.QUEUE_GROUPS.labels(name).set(len(waited))
                metrics.QUEUE_OLDEST.labels(name).set(max(waited, default=0.0))


def _state_of(group: GroupState) -> str:
    if not group.size:
        return "unasked"
    return "short" if group.short else "unrewarded" if group.unrewarded else "ready"
