"""Stops a server without cutting off the requests in progress.

On the first signal (`StopSignal`) the server accepts no more connections and finishes the requests in progress. A harness that already has
a connection may send one more request. Its response has `Connection: close`, so that the next call uses a new connection. aiohttp alone
would close such connections silently and lose a call sent at that moment. When the time to drain is over, or on a second signal, the
remaining requests are cancelled. The parts of their replies that were received are recorded.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Coroutine
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from tokencache.wakeup import end

log = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
"""Time for cancelled calls to be recorded."""


class StopSignal:
    """Asks a server to stop. `requested` is set at the first signal, `at_once` at the second."""

    def __init__(self) -> None:
        self.requested, self.at_once = asyncio.Event(), asyncio.Event()

    def on_signals(self) -> None:
        """Listen for SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._receive)

    def _receive(self) -> None:
        (self.at_once if self.requested.is_set() else self.requested).set()


class Drain:
    """Tracks the requests in progress of an application, and ends them."""

    def __init__(self, app: web.Application) -> None:
        self._requests: set[asyncio.Task[Any]] = set()
        self._closing = False
        app.on_response_prepare.append(self._close_connection)

    def tracked(self, handler: Handler) -> Handler:
        """Return a handler that tracks the requests which it gives to another one."""

        def track(request: web.Request) -> Awaitable[web.StreamResponse]:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - aiohttp runs each request in one
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            return handler(request)

        return track

    async def _close_connection(self, _request: web.Request, response: web.StreamResponse) -> None:
        if self._closing:
            response.headers["Connection"] = "close"
            response.force_close()

    def begin(self) -> None:
        """Close each connection after its next response from now on."""
        self._closing = True

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no request is in progress, but at least `seconds`: a client with a connection may be about to send one."""
        await asyncio.sleep(seconds)
        while self._requests:
            await asyncio.wait(set(self._requests))

    async def cancel(self) -> None:
        """Cancel the requests in progress. The parts of their replies that were received are recorded."""
        if not self._requests:
            return
        log.warning("the time to drain is over: %d requests are cancelled; see --drain", len(self._requests))
        for task in self._requests:
            task.cancel()
        await asyncio.wait(set(self._requests), timeout=CANCEL_SECONDS)


async def run_until(work: Coroutine[Any, Any, None], deadline: float, at_once: asyncio.Event) -> None:
    """Run some work until it is done, until a time of the event loop's clock, or until `at_once` is set."""
    tasks = {asyncio.create_task(work), asyncio.create_task(at_once.wait())}
    await asyncio.wait(tasks, timeout=max(0.0, deadline - asyncio.get_running_loop().time()), return_when=asyncio.FIRST_COMPLETED)
    await end(*tasks)
