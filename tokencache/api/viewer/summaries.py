"""Summaries: one line for each session, the last used first, a page at a time.

A store lists sessions in no order, and there may be tens of thousands. So a listing is taken at most once in a while, shared
by all who look, and gone through in steps between which live calls get their turn.
"""

import asyncio
import time
from collections import Counter
from typing import Any, Literal, get_args

import msgspec

from tokencache.proxy.ledger import Ledger
from tokencache.store.base import SessionInfo
from tokencache.trajectories.rollout import incidents_of, is_complete

State = Literal["any", "live", "incomplete", "complete", "incidents", "sealed"]
STATES: tuple[str, ...] = get_args(State)
"""`live`: a call is under way; `incomplete`: something is missing or still to come; `incidents`: there are some."""

_FRESH_SECONDS = 1.0
_SHARE = 20
"""A listing is kept for so many times as long as it took: to look costs at most a twentieth of the time."""
_STEP = 200


class Summary(msgspec.Struct, frozen=True):
    """A session in one line; `incidents` are counted by kind, `since` is when the oldest open call began (epoch), or `None`."""

    session: str
    created: float
    used: float
    sealed: bool
    complete: bool
    turns: int
    open_calls: int
    since: float | None
    incidents: dict[str, int]


class Summaries:
    """Lists sessions; asks the store no more often than it must."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = asyncio.Lock()
        self._known: list[Summary] = []
        self._until = 0.0

    async def page(self, *, contains: str, state: str, offset: int, limit: int) -> dict[str, Any]:
        """One page of the sessions whose name contains a text, and how many there are of each state.

        Raises:
            StoreError: the store cannot be asked.
        """
        known = await self._listing()
        named = [one for one in known if contains in one.session.lower()] if (contains := contains.lower()) else known
        states = {name: sum(_is(one, name) for one in named) for name in STATES}
        found = named if state == "any" else [one for one in named if _is(one, state)]
        return {
            "total": len(known),
            "found": len(found),
            "offset": offset,
            "states": states,
            "now": time.time(),
            "sessions": found[offset : offset + limit],
        }

    async def _listing(self) -> list[Summary]:
        async with self._lock:
            if time.monotonic() >= self._until:
                began = time.monotonic()
                listed = []
                async for info in self._ledger.store.sessions():
                    listed.append(self._summary(info))
                    if not len(listed) % _STEP:
                        await asyncio.sleep(0)
                listed.sort(key=lambda one: (-one.used, one.session))
                ended = time.monotonic()
                self._known, self._until = listed, ended + max(_FRESH_SECONDS, _SHARE * (ended - began))
            return self._known

    def _summary(self, info: SessionInfo) -> Summary:
        owed = self._ledger.owed(info.id)
        return Summary(
            session=info.id,
            created=info.created,
            used=info.used,
            sealed=info.sealed,
            complete=is_complete(incidents_of(info, owed)),
            turns=info.turns,
            open_calls=len(info.open_calls),
            since=min((call.since for call in info.open_calls), default=None),
            incidents=dict(Counter(incident.kind for incident in (*info.incidents, *owed))),
        )


def _is(one: Summary, state: str) -> bool:
    match state:
        case "live":
            return one.open_calls > 0
        case "incomplete":
            return not one.complete
        case "complete":
            return one.complete
        case "incidents":
            return bool(one.incidents)
        case "sealed":
            return one.sealed
        case _:
            return True
