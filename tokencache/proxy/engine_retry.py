"""Hold: a call that no engine takes waits, instead of ending its agent's episode.

Engines of a training run go away and come back: they are restarted, or paused while their weights are replaced. All that a
session is made of is in our store, so a call can wait for it, or go elsewhere. Two cases, and nothing else:

- *not taken*: no connection, or a refusal (503, 429) before any answer began. Nothing was sampled. The call goes to the next engine of its
  session's order; when all were asked it waits, with growing pauses, and begins again with the first. It is planned anew for
  each engine.
- *aborted*: the engine ended the reply itself (`finish_reason: "abort"`), and the harness has been shown nothing of it. What was sampled is
  recorded as a turn that nobody continues, and the call is made again: a fresh sample on the same prompt. A harness that was
  shown the beginning keeps it: a stream cannot be taken back, and no parser is known to go on in the middle of a message.

A harness that streams hears signs of life meanwhile. Longer than the limit nothing waits.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp import web

from tokencache import metrics
from tokencache.backoff import delays
from tokencache.engine.model import Engine
from tokencache.engine.pool import Pool
from tokencache.errors import NOT_NOW, EngineError
from tokencache.proxy.exchange import Exchange
from tokencache.proxy.keepalive import SignsOfLife

log = logging.getLogger(__name__)

RESAMPLES = 4
"""How often a call is made again whose reply was aborted: weights that change faster than a reply is sampled must not hold it for ever."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds; each pause is twice the one before, less up to half of it by chance."""
_AS_IT_IS = contextlib.nullcontext()


class Hold:
    """The patience there is for one call of a harness.

    Attributes:
        engine: the engine that the call is with.
        opened: the answer to the harness, where it began before any engine's did.
        waited: seconds for which the call waited since it was taken the last time; `why`, in words.
    """

    def __init__(self, pool: Pool, session: str, request: web.Request, exchange: Exchange, *, stream: bool, seconds: float) -> None:
        self._pool, self._session = pool, session
        self._request, self._exchange, self._stream = request, exchange, stream
        self._seconds = seconds
        self._again = 0
        self._signs: SignsOfLife | None = None
        self.engine: Engine
        self.opened: web.StreamResponse | None = None
        self.waited = 0.0
        self.why = ""

    async def taken(self, ask: Callable[[Engine], Awaitable[aiohttp.ClientResponse]]) -> aiohttp.ClientResponse:
        """Ask engines until one takes the call.

        Returns:
            An answer; a refusal that may pass only when time is up.

        Raises:
            EngineError: it failed where it may have been heard, or time is up.
        """
        self.waited = 0.0
        try:
            return await self._first(ask)
        except _NotTakenError as why:
            first = why
        began = time.monotonic()
        async with self.awake():
            return await self._until(ask, first, began)

    async def _first(self, ask: Callable[[Engine], Awaitable[aiohttp.ClientResponse]]) -> aiohttp.ClientResponse:
        """Ask each engine once, in the session's order."""
        asked: _NotTakenError | None = None
        for engine in self._pool.order(self._session):
            if asked is not None:
                asked.close()
            self.engine = engine
            try:
                answer = await ask(engine)
            except EngineError as why:
                if not why.passing:
                    raise
                if not why.reached:
                    self._pool.lost(engine, why)
                asked = _NotTakenError(str(why), error=why)
            else:
                metrics.counter(metrics.ENGINE_CALLS, engine.upstream.url).inc()
                if answer.status not in NOT_NOW:
                    return answer
                asked = _NotTakenError(f"the engine at {engine.upstream.url} answered {answer.status}", answer=answer)
            log.info("session %s: not taken: %s", self._session, asked)
        assert asked is not None  # noqa: S101 - an order is never empty
        raise asked

    async def _until(
        self, ask: Callable[[Engine], Awaitable[aiohttp.ClientResponse]], refused: "_NotTakenError", began: float
    ) -> aiohttp.ClientResponse:
        pauses = delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
        while (left := self._seconds - (time.monotonic() - began)) > 0:
            self.why = str(refused)
            metrics.HELD.labels("busy" if refused.answer is not None else "down").inc()
            refused.close()
            await asyncio.sleep(min(left, max(refused.retry_after, next(pauses))))
            try:
                answer = await self._first(ask)
            except _NotTakenError as why:
                refused = why
            else:
                self.waited = time.monotonic() - began
                return answer
        if refused.answer is not None:
            return refused.answer
        assert refused.error is not None  # noqa: S101 - the one or the other
        raise refused.error

    async def before_next(self) -> None:
        """Wait a little before an aborted call is made again."""
        self._again += 1
        metrics.HELD.labels("aborted").inc()
        async with self.awake():
            await asyncio.sleep(next(delays(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)))

    @property
    def may_repeat(self) -> bool:
        """Whether a call may be made again whose reply was aborted."""
        return self._seconds > 0 and self._again < RESAMPLES

    async def fail(self, status: int, message: str) -> web.StreamResponse:
        """End an answer that had been opened, in its dialect's words."""
        assert self.opened is not None  # noqa: S101 - the caller looked
        with contextlib.suppress(ConnectionError):
            await self.opened.write(self._exchange.speaker.failed(status, message))
            await self.opened.write_eof()
        return self.opened

    def awake(self) -> AbstractAsyncContextManager[None]:
        """Give a streaming harness signs of life while the context is open."""
        if not self._stream or (self._signs is not None and self._signs.open):
            return _AS_IT_IS
        self._signs = SignsOfLife(self._exchange.keep_alive, self._sign)
        return self._signs

    async def open(self) -> web.StreamResponse:
        """Begin the answer to a harness that streams, unless it has begun: what goes wrong from then on is said within it."""
        if self.opened is None:
            opened = web.StreamResponse(headers={"Content-Type": self._exchange.media_type, "Cache-Control": "no-cache"})
            with contextlib.suppress(ConnectionError):  # the harness may have left: that is found out when something is written
                await opened.prepare(self._request)
            self.opened = opened
        return self.opened

    async def _sign(self) -> None:
        await (await self.open()).write(self._exchange.speaker.keep_alive())


class _NotTakenError(Exception):
    """No engine took the call: what the last one answered, or why there is no answer."""

    def __init__(self, message: str, *, answer: aiohttp.ClientResponse | None = None, error: EngineError | None = None) -> None:
        super().__init__(message)
        self.answer = answer
        self.error = error

    @property
    def retry_after(self) -> float:
        """Seconds after which to come again, if the engine said so."""
        said = self.answer.headers.get("Retry-After", "") if self.answer is not None else ""
        return float(said) if said.isdecimal() else 0.0

    def close(self) -> None:
        """Let the answer's connection go."""
        if self.answer is not None:
            self.answer.close()
