"""One model call within a session, from its body to its last byte.

    read → begin (store) → plan → send → stream through as it comes → record → the last byte

The turn is stored before the reply's last byte leaves: of a stream everything is passed on at once up to the event
with which the last choice is finished; that one waits until the turn stands in the store. So a harness that has seen
the end of a reply can send the next call to any replica.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from tokencache import metrics
from tokencache.core.match import DISAGREED
from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.dialect import EVENTS
from tokencache.dialects.sse import DONE, EventSplitter, data_of
from tokencache.engines.engine import Engine, Model
from tokencache.engines.reply import Reply
from tokencache.engines.weights import HEADER as WEIGHT_VERSION
from tokencache.errors import EngineError
from tokencache.proxy.exchange import Exchange
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan, keys_wanted
from tokencache.proxy.record import ABORTED, BROKE, Outcome, Recorded
from tokencache.proxy.relay import open_response, whole_response
from tokencache.store.contract import Begun, StoreError

log = logging.getLogger(__name__)

_OK, _BAD_GATEWAY, _UNAVAILABLE = 200, 502, 503
_ENDED = "the engine's stream ended before the reply did"
_REFUSED = frozenset({400, 422})
_LEFT = "the harness closed the connection"
PlanFor = Callable[[str, ChatCall, Sequence[bytes], Begun | None], Awaitable[tuple[Plan, Model | None]]]


class Call:
    """A model call of one session, under way.

    `run` raises `EngineError` where the engine cannot be reached and nothing was answered yet, `SessionSealedError`, and
    under a strict policy `StoreError`.
    """

    def __init__(
        self, request: web.Request, session: str, call: ChatCall, exchange: Exchange, *, plan: PlanFor, engine: Engine, ledger: Ledger
    ) -> None:
        self._plan, self._engine, self._ledger = plan, engine, ledger
        self._request = request
        self._session = session
        self._call = call
        self._exchange = exchange
        self._speaker = exchange.speaker
        self._as_is = exchange.refuse is None
        self._silent = True
        self._id = secrets.token_hex(8)
        self._begun: Begun | None = None
        self._reply = Reply(call.n)
        self._outcome: Outcome
        self._ending = False  # its end is being written to the store
        self._said_all = False  # the engine said that it has said everything
        self._over = False  # the reply is: what follows waits for the store
        self._started = time.time()

    async def run(self) -> web.StreamResponse:
        """Serve the call to its last byte."""
        keys = keys_wanted(self._call)
        beginning = asyncio.ensure_future(self._ledger.begin(self._session, self._id, keys))
        try:
            self._begun = await asyncio.shield(beginning)
            plan, model = await self._plan(self._session, self._call, keys, self._begun)
        except asyncio.CancelledError:
            self._ledger.detach(asyncio.create_task(self._unbegin(beginning)))
            raise
        self._outcome = Outcome(
            session=self._session,
            life=self._begun.life if self._begun is not None else "",
            call_id=self._id,
            call=self._call,
            plan=plan,
            reply=self._reply,
            model=model,
            started=self._started,
        )
        metrics.OVERHEAD.labels("before").observe(time.time() - self._started)
        try:
            return await self._ask()
        except asyncio.CancelledError:
            # The harness left. What it was given is recorded all the same, by a task that outlives this one.
            if not self._ending:
                self._outcome.broke, self._outcome.detail = ABORTED, _LEFT
                self._end(self._record())
            raise
        except EngineError as why:
            self._engine.forget()
            await self._settle(BROKE if why.reached else "upstream-down", str(why), hole=why.reached)
            raise

    async def _unbegin(self, beginning: "asyncio.Future[Begun | None]") -> None:
        """Close a call whose harness left before anything was sent: nothing was sampled."""
        begun = await beginning
        if begun is not None:
            await self._ledger.settle(begun, self._session, self._id, [])

    async def _ask(self) -> web.StreamResponse:
        answer = await self._send()
        self._reply.sent = self._outcome.plan.fragment or b""
        self._reply.version = answer.headers.get(WEIGHT_VERSION, "")
        try:
            if answer.status != _OK:
                return await self._refused(answer)
            if answer.content_type == "text/event-stream":
                return await self._stream(answer)
            return await self._whole(answer)
        finally:
            answer.close()

    async def _send(self) -> aiohttp.ClientResponse:
        plan = self._outcome.plan
        answer = await self._post(plan.fragment)
        if plan.fragment is None or answer.status not in _REFUSED:
            return answer
        # An engine that refuses has sampled nothing. Perhaps it refuses the ids, which is our doing: ask as the harness did.
        refusal = (await answer.content.read(300)).decode(errors="replace")
        answer.close()
        log.warning("session %s call %s: the engine refused the spliced prompt: %s", self._session, self._id, refusal)
        self._outcome.plan = Plan(match="plain", reason="engine-refused-ids", near=plan.near)
        return await self._post(None)

    async def _post(self, prompt: bytes | None) -> aiohttp.ClientResponse:
        exchange = self._exchange
        return await self._engine.upstream.send("POST", exchange.path, headers=exchange.headers, body=exchange.write(prompt))

    async def _refused(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an engine's refusal on as it is; nothing was sampled."""
        body = await self._read(answer)
        if body is None:
            return web.Response()
        await self._settle("engine-refused", f"{answer.status}: {body[:300].decode(errors='replace')}")
        return whole_response(answer, body if self._exchange.refuse is None else self._exchange.refuse(answer.status, body))

    async def _whole(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        body = await self._read(answer)
        if body is None:
            return web.Response()
        body = self._reply.without_experts(body)
        brief = self._reply.take(body)
        try:
            said = self._speaker.body(body if self._call.shows_ids else brief)
        finally:  # what cannot be said was sampled all the same
            await self._end(self._record())
        return whole_response(answer, said)

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes | None:
        """Read a whole answer; `None` if the engine broke it off, and then so does our connection."""
        try:
            return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as why:
            await self._settle(BROKE, f"{type(why).__name__}: {why}", hole=True)
            self._drop_connection()
            return None

    async def _stream(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = open_response(answer, drop=frozenset({"content-length"}))
        if self._exchange.media_type != EVENTS:
            response.headers["Content-Type"] = self._exchange.media_type
        await response.prepare(self._request)
        waking = asyncio.create_task(self._break_silence(response))
        try:
            held, cut = await self._pass_on(answer, response)
        finally:
            waking.cancel()
        if not cut and self._harness_left():  # of what waits for the store it will hear nothing: not for it is this reply whole
            cut, self._outcome.broke, self._outcome.detail = True, ABORTED, _LEFT
        if not cut and not self._reply.finished and not self._reply.error:
            self._outcome.broke, self._outcome.detail = BROKE, _ENDED
            if not self._as_is and not self._said_all:  # in its own words, or half a reply would pass for a whole one
                held += self._speaker.failed(_BAD_GATEWAY, _ENDED)
        try:
            await self._end(self._record())
        except StoreError as why:  # the head is out: said within the stream, as an engine says it
            held, cut = self._speaker.failed(_UNAVAILABLE, f"the store failed: {why}"), False
        with contextlib.suppress(ConnectionError):  # it may leave even now; its turn is recorded
            await response.write(held)
            if not cut:
                await response.write_eof()
        if cut:
            self._drop_connection()
        return response

    async def _pass_on(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> tuple[bytes, bool]:
        """Pass a stream on as it comes; what is to wait for the store, and whether the stream was cut off."""
        splitter, held = EventSplitter(), bytearray()
        try:
            async for chunk in answer.content.iter_any():
                shown = bytearray()
                for event in splitter.feed(chunk):
                    kept = self._event(event)
                    (held if self._over else shown).extend(kept)
                if shown:
                    self._silent = False
                    await response.write(bytes(shown))
        except (aiohttp.ClientError, ConnectionResetError, TimeoutError) as why:
            # On which side? aiohttp's errors of a write and of a read look alike.
            broke = (ABORTED, _LEFT) if self._harness_left() else (BROKE, f"{type(why).__name__}: {why}")
        except Exception as why:  # a codec of ours cannot say it: what was sampled is recorded all the same
            log.exception("session %s call %s: the reply cannot be said", self._session, self._id)
            broke = ("internal-error", f"{type(why).__name__}: {why}")
        else:
            return bytes(held) + (splitter.rest if self._as_is else b""), False
        self._outcome.broke, self._outcome.detail = broke
        return bytes(held), True

    def _event(self, event: bytes) -> bytes:
        """Take note of one event; what the harness is to see of it."""
        data = data_of(event)
        if data is None:
            return event if self._as_is else b""  # a comment of the engine's is for who speaks to it
        if data == DONE:
            self._over = self._said_all = True
            return self._speaker.end()
        data = self._reply.without_experts(data)
        brief = self._reply.take(data)
        self._over = self._over or self._reply.finished or bool(self._reply.error)
        prompt_tokens = 0 if self._as_is else self._reply.prompt_tokens  # counting them costs, and only a codec says how many
        return self._speaker.chunk(event, data if self._call.shows_ids else brief, prompt_tokens)

    async def _break_silence(self, response: web.StreamResponse) -> None:
        """Say something that says nothing while the engine queues or prefills: harnesses and proxies hang up on silence."""
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._exchange.keep_alive)
                if self._silent:
                    await response.write(self._speaker.keep_alive())
                self._silent = True

    def _harness_left(self) -> bool:
        return self._request.transport is None or self._request.transport.is_closing()

    def _drop_connection(self) -> None:
        """Break off as the engine did: a direct client would have seen its connection end in mid-answer."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def _end(self, work: Coroutine[Any, Any, None]) -> "asyncio.Future[None]":
        """End the call in the store, once, by a task that ends even if the harness leaves meanwhile."""
        self._ending = True
        task = asyncio.create_task(work)
        self._ledger.detach(task)
        return asyncio.shield(task)

    async def _record(self) -> None:
        ended = time.time()
        await self._ledger.keep_experts(self._outcome)
        try:
            recorded = self._outcome.record(self._ledger.prefixes)
        except Exception as why:  # ours again: the harness gets its reply, and the trainer is told
            log.exception("session %s call %s: not recorded", self._session, self._id)
            recorded = Recorded([], [], [self._outcome.tell("internal-error", f"{type(why).__name__}: {why}", hole=True)])
        if any(incident.kind == DISAGREED for incident in recorded.incidents):
            self._engine.forget()  # another engine may stand there than was probed
        await self._ledger.end(self._begun, self._outcome, recorded, self._speaker.documents() if self._outcome.whole else {})
        metrics.OVERHEAD.labels("after").observe(time.time() - ended)
        metrics.CALLS.labels(self._call.dialect, self._outcome.broke or ("error" if self._reply.error else "answered")).inc()
        for entry in recorded.entries:
            turn = entry.turn
            log.debug(
                "session %s turn %s: %s%s, %d + %d tokens, %s",
                self._session,
                turn.id,
                turn.match,
                f" ({turn.reason})" if turn.reason else "",
                turn.prompt_tokens,
                turn.completion_tokens,
                turn.finish_reason,
            )
        for incident in recorded.incidents:
            log.warning("session %s call %s: %s: %s", self._session, self._id, incident.kind, incident.detail)

    async def _settle(self, kind: str, detail: str, *, hole: bool = False) -> None:
        metrics.CALLS.labels(self._call.dialect, kind).inc()
        log.warning("session %s call %s: %s: %s", self._session, self._id, kind, detail)
        incidents = [self._outcome.tell(kind, detail, hole=hole)]
        await self._end(self._ledger.settle(self._begun, self._session, self._id, incidents))
