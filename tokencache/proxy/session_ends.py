"""Tells the engine of a session that it has ended, so that the engine can release what it keeps for it."""

import asyncio
import logging

from tokencache import metrics
from tokencache.engine.model import Engine
from tokencache.engine.pool import Pool
from tokencache.errors import EngineError

log = logging.getLogger(__name__)

SECONDS = 10.0
"""How long it may take to tell an engine. A session never waits for it, and it is not repeated."""


class SessionEnds:
    """Tells engines whose driver names sessions to them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, session: str) -> None:
        """Tell a session's engine, in the background. Call it once for each session, when it is no longer open."""
        try:
            engine = self._pool.order(session)[0].engine
        except EngineError:
            return
        if engine.driver.names_sessions and engine.models:
            task = asyncio.create_task(self._tell(engine, session, engine.models[0].capability.model))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, engine: Engine, session: str, model: str) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                await engine.driver.end_session(engine.upstream, session, model)
        except (EngineError, TimeoutError) as why:
            log.info("engine %s: not told that session %s has ended: %s", engine.upstream.url, session, why)
            metrics.SESSION_ENDS.labels("failed").inc()
        else:
            metrics.SESSION_ENDS.labels("told").inc()
