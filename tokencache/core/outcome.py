"""Says how a rollout ended: well, or by a failure that is no fault of the policy, and of which kind.

A failure of the infrastructure is a fact about a rollout, and not a reward. So a session has an *outcome* beside `complete`: `ok`, or a
kind of failure with a detail. A rollout is *valid* if it is complete and its outcome is `ok`; only then its reward says something about
the policy.

The outcome is a function of what is stored: what was given when the session was finished, its incidents, and its newest turn, which is the
one whose call began last, whenever it was recorded. So it is the same on every replica, and for a session that an older version recorded.
What was given decides. Otherwise the first of these that holds:

1. An incident whose cause is `lasting` (`CAUSES`), unless it lost nothing: nothing that the harness does later makes up for it.
2. The newest of the other incidents in `CAUSES`, if no later turn began, and no later call received the recorded reply of the newest turn:
   the harness gave up. A call that waited for that reply makes up for incidents of the turn's own call, and for others before it arrived.
3. The newest turn is marked `unanswered`, and no retry received its reply: the harness left, and never came back. A `second-sample` is no
   evidence unless it is marked `never-answered`: an equal call had been answered, and the network may deliver a call after its retry. If
   its client left, failures of the engine in that call are none either.
4. The session is over, and has no turn: its harness made no call.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.turn import Turn, TurnMark

MAX_DETAIL = 2000
"""Characters of a detail that are kept, from its beginning."""
_OWN_WORD = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_REFUSALS, _TOO_MANY = range(400, 500), HTTPStatus.TOO_MANY_REQUESTS
_HOLES = frozenset(kind for kind in IncidentKind if kind.hole)
_ANSWERED_LATER = frozenset({IncidentKind.RETRY_JOINED, IncidentKind.RETRY_REPLAYED})


class OutcomeKind(StrEnum):
    """How a rollout ended. A caller may use words of its own for further kinds of failures.

    `ok`        no failure is known
    `engine`    the engine failed, or was not reached, or the proxy failed to serve a call, and the harness gave up
    `harness`   the harness broke down, left, or never made a call
    `sandbox`   the environment of the harness failed
    `timeout`   the time was up
    `budget`    the budget of the session was used up
    `canceled`  somebody ended the rollout early
    `store`     the proxy's store lost a part of it, or failed, and the harness gave up
    """

    OK = "ok"
    ENGINE = "engine"
    HARNESS = "harness"
    SANDBOX = "sandbox"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    CANCELED = "canceled"
    STORE = "store"


class Outcome(msgspec.Struct, frozen=True):
    """How a rollout ended.

    Attributes:
        kind: an `OutcomeKind`, or a word of the caller's own: a lower-case letter and at most 31 of `a-z 0-9 _ -`.
        detail: what happened, in words; cut after 2,000 characters.

    Raises:
        ValueError: `kind` is no such word.
    """

    kind: str = OutcomeKind.OK
    detail: str = ""

    def __post_init__(self) -> None:
        """Check the kind, and cut the detail."""
        if not _OWN_WORD.fullmatch(self.kind):
            words = ", ".join(OutcomeKind)
            raise ValueError(f"`failed` must be one of {words}, or a word of your own ({_OWN_WORD.pattern}), not {self.kind[:80]!r}")
        msgspec.structs.force_setattr(self, "detail", self.detail[:MAX_DETAIL])

    @property
    def ok(self) -> bool:
        """Whether no failure is known."""
        return self.kind == OutcomeKind.OK


class FailureCause(NamedTuple):
    """The failure that an incident is evidence of.

    Attributes:
        kind: the failure.
        lasting: whether nothing makes up for it. Otherwise it counts only while no later turn began.
        only_faults: whether it counts only if the engine's status blames the engine: not 4xx, except 429.
    """

    kind: OutcomeKind
    lasting: bool = False
    only_faults: bool = False


CAUSES: Mapping[str, FailureCause] = MappingProxyType(
    {
        IncidentKind.STORE_ERROR: FailureCause(OutcomeKind.STORE, lasting=True),
        IncidentKind.SESSION_LOST: FailureCause(OutcomeKind.STORE, lasting=True),
        IncidentKind.TORN_RECORD: FailureCause(OutcomeKind.STORE, lasting=True),
        IncidentKind.SEALED_EARLY: FailureCause(OutcomeKind.CANCELED, lasting=True),
        IncidentKind.BUDGET_SPENT: FailureCause(OutcomeKind.BUDGET, lasting=True),
        IncidentKind.ENGINE_REFUSED: FailureCause(OutcomeKind.ENGINE, only_faults=True),
        IncidentKind.UPSTREAM_DOWN: FailureCause(OutcomeKind.ENGINE),
        IncidentKind.REQUEST_NOT_READ: FailureCause(OutcomeKind.ENGINE),
        IncidentKind.UPSTREAM_BROKE: FailureCause(OutcomeKind.ENGINE),
        IncidentKind.REPLICA_LOST: FailureCause(OutcomeKind.ENGINE),
        IncidentKind.ENGINE_ERROR: FailureCause(OutcomeKind.ENGINE),
        IncidentKind.ENGINE_ABORTED: FailureCause(OutcomeKind.ENGINE),
        IncidentKind.CLIENT_GONE: FailureCause(OutcomeKind.HARNESS),
        IncidentKind.INTERNAL_ERROR: FailureCause(OutcomeKind.ENGINE),
    }
)
"""Which incident leads to which failure. All other incidents lead to none. The order is that of rule 1."""


class LatestTurn(msgspec.Struct, frozen=True):
    """As much of a session's newest turn as its state needs. A turn's record can be decoded as one; the rest is skipped.

    Attributes:
        id, call, model, harness, marks, prompt_tokens, completion_tokens, versions, version_source: as in `Turn`.
        created: when its call began, as Unix time in seconds.
    """

    id: str = ""
    call: str = ""
    model: str = ""
    harness: str = ""
    marks: tuple[str, ...] = ()
    created: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    versions: list[Any] = []
    version_source: str = ""

    @classmethod
    def of(cls, turn: Turn) -> "LatestTurn":
        """Return as much of a turn."""
        return cls(*[getattr(turn, name) for name in cls.__struct_fields__])


def outcome_of(given: Outcome | None, incidents: Sequence[Incident], latest: LatestTurn | Turn | None, *, over: bool) -> Outcome:
    """Return the outcome of a session.

    Args:
        given: what was given when the session was finished; `None` if nothing was.
        incidents: all its incidents.
        latest: its newest turn; `None` if it has none.
        over: whether it is finished or sealed. While it is open, the outcome is what is known so far.
    """
    if given is not None:
        return given
    evidence = [one for one in incidents if _is_failure(one)]
    for kind, cause in CAUSES.items():
        if cause.lasting and (found := _newest([one for one in evidence if one.kind == kind and not _lost_nothing(one)])):
            return _from(found)
    began, call = (latest.created, latest.call) if latest is not None else (0.0, "")
    left = latest is not None and TurnMark.UNANSWERED in latest.marks
    late = latest is not None and TurnMark.SECOND_SAMPLE in latest.marks and TurnMark.NEVER_ANSWERED not in latest.marks
    if left and late:
        evidence = [one for one in evidence if one.call != call or one.kind == IncidentKind.CLIENT_GONE]
    retries = [one for one in incidents if one.kind in _ANSWERED_LATER and one.call == call]
    received = max((one.at for one in retries), default=0.0)
    repeated = max((one.at if one.kind == IncidentKind.RETRY_REPLAYED else one.since for one in retries), default=0.0)
    if found := _newest([one for one in evidence if one.at >= max(began, received if one.call == call else repeated)]):
        return _from(found)
    if latest is None:
        return Outcome(OutcomeKind.HARNESS, "no call was recorded") if over else Outcome()
    if left and not (received or late):
        return Outcome(OutcomeKind.HARNESS, f"the harness left before the reply of turn {latest.id}, and never came back")
    return Outcome()


def _newest(incidents: Sequence[Incident]) -> Incident | None:
    return max(incidents, key=lambda one: one.at, default=None)


def _is_failure(incident: Incident) -> bool:
    cause = CAUSES.get(incident.kind)
    return cause is not None and not (cause.only_faults and (not incident.status or _is_refusal(incident.status)))


def _lost_nothing(incident: Incident) -> bool:
    """Whether nothing is missing although the kind is a hole: a call was refused because the store failed."""
    return incident.kind in _HOLES and not incident.hole


def _is_refusal(status: int) -> bool:
    """Whether an engine's HTTP status blames the request: 4xx, except 429 (too many requests)."""
    return status in _REFUSALS and status != _TOO_MANY


def _from(incident: Incident) -> Outcome:
    return Outcome(CAUSES[incident.kind].kind, f"{incident.kind}: {incident.detail}" if incident.detail else incident.kind)
