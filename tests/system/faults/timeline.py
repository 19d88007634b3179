"""The campaign's own log: faults, recoveries and calls, with times. It explains a hole that no incident names."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class Timeline:
    """What happened, in order. An event belongs to a session, or to all of them."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._events: list[tuple[float, str, str]] = []

    def note(self, words: str, session: str = "") -> None:
        self._events.append((time.monotonic() - self._began, session, words))

    def excerpt(self, sessions: Collection[str]) -> str:
        """The events of these sessions and of all, a line each, with seconds since the beginning."""
        return "\n".join(f"{at:8.3f} {session:<6} {words}" for at, session, words in self._events if not session or session in sessions)
