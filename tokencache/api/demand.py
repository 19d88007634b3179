"""Says what consumers of the queue could take, from what they asked for.

The store has what each consumer asked for last (`Take`), so all replicas know it. A consumer counts while its request is not much older
than the newest one: a consumer that waits asks again at least once a minute.

Sessions of one group are put together as a consumer asked (`Gathering`): first whole groups; then, with `group_timeout`, those parts of
groups that have waited too long. What consumers take and what `--max-ready` counts is found in this one way.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.api.requests import Take
from tokencache.core.session import SessionStage
from tokencache.store.base import QueueEntry, SessionInfo

LIVING_SECONDS = 120.0
"""A consumer counts if it asked at most so long before the newest request of any consumer."""
FORGOTTEN_SECONDS = 86400.0
"""What a consumer asked for is deleted from the store when it is so much older than the newest request."""


class Candidate(NamedTuple):
    """An entry of the queue, and the session of it."""

    entry: QueueEntry
    info: SessionInfo

    @property
    def over(self) -> float:
        """When the session was finished, as Unix time in seconds; or offered, if it was sealed without that."""
        return self.info.finished or self.entry.at


class Demand(msgspec.Struct, frozen=True):
    """What a consumer asked for, at a Unix time in seconds."""

    at: float
    asked: Take


class Demands(NamedTuple):
    """What consumers asked for: those that count, the newest first; and consumers that did not ask for a long time."""

    living: list[Take]
    forgotten: list[str]

    def concerning(self, info: SessionInfo) -> Take | None:
        """Return the newest request for such a session, with or without a reward; `None` if there is none."""
        return next((asked for asked in self.living if asks_for(asked, info)), None)


def write_demand(asked: Take, at: float) -> bytes:
    """Encode what a consumer asked for, for the store."""
    return msgspec.json.encode(Demand(at, msgspec.structs.replace(asked, holding=[])))


def read_demands(stored: Iterable[bytes]) -> Demands:
    """Decode what consumers asked for. What cannot be decoded, because another version wrote it, does not count."""
    found = []
    for one in stored:
        try:
            found.append(msgspec.json.decode(one, type=Demand))
        except ValueError:
            continue
    found.sort(key=lambda one: -one.at)
    newest = found[0].at if found else 0.0
    living = [one.asked for one in found if one.at >= newest - LIVING_SECONDS]
    return Demands(living, [one.asked.consumer for one in found if one.at < newest - FORGOTTEN_SECONDS])


class Gathering:
    """Puts ready sessions together to deliveries, as one consumer asked. They are added in the order of the queue."""

    def __init__(self, asked: Take) -> None:
        self._asked = asked
        self._waiting: dict[str, list[Candidate]] = {}  # of each group, fewer than a delivery needs

    @property
    def short(self) -> set[str]:
        """The groups of which sessions wait for further ones."""
        return set(self._waiting)

    def add(self, one: Candidate) -> list[Candidate]:
        """Add a session. Returns the sessions of its group if that is whole now, otherwise nothing."""
        group = one.info.labels.group
        if self._asked.group_size > 1 and not group:
            return []
        members = self._waiting.setdefault(group, [])
        members.append(one)
        return self._waiting.pop(group) if len(members) >= self._asked.group_size else []

    def overdue(self, now: float) -> list[list[Candidate]]:
        """Return the parts of groups that have waited too long, and are large enough. `now` is Unix time in seconds."""
        least, patience = self._asked.min_group, self._asked.group_timeout
        if least is None or patience is None:
            return []
        return [
            members for members in self._waiting.values() if len(members) >= least and now - min(one.over for one in members) >= patience
        ]


def group_state(group: str, members: Sequence[Candidate], demands: Demands, now: float) -> dict[str, Any]:
    """Describe the sessions of a group that are in the queue and not taken (`GroupState`). `now` is Unix time in seconds."""
    asked = next(filter(None, (demands.concerning(one.info) for one in members)), None)
    ready = [one.info for one in members if is_ready(one.info)]
    return {
        "group": group,
        "size": asked.group_size if asked else 0,
        "ready": len(ready),
        "short": asked is None or not ready or len(ready) % asked.group_size > 0,
        "waits_for": [one.info.id for one in members if not is_ready(one.info)],
        "unrewarded": [info.id for info in ready if asked and lacks_reward(asked, info)],
        "waited": max(0.0, now - min(one.over for one in members)),
    }


def is_ready(info: SessionInfo) -> bool:
    """Whether a consumer may take a session. What is sealed may be taken even if a call that was cut off never ends."""
    return info.state is SessionStage.SEALED or (info.state is SessionStage.FINISHED and not info.open_calls)


def asks_for(asked: Take, info: SessionInfo) -> bool:
    """Whether a consumer asks for such a session, once it is ready and has what the consumer waits for."""
    return (
        asked.group in {"", info.labels.group} and (not asked.tag or asked.tag in info.labels.tags) and asked.harness in {"", info.harness}
    )


def lacks_reward(asked: Take, info: SessionInfo) -> bool:
    """Whether a consumer waits for the reward of a session. Nobody rewards one that was finished as failed."""
    return asked.rewarded and not (_has_reward(info) or (info.outcome is not None and not info.outcome.ok))


def _has_reward(info: SessionInfo) -> bool:
    reward = info.reward
    return reward is not None and (reward.reward is not None or bool(reward.components or reward.turns or reward.sequences))
