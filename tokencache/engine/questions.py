"""Questions: small requests of our own that an engine must answer before anything is concluded from them.

A connection that closes proves nothing about an engine: uvicorn closes one after each 500, and a request that is sent at that
moment meets the closed end. So a question without an answer is sent again. If it is never answered, or the engine says that it
cannot answer now (429, 503), all that was found out beside it is void: `Questions.unanswered` says so, whoever caught the error.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from tokencache.engine.upstream import EngineResponse, Upstream
from tokencache.errors import NOT_NOW, EngineError

log = logging.getLogger(__name__)

PAUSES = (0.05, 0.25, 1.0)
"""Seconds before a question is sent again."""


class Answers(Protocol):
    """Whatever answers small requests: an upstream, or questions to one."""

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """See `Upstream.post`."""


async def until_answered(send: Callable[[], Awaitable[EngineResponse]]) -> EngineResponse:
    """Send a request that does no harm when it is sent twice, until it is answered.

    Raises:
        EngineError: the engine cannot be connected to, or closed every connection without an answer.
    """
    for pause in PAUSES:
        try:
            return await send()
        except EngineError as why:
            if not why.reached:
                raise
            log.debug("asked again in %g s: %s", pause, why)
            await asyncio.sleep(pause)
    return await send()


class Questions:
    """Puts questions to one engine.

    Attributes:
        unanswered: why a question was not answered; `None` while all were. From then on every question raises it.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.unanswered: EngineError | None = None

    async def get(self, path: str) -> EngineResponse:
        """Get and read the whole answer.

        Raises:
            EngineError: a question was not answered.
        """
        return await self._ask(lambda: self._upstream.get(path))

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """Post JSON and read the whole answer.

        Raises:
            EngineError: a question was not answered.
        """
        return await self._ask(lambda: self._upstream.post(path, body, headers))

    async def _ask(self, send: Callable[[], Awaitable[EngineResponse]]) -> EngineResponse:
        if self.unanswered is not None:
            raise self.unanswered
        try:
            answer = await until_answered(send)
        except EngineError as why:
            self.unanswered = why
            raise
        if answer.status in NOT_NOW:
            words = answer.body[:300].decode(errors="replace")
            self.unanswered = EngineError(f"the engine answered {answer.status}: {words}", status=answer.status)
            raise self.unanswered
        return answer
