"""Closes the calls of replicas that are gone, so that a finished session does not wait for them without end.

A replica that was killed closes nothing. Its calls stay open in the store, and its heartbeat ends. A restarted store has lost all
heartbeats, so a replica counts as gone only if none arrives for a while.
"""

import contextlib
import logging
import time

from tokencache.core.incidents import Incident, IncidentKind
from tokencache.recent import Recent
from tokencache.store.base import OpenCall, SessionGoneError, SessionInfo, Store

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS, LIVE_SECONDS = 3.0, 10.0
"""Seconds between two heartbeats of a replica, and for which a heartbeat is valid."""
_MOST_CALLS = 10_000


def lost(call: OpenCall) -> Incident:
    """Make the incident of a call whose replica is gone. Its time is that at which the call began: later calls may have made up for it."""
    detail = "the proxy that served this call is gone: what the engine said to it is not recorded"
    return IncidentKind.REPLICA_LOST.incident(detail, call=call.call, at=call.since)


class LostCalls:
    """Finds calls of replicas that are gone. Its memory is of when each call was first seen without a heartbeat of its replica."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._silent_since: Recent[str, float] = Recent(_MOST_CALLS)

    async def close(self, info: SessionInfo) -> None:
        """Close the calls of a session whose replicas are gone, each with an incident.

        Raises:
            StoreError: the store failed.
        """
        calls = [call for call in info.open_calls if call.replica]
        live = await self._store.live_replicas(sorted({call.replica for call in calls})) if calls else set()
        now = time.monotonic()
        for call in calls:
            if call.replica in live:
                self._silent_since.pop(call.call, None)
            elif now - self._silent_since.setdefault(call.call, now) >= HEARTBEAT_SECONDS:
                log.warning("session %s call %s: closed, because replica %s is gone", info.id, call.call, call.replica)
                with contextlib.suppress(SessionGoneError):
                    await self._store.settle(info.id, info.epoch, call.call, [lost(call)])
