"""The reader: a session's records as they are in the store, with what the store could not take yet."""

from aiohttp import web

from tokencache.errors import HarnessError
from tokencache.proxy.ledger import Ledger
from tokencache.session_url import check_name
from tokencache.store.base import SessionInfo
from tokencache.trajectories.rollout import Records


class Reader:
    """Reads sessions for those who asked for them by name."""

    def __init__(self, ledger: Ledger) -> None:
        self._store = ledger.store
        self._ledger = ledger

    async def info(self, request: web.Request) -> SessionInfo:
        """Read the state of the session that a request's path names.

        Raises:
            HarnessError: there is none (404), or this is no name (400).
        """
        name = check_name(request.match_info["session"])
        info = await self._store.session(name)
        if info is not None:
            return info
        if self._ledger.owed(name):  # the store failed before the session could begin: the trainer must see it all the same
            return SessionInfo(name, 0.0, 0.0, False, 0, (), ())
        raise no_session(name)

    async def records(self, info: SessionInfo, *, contexts: bool = False) -> Records:
        """Read all that is recorded of a session; its contexts only if they are asked for.

        Raises:
            HarnessError: it is gone (404).
        """
        turns = await self._store.turns(info.id)
        names = [turn.id for turn in turns]
        try:
            tokens = await self._store.tokens(info.id, names) if turns else {}
            packed = await self._store.contexts(info.id, names) if turns and contexts else {}
        except KeyError:
            raise no_session(info.id) from None  # deleted just now
        return Records(info, turns, tokens, packed, self._ledger.owed(info.id))


def no_session(name: str) -> HarnessError:
    """The error for a session that is not there."""
    return HarnessError(f"there is no session {name!r}", status=404, kind="not_found_error")
