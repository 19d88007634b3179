"""Twins: calls in flight that ask for the same. The later one waits for the earlier one's reply instead of asking the engine.

Where the earlier one is served by this process its end is an event. Elsewhere the store is asked, with growing pauses, whether it is
still open; and whether the replica that serves it is still alive, for one that was killed ends nothing. Replicas *beat*: each says
every few seconds that it will live for a few more. A call whose replica is gone is closed here, with an incident that says that what
the engine told it is missing.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from tokencache.backoff import delays
from tokencache.core.turn import Turn
from tokencache.store.base import Incident, OpenCall, SessionGoneError, Store, StoreError

log = logging.getLogger(__name__)

BEAT_SECONDS, LIFE_SECONDS = 3.0, 10.0
"""How often a replica says that it lives, and for how long that holds."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two looks at a call that is served elsewhere."""
LOST = "replica-lost"


class Ended(NamedTuple):
    """What came of a call: its turns, none if it came to nothing; `died`: because its replica is gone."""

    turns: tuple[Turn, ...]
    died: bool = False


class Twins:
    """Knows which calls are open in this process, waits for those that are open elsewhere, and beats for its replica."""

    def __init__(self, store: Store) -> None:
        self.replica = secrets.token_hex(8)
        self._store = store
        self._open: dict[str, asyncio.Event] = {}
        self._watched: dict[str, asyncio.Task[Ended]] = {}

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Say that this replica lives, while the context is open."""
        with contextlib.suppress(StoreError):
            await self._store.heartbeat(self.replica, LIFE_SECONDS)
        beats = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            tasks = [beats, *self._watched.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def opened(self, call: str) -> None:
        """Take note that a call is open in this process."""
        self._open[call] = asyncio.Event()

    def closed(self, call: str) -> None:
        """Take note that it has ended, and that what it came to is in the store, unless that failed."""
        event = self._open.pop(call, None)
        if event is not None:
            event.set()

    async def ended(self, session: str, epoch: str, duplicate: OpenCall, key: bytes) -> Ended:
        """Wait until a call has ended; its turns are found under `key`. However many wait for it, it is watched once.

        Raises:
            StoreError: the store failed.
        """
        task = self._watched.get(duplicate.call)
        if task is None:
            task = self._watched[duplicate.call] = asyncio.create_task(self._watch(session, epoch, duplicate, key))
            task.add_done_callback(lambda done: self._forget(duplicate.call, done))
        return await asyncio.shield(task)

    def _forget(self, call: str, done: "asyncio.Task[Ended]") -> None:
        del self._watched[call]
        if not done.cancelled() and (why := done.exception()) is not None:
            log.info("call %s is not waited for: %s", call, why)

    async def _watch(self, session: str, epoch: str, duplicate: OpenCall, key: bytes) -> Ended:
        ours, died = self._open.get(duplicate.call), False
        if ours is not None:
            await ours.wait()
        else:
            died = await self._died(session, epoch, duplicate)
        found = (await self._store.find(session, [key]))[0]
        return Ended(tuple(hit.turn for hit in found if hit.turn.call == duplicate.call), died)

    async def _died(self, session: str, epoch: str, duplicate: OpenCall) -> bool:
        """Wait until a call is closed that is not open here; true if nobody was left to close it."""
        silent = 0.0
        for pause in delays(FIRST_PAUSE, LONGEST_PAUSE, factor=1.5):
            info = await self._store.session(session)
            if info is None or all(one.call != duplicate.call for one in info.open_calls):
                return False
            if duplicate.replica == self.replica:  # the store failed when it ended here, and the session says so
                return await self._close(session, epoch, duplicate, [])
            if not await self._store.live_replicas([duplicate.replica]):
                if silent >= BEAT_SECONDS:  # a store that was restarted has forgotten who lives, but hears it again within a beat
                    detail = "the proxy that served this call is gone: what the engine said to it is not recorded"
                    return await self._close(session, epoch, duplicate, [Incident(LOST, detail, True, duplicate.call, at=time.time())])
                silent += pause
            else:
                silent = 0.0
            await asyncio.sleep(pause)
        raise AssertionError("delays never end")

    async def _close(self, session: str, epoch: str, duplicate: OpenCall, incidents: list[Incident]) -> bool:
        log.warning("session %s call %s: closed for replica %s, which did not", session, duplicate.call, duplicate.replica)
        with contextlib.suppress(SessionGoneError):
            await self._store.settle(session, epoch, duplicate.call, incidents)
        return True

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                await self._store.heartbeat(self.replica, LIFE_SECONDS)
            except StoreError as why:
                log.debug("no beat: %s", why)
