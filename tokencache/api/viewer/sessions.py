"""The list of all sessions, and the outline of one session: its turns as a tree of sequences, with figures and incidents.

A store lists sessions in no order, and there may be tens of thousands. So all viewers share one listing, which is cached for a while, and
listing pauses regularly so that calls can proceed. An outline is made from the turns alone, without reading tokens.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from tokencache.api.openapi import SESSION_STATES
from tokencache.api.reader import state_object
from tokencache.core.incidents import Incident, failed_calls
from tokencache.core.lineage import lineages
from tokencache.core.outcome import OutcomeKind
from tokencache.core.session import Reward
from tokencache.core.turn import Turn, TurnMark
from tokencache.core.weights import Announced
from tokencache.proxy.ledger import Ledger
from tokencache.store.base import SessionInfo
from tokencache.trajectories.formats.native import incident_object
from tokencache.trajectories.rollout import count_incidents, figures_of, incidents_of, worth_object
from tokencache.trajectories.versions import count_versions

_FRESH_SECONDS = 1.0
_KEPT_FACTOR = 20
"""A listing is cached for this many times its own duration, so that viewing costs at most a twentieth of the time."""
_PAUSE_EVERY = 200
_PREVIEW = 160
"""Characters of a reply that are shown next to its turn."""


class SessionSummary(msgspec.Struct, frozen=True):
    """A session in one line.

    Attributes:
        state: `open`, `finished` or `sealed`.
        tokens: number of sampled tokens.
        since: start of the oldest open call as Unix time in seconds, or `None`.
        incidents: number of incidents of each kind.
    """

    session: str
    created: float
    used: float
    state: str
    sealed: bool
    complete: bool
    outcome: str
    outcome_detail: str
    valid: bool
    harness: str
    model: str
    group: str
    tags: tuple[str, ...]
    reward: float | None
    turns: int
    tokens: int
    open_calls: int
    since: float | None
    incidents: dict[str, int]

    def is_in(self, state: str) -> bool:
        """Whether the session is in a state of `openapi.SESSION_STATES`."""
        match state:
            case "live":
                return self.open_calls > 0
            case "complete" | "incomplete":
                return self.complete == (state == "complete")
            case "failed":
                return self.outcome != OutcomeKind.OK
            case "incidents":
                return bool(self.incidents)
            case "open" | "finished" | "sealed":
                return self.state == state
            case _:
                return True


class Filter(msgspec.Struct, frozen=True):
    """Selects sessions: those that have all given values. `contains` is a part of the name, in any case."""

    contains: str = ""
    group: str = ""
    tag: str = ""
    harness: str = ""
    model: str = ""

    def matches(self, one: SessionSummary) -> bool:
        """Whether a session is selected."""
        return (
            self.contains.lower() in one.session.lower()
            and (not self.group or self.group == one.group)
            and (not self.tag or self.tag in one.tags)
            and (not self.harness or self.harness == one.harness)
            and (not self.model or self.model == one.model)
        )


class SessionList:
    """Lists sessions and limits how often it reads the store."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = asyncio.Lock()
        self._listing: list[SessionSummary] = []
        self._expires = 0.0

    async def page(self, wanted: Filter, *, state: str, sort: str, offset: int, limit: int) -> dict[str, Any]:
        """Return one page of the sessions that a filter selects, and how many there are in each state.

        Args:
            wanted: the filter.
            state: one of `openapi.SESSION_STATES`.
            sort: one of `openapi.SORTS`; a `-` before it reverses the order. Sessions without a value come last in both orders.
            offset: number of sessions to skip.
            limit: number of sessions to return.

        Raises:
            StoreError: the store failed.
        """
        listing = await self._listed()
        named = [one for one in listing if wanted.matches(one)]
        found = _sorted([one for one in named if one.is_in(state)], sort)
        return {
            "total": len(listing),
            "found": len(found),
            "offset": offset,
            "states": {name: sum(one.is_in(name) for one in named) for name in SESSION_STATES},
            "now": time.time(),
            "sessions": found[offset : offset + limit],
        }

    async def group(self, name: str) -> list[SessionSummary]:
        """Return the sessions of a group, the last used first.

        Raises:
            StoreError: the store failed.
        """
        return [one for one in await self._listed() if one.group == name]

    async def _listed(self) -> list[SessionSummary]:
        async with self._lock:
            if time.monotonic() >= self._expires:
                began = time.monotonic()
                listing = []
                async for info in self._ledger.store.sessions():
                    listing.append(self._summary(info))
                    if not len(listing) % _PAUSE_EVERY:
                        await asyncio.sleep(0)
                listing.sort(key=lambda one: (-one.used, one.session))
                ended = time.monotonic()
                self._listing, self._expires = listing, ended + max(_FRESH_SECONDS, _KEPT_FACTOR * (ended - began))
            return self._listing

    def _summary(self, info: SessionInfo) -> SessionSummary:
        owed = self._ledger.unsaved(info.id)
        return SessionSummary(
            session=info.id,
            created=info.created,
            used=info.used,
            state=info.state,
            sealed=info.sealed,
            **worth_object(info, owed),
            harness=info.harness,
            model=info.model,
            group=info.labels.group,
            tags=info.labels.tags,
            reward=info.reward.reward if info.reward is not None else None,
            turns=info.turns,
            tokens=info.sampled,
            open_calls=len(info.open_calls),
            since=min((call.since for call in info.open_calls), default=None),
            incidents=count_incidents((*info.incidents, *owed)),
        )


