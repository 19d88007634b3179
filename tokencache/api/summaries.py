"""Lists all sessions in one line each (`trajectories.summaries`), for the viewer and for the figures of runs.

A store lists sessions in no order, and there may be tens of thousands. So all readers share one listing, and listing pauses regularly so
that calls can proceed. Those who look regularly accept one that is a little old (`kept`).
"""

import asyncio
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokencache.api.kept import Kept
from tokencache.api.reader import owed_incidents
from tokencache.core.incidents import IncidentKind
from tokencache.core.outcome import Outcome, OutcomeKind
from tokencache.errors import HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.store.clock import RECORD_CLOCK
from tokencache.trajectories.reports import tags_of
from tokencache.trajectories.summaries import SESSION_STATES, SessionSummary, summarize

_PAUSE_EVERY = 200
_WAYS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_NONE = "none"

Test = Callable[[float | None], bool]
"""Whether a value is selected."""


class Filter(NamedTuple):
    """Selects sessions: those that have all given values, as texts. Their members are the query parameters of `listSummaries`."""

    contains: str = ""
    group: str = ""
    tag: str = ""
    harness: str = ""
    model: str = ""
    run: str = ""
    outcome: str = ""
    incident: str = ""
    version: str = ""
    reward: str = ""
    turns: str = ""
    tokens: str = ""

    def test(self) -> Callable[[SessionSummary], bool]:
        """Return the function that says whether a session is selected.

        Raises:
            HarnessError: a value cannot be one of that filter (400). The message names it.
        """
        check_outcome(self.outcome)
        if self.incident and self.incident not in set(IncidentKind):
            raise HarnessError(f"incident {self.incident[:80]!r} is not one of: {', '.join(IncidentKind)}", param="incident")
        numbers = {name: number_test(name, text) for name in ("reward", "turns", "tokens") if (text := getattr(self, name))}
        same = {name: text for name in ("group", "harness", "model", "outcome", "version") if (text := getattr(self, name))}
        tags = tags_of(self.run, self.tag)
        part = self.contains.lower()

        def matches(one: SessionSummary) -> bool:
            return (
                part in one.session.lower()
                and tags <= set(one.tags)
                and all(getattr(one, name) == text for name, text in same.items())
                and (not self.incident or self.incident in one.incidents)
                and all(test(getattr(one, name)) for name, test in numbers.items())
            )

        return matches


def check_outcome(kind: str) -> None:
    """Check that a filter names a kind of outcome, or that it is empty. Raises `HarnessError` if no outcome can have that kind (400)."""
    try:
        Outcome(kind or OutcomeKind.OK)
    except ValueError as why:
        raise HarnessError(str(why).replace("`failed`", "outcome"), param="outcome") from None


def number_test(name: str, text: str) -> Test:
    """Read a filter of numbers: `3`, `>3`, `>=3`, `<3`, `<=3`, `1..3` with both ends, or `none` for a missing value.

    Raises:
        HarnessError: it is none of these (400).
    """
    if text == _NONE:
        return lambda value: value is None
    way = next((way for way in _WAYS if text.startswith(way)), "")
    first, dots, second = text.removeprefix(way).partition("..")
    least, most = _number(first), _number(second if dots else first)
    if least is None or most is None or (way and dots):
        message = f"{name} must be a number, a range such as `>0.5`, `<=3` or `1..3`, or `none`, not {text[:80]!r}"
        raise HarnessError(message, param=name)
    if way:
        return lambda value: value is not None and _WAYS[way](value, least)
    return lambda value: value is not None and least <= value <= most


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class SessionList:
    """Lists sessions and limits how often it reads the store.

    Attributes:
        recent: returns all sessions, the last used first, as they were a little while ago (`Kept.recent`). Raises `StoreError`.
        now: returns them as they are now.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        kept = Kept(self._read)
        self.recent, self.now = kept.recent, kept.now

    async def page(self, wanted: Filter, *, state: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
        """Return one page of the sessions that a filter selects, and how many there are in each state (`SESSION_STATES`).

        `sort` is one of `SORTS`; a `-` before it reverses the order. Sessions without a value come last in both orders.

        Raises:
            HarnessError: the filter is invalid.
            StoreError: the store failed.
        """
        listing = await self.recent()
        matches = wanted.test()
        named = [one for one in listing if matches(one)]
        found = _sorted([one for one in named if one.is_in(state)], sort)
        return {
            "total": len(listing),
            "found": len(found),
            "offset": offset,
            "states": {name: sum(one.is_in(name) for one in named) for name in SESSION_STATES},
            "now": RECORD_CLOCK.now(),
            "sessions": found[offset : offset + limit],
        }

    async def group(self, name: str) -> list[SessionSummary]:
        """Return the sessions of a group, the last used first. Raises `StoreError` if the store failed."""
        return [one for one in await self.recent() if one.group == name]

    async def _read(self) -> list[SessionSummary]:
        listing = []
        async for info in self._ledger.store.sessions():
            listing.append(summarize(info, await owed_incidents(self._ledger, info)))
            if not len(listing) % _PAUSE_EVERY:
                await asyncio.sleep(0)
        return sorted(listing, key=lambda one: (-one.used, one.session))


def _sorted(found: list[SessionSummary], sort: str) -> list[SessionSummary]:
    """Sort a listing, which has the last used first; sessions with equal values keep that order."""
    name = sort.removeprefix("-")
    there = [one for one in found if getattr(one, name) not in {None, ""}]
    missing = [one for one in found if getattr(one, name) in {None, ""}]
    return sorted(there, key=lambda one: getattr(one, name), reverse=sort.startswith("-")) + missing
