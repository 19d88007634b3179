"""Caches the settings of sessions in this process, and corrects them when the store reports others.

The settings belong to the session (`core.session.SessionSettings`). A call is served by the settings that this process knows, usually
none, and `Store.begin` compares their digest with that of the session's. If they differ, nothing has begun: the true settings are cached,
and the call is served again by them. So a session without settings costs no further round trip, and one with settings costs one in each
process.
"""

import contextlib

from tokencache.core.session import Labels, SessionSettings
from tokencache.proxy.sessions import Origin
from tokencache.recent import Recent
from tokencache.store.base import SettingsChangedError, SettingsConflictError, Store

_MOST_SESSIONS = 65_536
_NONE = SessionSettings()


class SettingsCache:
    """The settings of sessions, as far as this process knows them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: Recent[str, SessionSettings] = Recent(_MOST_SESSIONS)

    def of(self, session: str, origin: Origin) -> SessionSettings:
        """Return the settings by which a call of a session is served first."""
        return self._known.get(session) or origin.old_settings

    async def learn(self, session: str, origin: Origin, true: SessionSettings) -> None:
        """Note the settings of a session, which the store has reported.

        If it has none, and an older version stored settings with the key that the call used, these become the session's.

        Raises:
            StoreError: the store failed.
        """
        if not true and origin.old_settings:
            with contextlib.suppress(SettingsConflictError):  # another call was faster: the next attempt learns what it defined
                await self._store.define(session, origin.old_settings, Labels(), adopt=True)
            true = origin.old_settings
        if true:
            self._known[session] = true
        else:
            self._known.pop(session, None)

    async def check(self, session: str, used: SessionSettings) -> None:
        """Check the settings by which a request is served that begins no call.

        Raises:
            SettingsChangedError: the session has others.
            StoreError: the store failed.
        """
        true = await self._store.settings(session)
        if true is not None and true != used:
            raise SettingsChangedError(true)
