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
from tokencache.dialects.dialect import EVENTS, refusal
from tokencache.engines.completions import PATH, Parsed, TokenPrompts
from tokencache.engines.driver import Driver, Exact
from tokencache.engines.engine import Engine, Model
from tokencache.engines.reply import Reply
from tokencache.engines.weights import HEADER as WEIGHT_VERSION
from tokencache.errors import NOT_NOW, EngineError
from tokencache.proxy import echoes
from tokencache.proxy.delivery import LEFT, Delivery
from tokencache.proxy.exchange import Exchange, request_id
from tokencache.proxy.hold import Hold
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan, keys_wanted
from tokencache.proxy.record import ABORTED, BROKE, DROPPED, NO_IDS, Outcome, Recorded
from tokencache.proxy.relay import whole_response
from tokencache.store.contract import Begun, StoreError

log = logging.getLogger(__name__)

_OK, _BAD_GATEWAY, _UNAVAILABLE = 200, 502, 503
_ENDED = "the engine's stream ended before the reply did"
_REFUSED = frozenset({400, 422})
NO_WAY = "not-for-completions"
"""Text completions cannot be asked for what this call asks, or it cannot be found out: chat can."""
PlanFor = Callable[[Engine, str, ChatCall, Sequence[bytes], Begun | None], Awaitable[tuple[Plan, Model | None]]]


