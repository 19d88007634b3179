"""Lets the creation of a session wait until the engines have room for it (`engine.admission`)."""

import time
from http import HTTPStatus

from tokencache.engine.admission import KEPT_SECONDS, RETRY_SECONDS, Admission
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.store.clock import RECORD_CLOCK
from tokencache.wakeup import wait_for

_LOOK_SECONDS = 0.5
"""Seconds between two looks: a pause that gets too long, or a report of another replica, wakes nobody."""


class AdmissionWait:
    """Admits sessions to the engines of a pool. The ledger says when a call or a session has ended."""

    def __init__(self, admission: Admission, pool: Pool, ledger: Ledger) -> None:
        self._admission, self._pool, self._ledger = admission, pool, ledger

    async def admit(self, session: str, seconds: float) -> None:
        """Wait until a session may be created, at most for so many seconds. A session that exists does not wait.

        Raises:
            HarnessError: there is no room for it (429), or it is not known how large the KV caches are (503).
            StoreError: the store failed.
        """
        if await self._ledger.store.session(session) is not None:
            return
        deadline = time.monotonic() + seconds
        while True:
            change, now = self._ledger.changed.next, time.monotonic()
            serving = [monitor for monitor in self._pool.monitors if self._pool.serves(monitor) and monitor.engine.trains]
            capacity = sum(sum(monitor.capacity.values()) for monitor in serving)
            if not capacity:
                self._admission.leave(session)
                raise self._unknown()
            empty = sum(not self._pool.load(monitor, now) for monitor in serving)
            if self._admission.admits(session, RECORD_CLOCK.now(), now, capacity=capacity, empty=empty):
                return
            if (left := deadline - now) <= 0 or self._ledger.changed.closed:
                raise self._refusal(session)
            await wait_for(change, min(left, _LOOK_SECONDS))

    def _refusal(self, session: str) -> HarnessError:
        message = (
            f"session {session} was not created: the KV caches of the engines have no room for it. Its place is "
            f"{self._admission.place(session)}: repeat the request under the same name within {KEPT_SECONDS:.0f} s, with ?wait=SECONDS"
        )
        return HarnessError(message, status=HTTPStatus.TOO_MANY_REQUESTS, kind="no_room", headers={"Retry-After": str(RETRY_SECONDS)})

    def _unknown(self) -> HarnessError:
        reasons = (
            "; ".join(f"{one.url}: {one.capacity_error or 'it does not serve'}" for one in self._pool.monitors) or "there is no engine"
        )
        message = f"--admission needs the size of the engines' KV caches, and none is known: {reasons}"
        return HarnessError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, kind="capacity_unknown")