def _sorted(found: list[SessionSummary], sort: str) -> list[SessionSummary]:
    """Sort a listing, which has the last used first; sessions with equal values keep that order."""
    name = sort.removeprefix("-")
    there = [one for one in found if getattr(one, name) not in {None, ""}]
    missing = [one for one in found if getattr(one, name) in {None, ""}]
    return sorted(there, key=lambda one: getattr(one, name), reverse=sort.startswith("-")) + missing


def outline(info: SessionInfo, turns: Sequence[Turn], owed: Sequence[Incident], announced: Sequence[Announced] = ()) -> dict[str, Any]:
    """Write the outline of a session as JSON values.

    The sequences and the figures (except drift) are those of an export.

    Args:
        info: the state of the session.
        turns: its turns, in the order in which they were recorded.
        owed: incidents that the store could not save yet.
        announced: the policy versions that trainers announced, the newest last.
    """
    incidents = incidents_of(info, owed)
    found = lineages(turns)
    sequence_of = {turn.id: number for number, line in enumerate(found) for turn in line}
    parents = {turn.parent for turn in turns}
    figures = figures_of(
        turns,
        incidents,
        sequences=len(found),
        tokens=sum(line[-1].prompt_tokens + line[-1].completion_tokens for line in found),
        sampled=sum(turn.completion_tokens for turn in turns),
        trainable=sum(turn.chosen_tokens for turn in turns if is_scored(turn)),
        versions=count_versions((turn for turn in turns if is_scored(turn)), announced),
    )
    return {
        **state_object(info, owed),
        "incidents": [incident_object(incident) for incident in incidents],
        "figures": {name: value for name, value in msgspec.to_builtins(figures).items() if name != "drift"},
        "sequences": [_sequence(number, line, sequence_of, parents, info.reward or Reward()) for number, line in enumerate(found)],
        "turns": _turns(turns, sequence_of, parents),
        "failed_calls": [incident_object(one) for one in failed_calls(incidents, {turn.call for turn in turns})],
    }


def is_scored(turn: Turn) -> bool:
    """Whether the sampled tokens of a turn have log probabilities, so that they can be trained."""
    return TurnMark.NO_LOGPROBS not in turn.marks


def _sequence(
    number: int, line: Sequence[Turn], sequence_of: Mapping[str, int], parents: AbstractSet[str | None], reward: Reward
) -> dict[str, Any]:
    first, last = line[0], line[-1]
    from_turn = first.parent or first.origin
    return {
        "number": number,
        "id": first.id,
        "parent": sequence_of.get(from_turn) if from_turn else None,
        "from_turn": from_turn if from_turn in sequence_of else None,
        "start": "branch" if first.match == "continue" else first.match,
        "reason": first.reason,
        "continued": any(turn.id in parents for turn in line),
        "tools": first.tools,
        "turns": len(line),
        "tokens": last.prompt_tokens + last.completion_tokens,
        "trainable_tokens": sum(turn.chosen_tokens for turn in line if is_scored(turn)),
        "reward": reward.sequences.get(first.id),
    }


def _turns(turns: Sequence[Turn], sequence_of: Mapping[str, int], parents: AbstractSet[str | None]) -> list[dict[str, Any]]:
    continued_places = {turn.position_key for turn in turns if turn.id in parents and turn.position_key}
    return [
        {
            "number": number,
            "id": turn.id,
            "call": turn.call,
            "sequence": sequence_of[turn.id],
            "match": turn.match,
            "reason": turn.reason,
            "parent": turn.parent,
            "origin": turn.origin,
            "forgiven": turn.applied_rules,
            "anchors": len(turn.anchors),
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "finish_reason": turn.finish_reason,
            "marks": turn.marks,
            "replaced": sorted(turn.replaced),
            "model": turn.model,
            "harness": turn.harness,
            "dialect": turn.dialect,
            "stream": turn.stream,
            "choice": turn.choice,
            "messages": turn.messages,
            "tools": turn.tools,
            "created": turn.created,
            "seconds": turn.seconds,
            "continued": turn.id in parents,
            # the harness continued with another answer to the same conversation
            "thrown_away": turn.id not in parents and turn.position_key in continued_places,
            "says": preview(turn),
        }
        for number, turn in enumerate(turns)
    ]


def preview(turn: Turn) -> str:
    """Return the beginning of a reply: its text and calls, or else its reasoning."""
    served = turn.served
    text = " ".join((served.content or "").split())
    calls = " ".join(f"{call.name}({' '.join(call.arguments.split())})" for call in served.calls)
    shown = " ".join(filter(None, (text, calls))) or " ".join((served.reasoning or "").split())
    return shown if len(shown) <= _PREVIEW else shown[:_PREVIEW] + "…"
