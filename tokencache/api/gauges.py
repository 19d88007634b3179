"""Looks at the queue and at the store for those who ask regularly: Prometheus and viewers.

To describe the groups in the queue may take a look at every session. So a description is kept (`kept`).
"""

import contextlib
import math

import msgspec

from tokencache import metrics
from tokencache.api.kept import Kept
from tokencache.api.queue import SessionQueue
from tokencache.store.base import Store, StoreError
from tokencache.trajectories.values import GroupState, QueueState

_GROUP_STATES = ("ready", "short", "unrewarded", "unasked")


class Gauges:
    """The state of the queue, kept for a while, and the metrics of the queue and the store."""

    def __init__(self, queue: SessionQueue, store: Store) -> None:
        self._queue, self._store = queue, store
        self._state = Kept(self._read)

    async def groups(self) -> dict[str, GroupState]:
        """Return by name the groups of the sessions in the queue that nobody has taken. Raises `StoreError` if the store failed."""
        return {one.group: one for one in (await self._state.recent()).groups if one.group}

    async def update(self) -> None:
        """Set the metrics of the queue and the store. While the store fails, they keep their values."""
        with contextlib.suppress(StoreError):
            usage, state = await self._store.usage(), await self._state.recent()
            metrics.STORE_BYTES.set(usage.used)
            metrics.STORE_SHARE.set(math.nan if usage.share is None else usage.share)
            sessions = {"ready": state.ready, "in_flight": state.candidates - state.ready, "taken": state.taken, "invalid": state.invalid}
            for name, count in sessions.items():
                metrics.QUEUE_SESSIONS.labels(name).set(count)
            for name in _GROUP_STATES:
                waited = [one.waited for one in state.groups if _state_of(one) == name]
                metrics.QUEUE_GROUPS.labels(name).set(len(waited))
                metrics.QUEUE_OLDEST.labels(name).set(max(waited, default=0.0))

    async def _read(self) -> QueueState:
        return msgspec.convert(await self._queue.counts(), QueueState)


def _state_of(group: GroupState) -> str:
    if not group.size:
        return "unasked"
    return "short" if group.short else "unrewarded" if group.unrewarded else "ready"
