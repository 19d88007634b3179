"""A session in one line: what lists, and the figures of a run (`runs`), know of it. Neither turns nor tokens are read for it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tokencache.core.incidents import Incident
from tokencache.core.outcome import LatestTurn, OutcomeKind
from tokencache.store.base import SessionInfo
from tokencache.trajectories.reports import GROUP_SIZE, RETRY_OF
from tokencache.trajectories.rollout import count_incidents, past_incidents, worth_object
from tokencache.trajectories.versions import spans_of

SESSION_STATES = ("any", "live", "incomplete", "complete", "failed", "incidents", "open", "finished", "sealed")
SORTS = ("used", "created", "session", "state", "harness", "model", "group", "reward", "turns", "tokens")
"""States by which a list is filtered (`SessionSummary.is_in`), and members by which it is sorted."""


class SessionSummary(msgspec.Struct, frozen=True):
    """A session in one line. Times are Unix time in seconds.

    Attributes:
        state: `open`, `finished` or `sealed`.
        finished: when it was finished, or `None`.
        tokens: number of sampled tokens.
        length: number of tokens of its newest turn, prompt and completion.
        call_seconds: seconds that its recorded calls took, added up.
        version: the policy version of the newest token of its newest turn; `""` if it is not known.
        since: start of the oldest open call, or `None`.
        incidents: number of incidents of each kind.
        group_size: how many rollouts its group shall have, as its metadata say; 0 if they do not.
        retry_of: the session that it plays again; `""` if there is none.
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
    finished: float | None = None
    length: int = 0
    call_seconds: float = 0.0
    version: str = ""
    group_size: int = 0
    retry_of: str = ""

    def is_in(self, state: str) -> bool:
        """Whether the session is in a state of `SESSION_STATES`."""
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


def summarize(info: SessionInfo, owed: Sequence[Incident]) -> SessionSummary:
    """Return a session in one line. `owed` are incidents that the store could not save yet."""
    latest, size, retried = info.latest or LatestTurn(), info.labels.metadata.get(GROUP_SIZE), info.labels.metadata.get(RETRY_OF)
    worth: dict[str, Any] = worth_object(info, owed)
    return SessionSummary(
        session=info.id,
        created=info.created,
        used=info.used,
        finished=info.finished,
        state=info.state,
        sealed=info.sealed,
        **worth,
        harness=info.harness,
        model=info.model,
        group=info.labels.group,
        tags=info.labels.tags,
        reward=info.reward.reward if info.reward is not None else None,
        turns=info.turns,
        tokens=info.sampled,
        length=latest.prompt_tokens + latest.completion_tokens,
        call_seconds=info.call_ms / 1000,
        version=next((span.version for span in reversed(spans_of(latest))), ""),
        open_calls=len(info.open_calls),
        since=min((call.since for call in info.open_calls), default=None),
        incidents=count_incidents(past_incidents(info, owed)),
        group_size=size if type(size) is int and size > 0 else 0,
        retry_of=retried if isinstance(retried, str) else "",
    )
