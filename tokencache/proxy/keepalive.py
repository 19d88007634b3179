"""Signs of life: something is said to a harness, again and again, while nothing else is.

Harnesses and the proxies before them hang up on silence. Nearly every wait is over before the first sign is due, so until then there is a
timer and no task: a task that is begun and cancelled costs each streamed call some 20 µs.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any


class SignsOfLife:
    """Gives a sign every so many `seconds`, as long as the context is open; it is opened once.

    `sign` says it; once it raises a `ConnectionError` nobody is there to hear another. `open` is whether the context is.
    """

    def __init__(self, seconds: float, sign: Callable[[], Awaitable[Any]]) -> None:
        self._seconds, self._sign = seconds, sign
        self._timer: asyncio.TimerHandle
        self._signs: asyncio.Task[None] | None = None
        self.open = False

    async def __aenter__(self) -> None:
        """Begin to wait."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._begin)
        self.open = True

    async def __aexit__(self, *_: object) -> None:
        """Give no more signs; one that is being given is broken off."""
        self.open = False
        self._timer.cancel()
        del self._sign  # it is most often a method of who holds this: such a circle would keep a call and its request in memory
        signs, self._signs = self._signs, None
        if signs is not None:
            signs.cancel()
            await asyncio.gather(signs, return_exceptions=True)

    def _begin(self) -> None:
        self._signs = asyncio.create_task(self._give(self._sign))

    async def _give(self, sign: Callable[[], Awaitable[Any]]) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await sign()
                await asyncio.sleep(self._seconds)
