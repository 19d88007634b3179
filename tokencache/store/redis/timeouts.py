"""Patience: time limits that run only as far as this process can follow.

When thousands of calls come at once the event loop is behind by seconds: answers of the server lie in their sockets, and a limit by
the wall clock would take the server for dead and leave holes in sessions, where nobody was slow but ourselves. So time goes by here in
ticks, at most one in each round of the event loop: what needs ten rounds needs no more than ten ticks, however long the rounds are.
While the loop is on time, a tick is as long as it says.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

TICK = 0.05


class Patience:
    """Limits what is waited for to so many seconds; one timer for all that is under way."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Raise `TimeoutError` if what is done in the context takes longer, as `asyncio.timeout` does."""
        async with asyncio.timeout(None) as timeout:
            self._due[timeout] = self._now + seconds
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
            try:
                yield
            finally:
                self._due.pop(timeout, None)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._now += TICK
        for timeout in [timeout for timeout, due in self._due.items() if due <= self._now]:
            del self._due[timeout]
            timeout.reschedule(loop.time())
        self._timer = loop.call_later(TICK, self._tick) if self._due else None
