"""Tells what places sessions behind the engines' URLs that one has ended, so that it releases what it keeps for it.

These are the URLs of `--placement none`, and those of which a probe found that they place sessions (`Engine.places`). It is best effort:
nobody waits for it, and nothing is repeated.
"""

import asyncio
import contextlib
from http import HTTPStatus

from tokencache import metrics
from tokencache.engine.model import Engine
from tokencache.engine.pool import Pool
from tokencache.errors import EngineError

TIMEOUT_SECONDS = 5.0
_NO_ROUTE = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED})


class SessionEnds:
    """Tells the ends of sessions, each in a task of its own."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks = set[asyncio.Task[None]]()

    def tell(self, session: str) -> None:
        """Tell that a session has ended, without waiting."""
        for monitor in self._pool.monitors:
            if self._pool.policy != "none" and not monitor.engine.places:
                continue
            task = asyncio.create_task(_tell(monitor.engine, session))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait until all that is under way has been told, at most `TIMEOUT_SECONDS`."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _tell(engine: Engine, session: str) -> None:
    result = "failed"
    model = engine.models[0].capability.model if engine.models else ""
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(TIMEOUT_SECONDS):
            status = await engine.driver.end_session(engine.upstream, session, model)
        result = "told" if status < HTTPStatus.BAD_REQUEST else "no-route" if status in _NO_ROUTE else "failed"
    metrics.SESSION_ENDS.labels(result).inc()
