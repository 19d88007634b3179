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
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.core.match import DISAGREED
from tokencache.dialects.chat import ChatCall
from tokencache.dialects.chat_reply import ChatPresenter
from tokencache.engines.engine import Engine, Model
from tokencache.engines.reply import Reply
from tokencache.engines.vllm import chat_body
from tokencache.errors import EngineError
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan, keys_wanted
from tokencache.proxy.record import ABORTED, BROKE, Outcome, Recorded
from tokencache.proxy.relay import open_response, whole_response
from tokencache.proxy.sse import DONE, EventSplitter, data_of, event_of
from tokencache.store.contract import Begun, StoreError

log = logging.getLogger(__name__)

_OK = 200
_REFUSED = frozenset({400, 422})
_LEFT = "the harness closed the connection"
PlanFor = Callable[[str, ChatCall, Sequence[bytes], Begun | None], Awaitable[tuple[Plan, Model | None]]]


class Call:
    """A chat completion of one session, under way.

    `run` raises `EngineError` where the engine cannot be reached and nothing was answered yet, `SessionSealedError`, and
    under a strict policy `StoreError`.
    """

    def __init__(
        self,
        request: web.Request,
        session: str,
        call: ChatCall,
        *,
        plan: PlanFor,
        engine: Engine,
        ledger: Ledger,
        path: str,
        headers: CIMultiDict[str],
    ) -> None:
        self._plan, self._engine, self._ledger = plan, engine, ledger
        self._request = request
        self._session = session
        self._call = call
        self._path = path
        self._headers = headers
        self._id = secrets.token_hex(8)
        self._begun: Begun | None = None
        self._presenter = ChatPresenter(call)
        self._reply = Reply(call.n)
        self._outcome: Outcome
        self._ending = False  # its end is being written to the store
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
            return await self._exchange()
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

    async def _exchange(self) -> web.StreamResponse:
        answer = await self._send()
        self._reply.sent = self._outcome.plan.fragment or b""
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
        answer = await self._engine.upstream.send("POST", self._path, headers=self._headers, body=chat_body(self._call, plan.fragment))
        if plan.fragment is None or answer.status not in _REFUSED:
            return answer
        # An engine that refuses has sampled nothing. Perhaps it refuses the ids, which is our doing: ask as the harness did.
        refusal = (await answer.content.read(300)).decode(errors="replace")
        answer.close()
        log.warning("session %s call %s: the engine refused the spliced prompt: %s", self._session, self._id, refusal)
        self._outcome.plan = Plan(match="plain", reason="engine-refused-ids", near=plan.near)
        return await self._engine.upstream.send("POST", self._path, headers=self._headers, body=chat_body(self._call, None))

    async def _refused(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an engine's refusal on as it is; nothing was sampled."""
        body = await self._read(answer)
        if body is None:
            return web.Response()
        await self._settle("engine-refused", f"{answer.status}: {body[:300].decode(errors='replace')}")
        return whole_response(answer, body)

    async def _whole(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        body = await self._read(answer)
        if body is None:
            return web.Response()
        brief = self._reply.take(body)
        await self._end(self._record())
        return whole_response(answer, self._presenter.body(body if self._call.shows_ids else brief))

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
        await response.prepare(self._request)
        splitter, held, cut = EventSplitter(), bytearray(), False
        try:
            async for chunk in answer.content.iter_any():
                shown = bytearray()
                for event in splitter.feed(chunk):
                    kept = self._event(event)
                    (held if self._over else shown).extend(kept)
                if shown:
                    await response.write(bytes(shown))
        except (aiohttp.ClientError, ConnectionResetError, TimeoutError) as why:
            cut = True  # on which side? aiohttp's errors of a write and of a read look alike
            self._outcome.broke, self._outcome.detail = (
                (ABORTED, _LEFT) if self._harness_left() else (BROKE, f"{type(why).__name__}: {why}")
            )
        if not cut and not self._reply.finished and not self._reply.error:
            self._outcome.broke, self._outcome.detail = BROKE, "the stream ended before the reply did"
        try:
            await self._end(self._record())
        except StoreError as why:  # the head is out: said within the stream, as an engine says it
            await response.write(_failed(why) + event_of(DONE))
            await response.write_eof()
            return response
        if cut:
            with contextlib.suppress(ConnectionError):
                await response.write(bytes(held))
            self._drop_connection()
            return response
        await response.write(bytes(held) + splitter.rest)
        await response.write_eof()
        return response

    def _event(self, event: bytes) -> bytes:
        """Take note of one event; what the harness is to see of it."""
        data = data_of(event)
        self._over = self._over or data == DONE
        if data is None or data == DONE:
            return event
        brief = self._reply.take(data)
        self._over = self._over or self._reply.finished or bool(self._reply.error)
        shown = self._presenter.chunk(data if self._call.shows_ids else brief)
        if shown is None:
            return b""
        return event if shown is data else event_of(shown)

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
        try:
            recorded = self._outcome.record(self._ledger.prefixes)
        except Exception as why:  # ours again: the harness gets its reply, and the trainer is told
            log.exception("session %s call %s: not recorded", self._session, self._id)
            recorded = Recorded([], [], [self._outcome.tell("internal-error", f"{type(why).__name__}: {why}", hole=True)])
        if any(incident.kind == DISAGREED for incident in recorded.incidents):
            self._engine.forget()  # another engine may stand there than was probed
        await self._ledger.end(self._begun, self._outcome, recorded)
        metrics.OVERHEAD.labels("after").observe(time.time() - ended)
        metrics.CALLS.labels("chat", self._outcome.broke or ("error" if self._reply.error else "answered")).inc()
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
        metrics.CALLS.labels("chat", kind).inc()
        log.warning("session %s call %s: %s: %s", self._session, self._id, kind, detail)
        incidents = [self._outcome.tell(kind, detail, hole=hole)]
        await self._end(self._ledger.settle(self._begun, self._session, self._id, incidents))


def _failed(why: StoreError) -> bytes:
    """Write the event that stands for the end of a reply whose turn could not be stored."""
    error = {"message": f"the store failed: {why}", "type": "store_error", "param": None, "code": 503}
    return event_of(msgspec.json.encode({"error": error}))