class Call:
    """A model call of one session, under way.

    `run` raises `EngineError` where no engine takes it in time, or breaks off, and nothing was answered yet,
    `SessionSealedError`, and under a strict policy `StoreError`.
    """

    def __init__(
        self, request: web.Request, session: str, call: ChatCall, exchange: Exchange, *, plan: PlanFor, hold: Hold, ledger: Ledger
    ) -> None:
        self._plan, self._hold, self._ledger = plan, hold, ledger
        self._session = session
        self._call = call
        self._exchange = exchange
        self._speaker = exchange.speaker
        self._sent = False  # an engine may have begun to sample
        self._posts = 0
        self._keys: list[bytes] = []
        self._id = secrets.token_hex(8)
        self._begun: Begun | None = None
        self._reply = Reply(call.n)
        self._delivery = Delivery(request, call, exchange, self._reply, hold)
        self._outcome: Outcome
        self._driver: Driver
        self._detour: TokenPrompts | None = None  # the way on which the reply comes back
        self._ending = False  # its end is being written to the store
        self._started = self._asking = time.time()

    async def run(self) -> web.StreamResponse | None:
        """Serve the call to its last byte; `None` if the engine aborted it before anything was shown: to be made again."""
        self._keys = keys_wanted(self._call)
        beginning = asyncio.ensure_future(self._ledger.begin(self._session, self._id, self._keys))
        try:
            self._begun = await asyncio.shield(beginning)
            self._outcome = self._nothing_yet()
            answer = await self._hold.taken(self._ask)
        except asyncio.CancelledError:
            # The harness left. What it was given is recorded all the same, by a task that outlives this one.
            if self._sent:
                self._gone()
            else:
                self._ledger.detach(asyncio.create_task(self._unbegin(beginning)))
            raise
        except EngineError as why:
            await self._settle(BROKE if why.reached else "upstream-down", str(why), hole=why.reached)
            raise
        try:
            return await self._answered(answer)
        except asyncio.CancelledError:
            if not self._ending:
                self._gone()
            raise

    def _nothing_yet(self) -> Outcome:
        return Outcome(
            session=self._session,
            life=self._begun.life if self._begun is not None else "",
            call_id=self._id,
            call=self._call,
            plan=Plan(match="plain"),
            reply=self._reply,
            model=None,
            started=self._started,
        )

    def _gone(self) -> None:
        self._outcome.broke, self._outcome.detail = ABORTED, LEFT
        self._end(self._record())

    async def _unbegin(self, beginning: "asyncio.Future[Begun | None]") -> None:
        """Close a call whose harness left before anything was sent: nothing was sampled."""
        begun = await beginning
        if begun is not None:
            await self._ledger.settle(begun, self._session, self._id, [])

    async def _ask(self, engine: Engine) -> aiohttp.ClientResponse:
        """Plan the call for an engine, and send it there.

        Raises:
            EngineError: the engine cannot be reached, or not now.
        """
        self._sent = False
        began, self._asking = self._asking or time.time(), 0.0  # what it waited for another engine is not what planning costs
        self._outcome.plan, self._outcome.model = await self._plan(engine, self._session, self._call, self._keys, self._begun)
        metrics.OVERHEAD.labels("before").observe(time.time() - began)
        self._sent, self._driver = True, engine.driver
        try:
            async with self._hold.awake() if self._delivery.recites(self._driver) else contextlib.nullcontext():
                answer = await self._send(engine)
        except EngineError as why:
            self._sent = why.reached
            engine.forget(str(why))
            raise
        self._sent = answer.status not in NOT_NOW
        return answer

    async def _answered(self, answer: aiohttp.ClientResponse) -> web.StreamResponse | None:
        if self._hold.waited:
            self._outcome.noted.append(self._outcome.tell("held", f"{self._hold.waited:.1f} s: {self._hold.why}"))
        if self._call.echoes and (other := await echoes.differing(self._session, self._call, self._outcome.plan, self._ledger)):
            self._outcome.noted.append(self._outcome.tell(echoes.DIFFERS, other))
        self._reply.sent = self._outcome.plan.sent
        self._reply.version = answer.headers.get(WEIGHT_VERSION, "")
        try:
            if answer.status != _OK:
                return await self._refused(answer)
            if answer.content_type == EVENTS:
                return await self._stream(answer)
            return await self._whole(answer)
        finally:
            answer.close()

    async def _send(self, engine: Engine) -> aiohttp.ClientResponse:
        plan = self._outcome.plan
        detour, written = self._driver.detour, None
        if detour is not None and plan.exact is not None:
            longest = self._outcome.model.capability.max_model_len if self._outcome.model is not None else 0
            written = await detour.body(engine.upstream, self._call, plan.exact, longest, self._exchange.headers)
            if written is None:
                plan = self._outcome.plan = Plan(match="plain", reason=NO_WAY, near=plan.near)
        self._detour = detour if written is not None else None
        answer = await self._post(engine, plan.exact, written)
        if plan.exact is None or answer.status not in _REFUSED:
            return answer
        # An engine that refuses has sampled nothing. Perhaps it refuses the ids, which is our doing: ask as the harness did.
        why = (await answer.content.read(300)).decode(errors="replace")
        answer.close()
        log.warning("session %s call %s: the engine refused the spliced prompt: %s", self._session, self._id, why)
        self._outcome.plan = Plan(match="plain", reason="engine-refused-ids", near=plan.near)
        self._detour = None
        answer = await self._post(engine, None)
        if answer.status == _OK:  # so it was the ids: another vocabulary may stand there than was probed
            engine.doubt("it refused the ids that it was sent")
        return answer

    async def _post(self, engine: Engine, exact: Exact | None, detour: bytes | None = None) -> aiohttp.ClientResponse:
        """Send the call, or what was written for the detour of its driver."""
        exchange = self._exchange
        self._posts += 1
        headers = request_id(exchange.headers, self._id, self._posts)
        if detour is not None:
            return await engine.upstream.send("POST", PATH, headers=headers, body=detour)
        return await engine.upstream.send("POST", exchange.path, headers=headers, body=exchange.write(self._driver, exact))

    async def _parsed(self, body: bytes) -> Parsed:
        """Make a chat completion of what came by a detour; and say why it has no words, if so.

        If the harness leaves meanwhile, the tokens are there to be recorded.
        """
        if self._detour is None:
            return Parsed(body)
        upstream, headers = self._hold.engine.upstream, self._exchange.headers
        work = asyncio.ensure_future(self._detour.parsed(upstream, self._call.safe_fields(), body, headers))
        try:
            async with self._hold.awake():
                return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._ending = True
            self._ledger.detach(asyncio.create_task(self._gone_while_parsed(work)))
            raise

    async def _gone_while_parsed(self, work: "asyncio.Future[Parsed]") -> None:
        self._delivery.take((await work)[0], self._driver)
        self._outcome.broke, self._outcome.detail = ABORTED, LEFT
        await self._record()

    async def _refused(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an engine's refusal on as it is; nothing was sampled."""
        body = await self._read(answer)
        if body is None:
            return web.Response()
        await self._settle("engine-refused", f"{answer.status}: {body[:300].decode(errors='replace')}")
        if self._hold.opened is not None:
            return await self._hold.fail(answer.status, refusal(answer.status, body)[0])
        return whole_response(answer, body if self._exchange.refuse is None else self._exchange.refuse(answer.status, body))

    async def _whole(self, answer: aiohttp.ClientResponse) -> web.StreamResponse | None:
        body = await self._read(answer)
        if body is None:
            return web.Response()
        body, unsaid, _ = await self._parsed(body)
        delivery = self._delivery
        body = delivery.take(body, self._driver)
        if delivery.dropped:
            await self._drop()
            return None
        if unsaid:  # the tokens were sampled, and nobody can say what they mean
            self._hold.engine.doubt(unsaid)
            await self._end(self._record())
            raise EngineError(unsaid)
        recites = delivery.recites(self._driver)
        try:
            said = delivery.recited(body) if recites else delivery.whole(body)
        finally:  # what cannot be said was sampled all the same
            await self._end(self._record())
        if recites:
            return await delivery.finish(await self._hold.open(), said)
        if self._hold.opened is not None:
            return await self._hold.fail(_BAD_GATEWAY, "the engine did not stream its reply")
        return whole_response(answer, said)

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes | None:
        """Read a whole answer; `None` if the engine broke it off, and then so does our connection."""
        try:
            return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as why:
            await self._settle(BROKE, f"{type(why).__name__}: {why}", hole=True)
            self._delivery.break_off()
            return None

    async def _stream(self, answer: aiohttp.ClientResponse) -> web.StreamResponse | None:
        delivery = self._delivery
        held, broke = await delivery.follow(answer)
        if delivery.dropped and not delivery.left:
            await self._drop()
            return None
        if broke is None and delivery.left:  # of what waits for the store it will hear nothing: not for it is this reply whole
            broke = ABORTED, LEFT
        cut = broke is not None
        if broke is None and not self._reply.finished and not self._reply.error:
            broke = BROKE, _ENDED
            if self._exchange.refuse is not None and not delivery.ended:  # in its own words, or half a reply would pass for a whole one
                held += self._speaker.failed(_BAD_GATEWAY, _ENDED)
        if broke is not None:
            self._outcome.broke, self._outcome.detail = broke
        try:
            await self._end(self._record())
        except StoreError as why:  # the head is out: said within the stream, as an engine says it
            held, cut = self._speaker.failed(_UNAVAILABLE, f"the store failed: {why}"), False
        return await delivery.finish(await self._hold.open(), held, cut=cut)

    async def _drop(self) -> None:
        """Record what the engine aborted before the harness was shown any of it: the call is made again."""
        self._outcome.broke, self._outcome.detail = DROPPED, "the engine aborted the reply before anything was shown; asked again"
        await self._end(self._record())

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
        self._doubt({incident.kind for incident in recorded.incidents})
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

    def _doubt(self, kinds: set[str]) -> None:
        """Probe the engine anew where it does other than was found: another one, or a router, may stand there now."""
        model = self._outcome.model
        if DISAGREED in kinds:
            self._hold.engine.doubt("it used other ids than were sent")
        elif NO_IDS in kinds and model is not None and model.capability.level != "relay":
            self._hold.engine.doubt("it no longer says which ids it used")

    async def _settle(self, kind: str, detail: str, *, hole: bool = False) -> None:
        metrics.CALLS.labels(self._call.dialect, kind).inc()
        log.warning("session %s call %s: %s: %s", self._session, self._id, kind, detail)
        incidents = [self._outcome.tell(kind, detail, hole=hole)]
        await self._end(self._ledger.settle(self._begun, self._session, self._id, incidents))
