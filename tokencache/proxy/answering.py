"""Answering: from the head of an engine's answer to the last byte that its harness hears.

An answer is a refusal, a stream or a whole body. What was sampled is recorded before the harness hears the end of it, and also
where it never will: because the engine broke off, because what it said cannot be said in the dialect, or because nobody listens.
"""

import asyncio

import aiohttp
from aiohttp import web

from tokencache.dialects.dialect import EVENTS, refusal
from tokencache.engine.drivers.base import Driver, ParsedCompletion
from tokencache.engine.reply import Reply
from tokencache.errors import EngineError
from tokencache.proxy.delivery import LEFT, Delivery
from tokencache.proxy.ending import Ending
from tokencache.proxy.engine_retry import Hold
from tokencache.proxy.exchange import Exchange
from tokencache.proxy.overflow import ANSWERED, empty_reply, is_overflow
from tokencache.proxy.passthrough import whole_response
from tokencache.proxy.recorder import ABORTED, BROKE, DROPPED, Outcome
from tokencache.proxy.sending import Sending
from tokencache.store.base import StoreError

_OK, _BAD_GATEWAY, _UNAVAILABLE = 200, 502, 503
_ENDED = "the engine's stream ended before the reply did"
_UNREADABLE = "the engine's reply cannot be read"


class Answering:
    """Answers one call with what an engine said to it."""

    def __init__(self, exchange: Exchange, hold: Hold, delivery: Delivery, ending: Ending, sending: Sending) -> None:
        self._exchange, self._hold, self._delivery, self._ending, self._sending = exchange, hold, delivery, ending, sending
        self._speaker = exchange.speaker

    async def answer(self, answer: aiohttp.ClientResponse, driver: Driver, reply: Reply, outcome: Outcome) -> web.StreamResponse | None:
        """Answer the harness; `None` if the engine aborted the reply before anything was shown: the call is to be made again.

        Raises:
            EngineError: there are tokens, and nobody can say what they mean.
            StoreError: the store failed, the policy is strict, and nothing was answered yet.
        """
        try:
            if answer.status != _OK:
                return await self._refused(answer, outcome)
            if answer.content_type == EVENTS:
                return await self._stream(answer, reply, outcome)
            return await self._whole(answer, driver, outcome)
        finally:
            answer.close()

    async def _refused(self, answer: aiohttp.ClientResponse, outcome: Outcome) -> web.StreamResponse:
        """Pass an engine's refusal on as it is; nothing was sampled."""
        body = await self._read(answer, outcome)
        if body is None:
            return web.Response()
        if self._exchange.token_ids and is_overflow(answer.status, body):
            return await self._overflowed(outcome, answer.status, body)
        await self._ending.settle(outcome, "engine-refused", f"{answer.status}: {body[:300].decode(errors='replace')}")
        if self._hold.opened is not None:
            return await self._hold.fail(answer.status, refusal(answer.status, body)[0])
        return whole_response(answer, body if self._exchange.refuse is None else self._exchange.refuse(answer.status, body))

    async def _overflowed(self, outcome: Outcome, status: int, refusal: bytes) -> web.StreamResponse:
        """Answer a call whose prompt is too long with an empty completion; nothing was sampled."""
        await self._ending.settle(outcome, "engine-refused", f"{status}: {refusal[:300].decode(errors='replace')}; {ANSWERED}")
        return await self._delivery.say(empty_reply(outcome.call, outcome.call_id))

    async def _whole(self, answer: aiohttp.ClientResponse, driver: Driver, outcome: Outcome) -> web.StreamResponse | None:
        body = await self._read(answer, outcome)
        if body is None:
            return web.Response()
        body, unsaid, _ = await self._parsed(body, driver, outcome)
        delivery = self._delivery
        body = delivery.take(body, driver)
        if delivery.dropped:
            await self._drop(outcome)
            return None
        if unsaid:  # the tokens were sampled, and nobody can say what they mean
            self._hold.engine.doubt(unsaid)
            await self._ending.record(outcome)
            raise EngineError(unsaid)
        if outcome.reply.unreadable and self._exchange.refuse is not None:  # half a body: said in its own words, not in the engine's
            await self._ending.record(outcome)
            raise EngineError(_UNREADABLE)
        recites = delivery.recites(driver)
        try:
            said = delivery.recited(body) if recites else delivery.whole(body)
        finally:  # what cannot be said was sampled all the same
            async with self._hold.awake():
                await self._ending.record(outcome)
        if recites:
            return await delivery.finish(await self._hold.open(), said)
        if self._hold.opened is not None:
            return await self._hold.fail(_BAD_GATEWAY, "the engine did not stream its reply")
        return whole_response(answer, said)

    async def _read(self, answer: aiohttp.ClientResponse, outcome: Outcome) -> bytes | None:
        """Read a whole answer; `None` if the engine broke it off, and then so does our connection."""
        try:
            async with self._hold.awake():
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as why:
            await self._ending.settle(outcome, BROKE, f"{type(why).__name__}: {why}", hole=True)
            self._delivery.break_off()
            return None

    async def _parsed(self, body: bytes, driver: Driver, outcome: Outcome) -> ParsedCompletion:
        """Make a chat completion of what came; if the harness leaves meanwhile, the tokens are there to be recorded."""
        if not self._sending.parses:
            return ParsedCompletion(body)
        work = asyncio.ensure_future(self._sending.parsed(body))
        try:
            async with self._hold.awake():
                return await asyncio.shield(work)
        except asyncio.CancelledError:
            await self._ending.write(self._gone_while_parsed(work, driver, outcome))
            raise

    async def _gone_while_parsed(self, work: "asyncio.Future[ParsedCompletion]", driver: Driver, outcome: Outcome) -> None:
        self._delivery.take((await work)[0], driver)
        outcome.broke, outcome.detail = ABORTED, LEFT
        await self._ending.recorded(outcome)

    async def _stream(self, answer: aiohttp.ClientResponse, reply: Reply, outcome: Outcome) -> web.StreamResponse | None:
        delivery = self._delivery
        held, broke = await delivery.follow(answer)
        if delivery.overflowed:
            return await self._overflowed(outcome, reply.refusal, reply.error)
        if delivery.dropped and not delivery.left:
            await self._drop(outcome)
            return None
        if broke is None and delivery.left:  # of what waits for the store it will hear nothing: not for it is this reply whole
            broke = ABORTED, LEFT
        cut = broke is not None
        if broke is None and not reply.finished and not reply.error:
            broke = BROKE, _ENDED
            if self._exchange.refuse is not None and not delivery.ended:  # in its own words, or half a reply would pass for a whole one
                held += self._speaker.failed(_BAD_GATEWAY, _ENDED)
        if broke is not None:
            outcome.broke, outcome.detail = broke
        try:
            async with self._hold.awake():
                await self._ending.record(outcome)
        except StoreError as why:  # the head is out: said within the stream, as an engine says it
            held, cut = self._speaker.failed(_UNAVAILABLE, f"the store failed: {why}"), False
        return await delivery.finish(await self._hold.open(), held, cut=cut)

    async def _drop(self, outcome: Outcome) -> None:
        """Record what the engine aborted before the harness was shown any of it: the call is made again."""
        outcome.broke, outcome.detail = DROPPED, "the engine aborted the reply before anything was shown; asked again"
        await self._ending.record(outcome)
