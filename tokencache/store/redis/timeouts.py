"""Provides timeouts that do not count the time in which this process itself is late.

When thousands of calls arrive at once, the event loop is seconds late: replies of the server wait in their sockets. A timeout by the wall
clock would then report the server as unresponsive and leave holes in sessions, although only this process was slow. So this module counts
time in ticks, at most one for each round of the event loop: an operation that needs ten rounds gets at least ten ticks, however long a
round takes. While the loop is on time, a tick has its nominal length.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

TICK = 0.05
"""Nominal length of a tick, in seconds."""


class LoopTimeouts:
    """Timeouts of concurrent operations. One timer drives all of them."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, timeout: asyncio.Timeout, seconds: float) -> None:
        """Let a timeout expire after so many seconds."""
        self._due[timeout] = self._now + seconds
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def stop(self, timeout: asyncio.Timeout) -> None:
        """Let it expire no more."""
        self._due.pop(timeout, None)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._now += TICK
        for timeout in [timeout for timeout, due in self._due.items() if due <= self._now]:
            del self._due[timeout]
            timeout.reschedule(loop.time())
        self._timer = loop.call_later(TICK, self._tick) if self._due else None


class Limit:
    """Limits the time of an `async with` context to so many seconds, and raises `TimeoutError` if it takes longer.

    It yields an `asyncio.Timeout`, which knows whether the time is over. Both methods return the coroutine of that.
    """

    def __init__(self, timeouts: LoopTimeouts, seconds: float) -> None:
        self._timeouts, self._seconds = timeouts, seconds
        self._timeout = asyncio.Timeout(None)

    def __aenter__(self) -> Coroutine[Any, Any, asyncio.Timeout]:
        self._timeouts.start(self._timeout, self._seconds)
        return self._timeout.__aenter__()

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, bool | None]:
        self._timeouts.stop(self._timeout)
        return self._timeout.__aexit__(kind, error, trace)
