"""Finds out that the store has lost a session between two of its calls: its next call begins a new epoch, which would look whole."""

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from tokencache.core.incidents import Incident, IncidentKind
from tokencache.store.base import BeginResult, SessionGoneError, Store, StoreError
from tokencache.store.clock import RECORD_CLOCK

log = logging.getLogger(__name__)

_MOST = 65_536
"""Maximum number of sessions that are remembered."""
_SECONDS = 3000.0
"""Seconds after which an epoch is not looked for: a store remembers for an hour that it was deleted."""
_LOST = "the store has lost what was recorded of the session before this call"


class KnownEpoch(msgspec.Struct):
    """An epoch of a session.

    Attributes:
        epoch: its id.
        opening: the deepest look-up key of its first call; empty if that is not known, or if the call's history had no replies.
        at: when its last call in this process began, in seconds of the monotonic clock.
    """

    epoch: str
    opening: Sequence[bytes]
    at: float = 0.0


class KnownEpochs:
    """Remembers the epochs of the sessions that this process serves.

    Attributes:
        last: session → the epoch of its last call here.
    """

    def __init__(self, store: Store, add: Callable[[str, Sequence[Incident]], Awaitable[None]]) -> None:
        self._store, self._add = store, add
        self.last: dict[str, KnownEpoch] = {}

    async def note(self, session: str, call: str, begun: BeginResult, deepest: Sequence[bytes]) -> KnownEpoch:
        """Note an epoch that is not the last one known here. Add an incident if its harness goes on with one that the store has lost.

        A history with replies shows that while the epoch has none. It does not if the lost epoch began with the same replies: they are
        examples, and the rollout begins anew.

        Args:
            session: the session.
            call: id of the call.
            begun: what the store returned.
            deepest: the first look-up key of the last reply in the call's history; empty if it has none.
        """
        known, before = KnownEpoch(begun.epoch, () if begun.tokens else deepest), self.last.get(session)
        if before is not None and not (begun.tokens or deepest):
            return known  # a side call may come first
        self.last.pop(session, None)
        self.last[session] = known
        if len(self.last) > _MOST:
            del self.last[next(iter(self.last))]
        if before is not None and not begun.tokens and deepest != before.opening and time.monotonic() - before.at <= _SECONDS:
            await self._look_for(session, before.epoch, call)
        return known

    async def _look_for(self, session: str, epoch: str, call: str) -> None:
        try:
            await self._store.settle(session, epoch, call)
        except SessionGoneError as why:
            if not why.deleted:
                with contextlib.suppress(StoreError):  # the call goes on in any case
                    await self._add(session, [IncidentKind.SESSION_LOST.incident(_LOST, call=call, at=RECORD_CLOCK.now())])
        except StoreError as why:
            log.warning("session %s call %s: it is not known whether the store has lost the session: %s", session, call, why)

    def forget(self, session: str) -> None:
        """Forget a session that was deleted."""
        self.last.pop(session, None)
