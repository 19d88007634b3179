"""Provides timeouts that do not count the time in which this process itself is late.

When thousands of calls arrive at once, the event loop is seconds late: replies of the server wait in their sockets. A timeout by the wall
clock would then report the server as unresponsive and leave holes in sessions, although only this process was slow. So this module counts
time in ticks, at most one for each round of the event loop: an operation that needs ten rounds gets at least ten ticks, however long a
round takes. While the loop is on time, a tick has its nominal length.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

TICK = 0.05
"""Nominal length of a tick, in seconds."""


class LoopTimeouts:
    """Timeouts of concurrent operations. One timer drives all of them."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Limit the time of the context. Yields the timeout, which knows whether the time is over.

        Raises:
            TimeoutError: it took longer than `seconds`.
        """
        async with asyncio.timeout(None) as timeout:
            self._due[timeout] = self._now + seconds
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
            try:
                yield timeout
            finally:
                self._due.pop(timeout, None)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._now += TICK
        for timeout in [timeout for timeout, due in self._due.items() if due <= self._now]:
            del self._due[timeout]
            timeout.reschedule(loop.time())
        self._timer = loop.call_later(TICK, self._tick) if self._due else None
