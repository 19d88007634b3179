"""Finishes sessions: at the request of their owner, or because their time is up.

A session may have a deadline and a limit of silence (`core.session.SessionSettings`). The store has, for each such session, the time at
which to look at it next. Every replica asks for those whose time has passed, so it does not matter which ones are killed. Looking at a
session twice, or finishing it twice, has no effect. A session that was sealed by force is looked at until its calls have ended.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator

from tokencache import metrics
from tokencache.background import repeat
from tokencache.core.outcome import Outcome, OutcomeKind, outcome_of
from tokencache.core.session import SessionStage
from tokencache.proxy.dedup.lost_calls import HEARTBEAT_SECONDS, LostCalls
from tokencache.proxy.ledger import Ledger
from tokencache.store.base import OutcomeConflictError, SessionInfo, Store, StoreError, read_states
from tokencache.store.clock import RECORD_CLOCK
from tokencache.trajectories.rollout import incidents_of
from tokencache.wakeup import end

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between two looks for sessions whose time is up."""
PAUSE_SECONDS = 10.0
"""If there was no look for so many seconds, no calls were served: this process was stopped, or the store failed."""
_OTHER = "other"
"""The label of metrics for all words of callers: a label must have few values."""


async def offer(store: Store, info: SessionInfo) -> None:
    """Put an open session into the queue. This is done before it is finished, so that a crash in between cannot lose it."""
    if info.state is SessionStage.OPEN:
        await store.offer(info.id, info.epoch, RECORD_CLOCK.now())


async def finish(ledger: Ledger, info: SessionInfo, outcome: Outcome | None = None) -> bool:
    """Finish a session, and count it by its outcome. Returns false if it was deleted meanwhile.

    Raises:
        OutcomeConflictError: it has another outcome.
        StoreError: the store failed.
    """
    await offer(ledger.store, info)
    found = await ledger.store.finish(info.id, outcome)
    ledger.release(info)
    if found and info.state is SessionStage.OPEN:
        kind = outcome_of(outcome, incidents_of(info, ledger.unsaved(info.id)), info.latest, over=True).kind
        metrics.FINISHED.labels(kind if kind in set(OutcomeKind) else _OTHER).inc()
    ledger.changed.notify()
    return found


class TimeLimits:
    """Finishes the sessions whose time is up, with the outcome `timeout`.

    A session is silent only while calls are served: since its last call, and since this process started or went on after a pause. Otherwise
    its next call could wait in a socket, or be tried again by its client, when the session is finished.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._store, self._lost = ledger, ledger.store, LostCalls(ledger.store)
        self._looked = self._serving_since = -math.inf  # by the store's clock

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Look for such sessions while the context is open."""
        task = asyncio.create_task(repeat("time-limits", self._try_to_look, LOOK_SECONDS))
        try:
            yield
        finally:
            await end(task)

    async def look(self) -> None:
        """Finish all sessions whose time is up.

        Raises:
            StoreError: the store failed, or the data of a session is damaged; the others were looked at.
        """
        by_store, names = await self._store.overdue()
        if by_store - self._looked > PAUSE_SECONDS:
            self._serving_since = by_store
        self._looked = by_store
        states, damaged = await read_states(self._store, names)
        for name, info in states.items():
            left = None
            if info is not None and info.state is SessionStage.OPEN:
                left = await self._look_at(info, by_store - max(info.used, self._serving_since))
            elif info is not None and info.open_calls:  # those of a replica that is gone would stay open
                await self._lost.close(info)
                left = HEARTBEAT_SECONDS
            if left is None:
                await self._store.unwatch(name)
            else:
                await self._store.watch(name, left)
        for name in damaged:
            await self._store.watch(name, HEARTBEAT_SECONDS)
        if damaged:
            raise next(iter(damaged.values()))

    async def _try_to_look(self) -> None:
        with contextlib.suppress(StoreError):  # the sessions are looked at when the store answers again
            await self.look()

    async def _look_at(self, info: SessionInfo, silent: float) -> float | None:
        """Finish an open session if its time is up. `silent`: for so many seconds no call began or ended.

        Returns after how many seconds to look again; `None`: never.
        """
        settings, now = info.settings, time.time()
        if why := settings.time_up(now, silent=silent, busy=bool(info.open_calls)):
            log.warning("session %s is finished: %s", info.id, why)
            with contextlib.suppress(OutcomeConflictError):  # its owner was faster
                await finish(self._ledger, info, Outcome(OutcomeKind.TIMEOUT, why))
            return None
        left = settings.seconds_left(now, silent=silent)
        if left is not None and left <= 0:  # it is silent, and waits for a call, perhaps of a replica that is gone
            await self._lost.close(info)
            left = HEARTBEAT_SECONDS
        return left
