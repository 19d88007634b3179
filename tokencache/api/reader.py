"""Reads a session from the store, together with incidents that the store could not save yet."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from tokencache.api.http import not_found
from tokencache.core.incidents import Incident
from tokencache.core.session import Reward
from tokencache.core.turn import Turn
from tokencache.core.weights import Announced
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.errors import HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.session_url import check_name
from tokencache.store.base import DamagedError, SessionInfo
from tokencache.trajectories.formats.native import incident_object, labels_object, reward_object
from tokencache.trajectories.rollout import Records, current_reward, past_incidents, worth_object


class SessionReader:
    """Reads sessions for handlers."""

    def __init__(self, ledger: Ledger, weights: AnnouncedWeights) -> None:
        self._store = ledger.store
        self._ledger = ledger
        self._weights = weights

    @property
    def announced(self) -> Sequence[Announced]:
        """The policy versions that trainers announced, the newest last."""
        return self._weights.known.history

    async def info(self, request: web.Request) -> SessionInfo:
        """Read the state of the session that the path of a request names.

        Raises:
            HarnessError: there is no such session (404), or the name is invalid (400).
        """
        name = check_name(request.match_info["session"])
        info = await self._store.session(name)
        if info is not None:
            return info
        if self._ledger.unsaved(name):  # the store failed before the session began; the trainer must still see its incidents
            return SessionInfo(name, 0.0, 0.0, False, 0, (), ())
        raise no_session(name)

    async def records(self, info: SessionInfo, *, contexts: bool = False) -> Records:
        """Read all records of a session, with the requests of its turns if `contexts` is set.

        Raises:
            HarnessError: the session was deleted meanwhile (404).
        """
        turns = await self.turns(info)
        names = [turn.id for turn in turns]
        try:
            tokens = await self._store.tokens(info.id, names) if turns else {}
            packed = await self._store.contexts(info.id, names) if turns and contexts else {}
        except KeyError:
            if await self.is_gone(info):
                raise no_session(info.id) from None
            tokens, packed = {}, {}
        return Records(info, turns, tokens, packed, self._ledger.unsaved(info.id), announced=self.announced)

    async def turns(self, info: SessionInfo) -> list[Turn]:
        """Read the turns of a session, in the order in which they were recorded; fewer than its state says if its records are torn.

        Raises:
            HarnessError: the session was deleted meanwhile (404).
        """
        turns = await self._store.turns(info.id)
        if len(turns) < info.turns and await self.is_gone(info):
            raise no_session(info.id)
        return turns

    async def is_gone(self, info: SessionInfo) -> bool:
        """Whether a session was deleted, and perhaps created again."""
        now = await self._store.session(info.id)
        return now is None or now.epoch != info.epoch


async def owed_incidents(ledger: Ledger, info: SessionInfo) -> list[Incident]:
    """Return the incidents of a session that the store does not have: those that could not be saved yet, and one for outdated rewards.

    Only an export says that the turns of a session are damaged.
    """
    unsaved, reward = ledger.unsaved(info.id), info.reward
    if reward is None or not reward.sequences or reward.recorded == info.turns:
        return [*unsaved]
    with suppress(DamagedError):
        return [*unsaved, *current_reward(info, await ledger.store.turns(info.id))[1]]
    return [*unsaved]


def state_object(info: SessionInfo, owed: Sequence[Incident]) -> dict[str, Any]:
    """Write the state of a session as JSON values. `owed` are incidents that the store could not save yet."""
    return {
        "session": info.id,
        "state": info.state,
        "created": info.created,
        "used": info.used,
        "finished": info.finished,
        "sealed": info.sealed,
        "harness": info.harness,
        "model": info.model,
        "turns": info.turns,
        "tokens": info.sampled,
        **reward_object(info.reward or Reward()),
        **labels_object(info.labels),
        **worth_object(info, owed),
        "open_calls": [msgspec.to_builtins(call) for call in info.open_calls],
        "incidents": [incident_object(incident) for incident in past_incidents(info, owed)],
    }


def no_session(name: str) -> HarnessError:
    """Return the error (404) for a session that does not exist."""
    return not_found(f"there is no session {name!r}")
