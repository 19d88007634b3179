"""Drain: how a server ends without cutting off what it is doing.

Told to stop, it lets nobody in any more and finishes what is under way. A harness that has a connection already may
still ask: it is answered, with `Connection: close`, so that its next call goes elsewhere; aiohttp by itself would end such connections
without a word, and a call that was sent at that moment would be lost. When its time is over, what is left is cut, and recorded as far as
it had come; likewise when it is told to stop a second time.
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)

CUT_SECONDS = 5.0
"""For calls that were cut off to write what they came to."""


class Stop:
    """The word to stop: `asked` when it came, `at_once` when it came again."""

    def __init__(self) -> None:
        self.asked, self.at_once = asyncio.Event(), asyncio.Event()

    def on_signals(self) -> None:
        """Take SIGTERM and SIGINT for that word."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._again)

    def _again(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()


class Drain:
    """Knows the requests of an application that are under way, and ends them."""

    def __init__(self, app: web.Application) -> None:
        self._under_way: set[asyncio.Task[Any]] = set()
        self._rest = asyncio.Event()
        self._rest.set()
        self._ending = False
        app.middlewares.insert(0, self._count)
        app.on_response_prepare.append(self._say_close)

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - aiohttp runs each request in one
        self._under_way.add(task)
        self._rest.clear()
        try:
            return await handler(request)
        finally:
            self._under_way.discard(task)
            if not self._under_way:
                self._rest.set()

    async def _say_close(self, _request: web.Request, response: web.StreamResponse) -> None:
        if self._ending:
            response.headers["Connection"] = "close"
            response.force_close()

    def begin(self) -> None:
        """From now on every answer says that its connection ends with it."""
        self._ending = True

    async def rest(self, quiet: float) -> None:
        """Return when nothing is under way, but not before `quiet` seconds: who has a connection may be about to ask."""
        await asyncio.sleep(quiet)
        await self._rest.wait()

    async def cut(self) -> None:
        """End what is under way: it is recorded as far as it has come."""
        if not self._under_way:
            return
        log.warning("%d calls and other requests are cut off: the time to drain is over", len(self._under_way))
        for task in self._under_way:
            task.cancel()
        await asyncio.wait(set(self._under_way), timeout=CUT_SECONDS)


async def patiently(work: Coroutine[Any, Any, None], until: float, at_once: asyncio.Event) -> None:
    """Wait for some work to be done, until a time of the event loop's clock, or until all must end at once."""
    tasks = {asyncio.create_task(work), asyncio.create_task(at_once.wait())}
    await asyncio.wait(tasks, timeout=max(0.0, until - asyncio.get_running_loop().time()), return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
