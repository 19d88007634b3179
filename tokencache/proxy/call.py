"""Runs one model call of a session as a state machine: open it in the store, plan, send, deliver, record.

`call_states` has the table of all legal transitions.

The turn is stored before the last byte of the reply is sent. So a client that has received a whole reply can send its next call to any
replica of the proxy.

If a client disconnects, its call is cancelled (`CallAttempt.cancel`). During a write to the store, the cancellation is deferred until the
store has answered; otherwise it would be unknown what is stored. (A shielded task for each write would do the same, but costs about 50 µs
per call.) If the client has received nothing yet, its call may instead continue as an *orphaned generation* (`dedup.in_flight`).
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec
from aiohttp import web

from tokencache import metrics
from tokencache.core.budget import Budget
from tokencache.core.chain import request_key
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.media import Places
from tokencache.core.reasons import Reason
from tokencache.core.turn import Turn
from tokencache.dialects.base import EVENT_STREAM, parse_engine_error
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.registry import CHAT as CHAT_DIALECT
from tokencache.engine.derender import Derender
from tokencache.engine.drivers.base import ParsedCompletion
from tokencache.engine.images import read_places
from tokencache.engine.reply import WEIGHT_VERSION_HEADER, Reply
from tokencache.errors import EngineError, HarnessError, MemoryFullError, UnexpectedAnswerError, is_error, is_success
from tokencache.proxy.call_states import DEFERRED, ENDING, SENT, TERMINAL, TRANSITIONS, Event, IllegalTransitionError, State
from tokencache.proxy.client_ids import compare
from tokencache.proxy.continuation import Continuation, ContinuationError
from tokencache.proxy.dispatch import Dispatch, Services
from tokencache.proxy.gathered_reply import GatheredReply
from tokencache.proxy.generated_replies import OVERFLOW_DETAIL, budget_reply, overflow_reply
from tokencache.proxy.planner import Plan, keys_wanted
from tokencache.proxy.recorder import ABORTED, BROKE, DROPPED, Outcome, Recorded
from tokencache.proxy.response import CLIENT_LEFT, Broken, ReplyForwarder, Response, whole_response
from tokencache.request_memory import read_reply
from tokencache.store.base import BeginResult, Join, OpenCall, StoreError

log = logging.getLogger(__name__)

_OK, _BAD_GATEWAY, _UNAVAILABLE = 200, 502, 503
_PLACES_SECONDS = 10.0
"""Seconds to wait for the places of the images in a prompt."""
_ENDED_EARLY = "the engine's stream ended before the reply did"
_UNREADABLE = "the engine's reply cannot be read"


class CallRequest(NamedTuple):
    """A client request for a model's reply.

    Attributes:
        session: the session's name.
        chat: the request, as a chat completion.
        response: the response to the client.
        fingerprint: the request fingerprint (16 bytes); `b""` if retries are not deduplicated.
        settings: the digest of the session's settings by which the request is served (`SessionSettings.digest`).
    """

    session: str
    chat: ChatCall
    response: Response
    fingerprint: bytes
    settings: bytes


class Opening(NamedTuple):
    """What the store knows about other calls with the same fingerprint: one in flight, and the recorded turns in order."""

    epoch: str = ""
    duplicate: OpenCall | None = None
    earlier: tuple[Turn, ...] = ()


class CallAttempt:
    """One attempt at a model call. It is a context manager that ends the call in the store exactly once, whatever happens.

    Within the context, call `open`, and then `run` or `close` unless there is a duplicate.

    Attributes:
        id: 16 hexadecimal digits; also in the turns and in the engine's request.
        state: the state of the call; only `_advance` changes it.
    """

    def __init__(self, asked: CallRequest, services: Services, budget: Budget, *, may_resample: bool) -> None:
        self.id = os.urandom(8).hex()
        self.state = State.NEW
        self._session, self._chat, self._response, self._fingerprint, self._settings = asked
        self._exchange = asked.response.exchange
        self._services, self._ledger = services, services.ledger
        self._budget, self._may_resample = budget, may_resample
        self._keys = keys_wanted(asked.chat)
        self._reply = Reply(asked.chat.n)
        self._begun: BeginResult | None = None
        self._outcome: Outcome
        self._dispatch: Dispatch
        self._documents: dict[str, bytes] = {}
        self._started = time.time()
        self._ended: asyncio.Event | None = None

    def _advance(self, event: Event) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise IllegalTransitionError(f"a call that is {self.state} cannot {event}") from None
        if self._ended is not None and self.ended:
            self._ended.set()

    async def __aenter__(self) -> Self:
        """Do nothing: `open` opens the call."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None) -> None:
        """End the call in the store, unless it has ended.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        if self.state in ENDING or self.state is State.NEW:
            return
        match why:
            case asyncio.CancelledError():
                if self.state not in {State.ABANDONED, State.CANCELLED}:  # cancelled by the event loop, not by `cancel`
                    self._advance(Event.CANCEL)
                if self.state is State.CANCELLED:
                    await self._record_cancelled()
                else:
                    await self.close()
            case HarnessError():
                await self.close()
            case EngineError():
                await self._settle(IncidentKind.UPSTREAM_BROKE if why.reached else IncidentKind.UPSTREAM_DOWN, str(why))
            case _:  # a bug in tokencache; calls that wait for this one must not wait endlessly
                await self._settle(IncidentKind.INTERNAL_ERROR, f"{type(why).__name__}: {why}", hole=self.state in SENT)

    # Open and end

    async def open(self, join: Join) -> Opening:
        """Open the call in the store, unless there is a duplicate in flight that it may `join`.

        Raises:
            SessionSealedError: the session is sealed. Other errors of `Store.begin` are raised too.
            StoreError: the store failed and the policy is strict.
            CancelledError: the client left meanwhile.
        """
        first = [request_key(self._fingerprint)] if self._fingerprint else []  # the look-up ends at the first known `c` key
        self._advance(Event.OPEN)
        begun = None
        opened = False
        try:
            begun = await self._ledger.begin(
                self._session, self.id, [*first, *self._keys], fingerprint=self._fingerprint, join=join, settings=self._settings
            )
            opened = begun is None or begun.duplicate is None
        finally:
            self._advance(Event.OPENED if opened else Event.NOT_OPENED)
        if begun is not None and opened:
            self._begun = msgspec.structs.replace(begun, hits=begun.hits[len(first) :])
        self._outcome = Outcome(
            session=self._session,
            epoch=begun.epoch if begun is not None else "",
            call_id=self.id,
            call=self._chat,
            plan=Plan(match="plain"),
            reply=self._reply,
            model=None,
            started=self._started,
            asked=self._fingerprint,
        )
        self._dispatch = Dispatch(self._outcome, self._exchange, self._services, self._keys, self._begun, advance=self._advance)
        if self.state is State.ABANDONED:
            raise asyncio.CancelledError
        if begun is None:
            return Opening()
        return Opening(begun.epoch, begun.duplicate, tuple(hit.turn for hits in begun.hits[: len(first)] for hit in hits))

    async def close(self, incidents: Sequence[Incident] = ()) -> None:
        """End a call without a turn.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        await self._store(self._ledger.settle(self._begun, self._session, self.id, incidents, documents=self._documents))

    @property
    def ended(self) -> bool:
        """Whether the end of the call is in the store, or was lost, or the call was never opened."""
        return self.state in TERMINAL

    async def until_ended(self) -> bool:
        """Wait until the call has ended; false if the store did not confirm that it opened the call, which may still be open there."""
        self._ended = self._ended or asyncio.Event()
        if not self.ended:
            await self._ended.wait()
        return self._begun is not None

    def cancel(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task that serves the call; during a write to the store, as soon as the store has answered."""
        self._advance(Event.CANCEL)
        if self.state not in DEFERRED:
            task.cancel()

    @property
    def may_be_orphaned(self) -> bool:
        """Whether the call may continue without the client: an engine samples, and nothing of the reply was sent."""
        return self.state is State.SAMPLING and self._begun is not None

    def orphan(self) -> None:
        """Continue without the client, or for another grace period."""
        self._advance(Event.ORPHAN)
        self._outcome.unanswered = True

    @property
    def orphaned(self) -> bool:
        """See `response.Progress`."""
        return self.state is State.ORPHANED

    def show(self) -> None:
        """See `response.Progress`."""
        if self.state is not State.STREAMING:
            self._advance(Event.SHOW)

    async def _store(self, work: Awaitable[None]) -> None:
        """Write the end of the call, and finish the write even if the client leaves meanwhile.

        Raises:
            StoreError: the store failed and the policy is strict.
            CancelledError: the client left meanwhile.
        """
        self._advance(Event.STORE)
        written = cancelled = False
        try:
            await work
            written = True
        finally:
            cancelled = self.state is State.STORING_CANCELLED
            self._advance(Event.WRITTEN if written else Event.FAILED)
        if cancelled:
            raise asyncio.CancelledError

    async def _settle(self, kind: IncidentKind, detail: str, *, hole: bool | None = None) -> None:
        """End a call without a turn, and record an incident. Raises the errors of `close`."""
        metrics.CALLS.labels(self._chat.dialect, kind).inc()
        incident = self._outcome.incident(kind, detail, hole=hole)
        self._log(incident)
        await self.close([incident])

    async def _record(self) -> None:
        """End a call with the turns of its reply. Raises the errors of `close`."""
        await self._store(self._write_turns())

    async def _record_cancelled(self) -> None:
        self._outcome.broke, self._outcome.detail = ABORTED, CLIENT_LEFT
        await self._record()

    async def _write_turns(self) -> None:
        outcome, ended = self._outcome, time.time()
        await outcome.weights.end()
        if self._chat.media and outcome.places is None:
            outcome.places = await self._find_places()
        await self._ledger.keep_experts(outcome)
        await self._ledger.keep_media(self._begun, outcome)
        try:
            recorded = outcome.record(self._ledger.prefixes)
        except Exception as why:  # a bug in tokencache: the client gets its reply, and the trainer an incident
            log.exception("session %s call %s: no turn could be made of the reply", self._session, self.id)
            recorded = Recorded([], [], [outcome.incident(IncidentKind.INTERNAL_ERROR, f"{type(why).__name__}: {why}")])
        self._doubt_engine({incident.kind for incident in recorded.incidents})
        documents = {**outcome.weights.salt.documents, **(self._exchange.encoder.documents() if outcome.whole else {})}
        if outcome.whole and outcome.unanswered:
            documents |= {undelivered(self.id): b"1"}
        await self._ledger.end(self._begun, outcome, recorded, documents)
        metrics.AFTER.observe(time.time() - ended)
        metrics.counter(metrics.CALLS, outcome.call.dialect, outcome.broke or ("error" if outcome.reply.error else "answered")).inc()
        if log.isEnabledFor(logging.DEBUG):
            for turn in (entry.turn for entry in recorded.entries):
                counts = f"{turn.prompt_tokens} + {turn.completion_tokens} tokens"
                log.debug("session %s turn %s: %s %s, %s, %s", self._session, turn.id, turn.match, turn.reason, counts, turn.finish_reason)
        for incident in recorded.incidents:
            self._log(incident)

    async def _find_places(self) -> Places | None:
        """Ask the engine where the images of a prompt are that it rendered; `None` if it cannot say."""
        prompt = self._reply.prompt.packed
        if prompt is None or self._outcome.plan.exact is not None:
            return None
        try:
            async with asyncio.timeout(_PLACES_SECONDS):
                dispatch = self._dispatch
                return await dispatch.driver.places(self._chat, prompt, dispatch.sender.target(dispatch.engine))
        except (EngineError, TimeoutError) as why:
            log.warning("session %s call %s: the places of its images are not known: %s", self._session, self.id, why)
            return None

    def _log(self, incident: Incident) -> None:
        """Log an incident. Its detail may quote the client, so it is logged only at debug level."""
        log.warning("session %s call %s: %s", self._session, self.id, incident.kind)
        log.debug("session %s call %s: %s: %s", self._session, self.id, incident.kind, incident.detail)

    def _doubt_engine(self, kinds: set[str]) -> None:
        """Probe the engine again if its behaviour contradicts the probe: another engine may run at its URL now."""
        model = self._outcome.model
        if IncidentKind.ENGINE_DISAGREES in kinds:
            self._dispatch.engine.doubt("it used other ids than were sent")
        elif IncidentKind.NO_TOKEN_IDS in kinds and model is not None and model.capability.level != "relay":
            self._dispatch.engine.doubt("it no longer says which ids it used")

    # Plan and send

    async def run(self, *, second: str = "", documents: Mapping[str, bytes] = MappingProxyType({})) -> web.StreamResponse | None:
        """Serve the call to its last byte.

        Args:
            second: the id of an earlier call with the same fingerprint, if this is a second sample of it; otherwise `""`.
            documents: documents to store if the call ends without a turn.

        Returns:
            The response; `None` if the engine aborted the reply before the client received any of it, so that the call must be made again.

        Raises:
            EngineError: no engine took the call in time, or the engine broke off its answer; nothing was sent to the client.
            HarnessError: the prompt would not begin with the ids that the client requires.
            StoreError: the store failed and the policy is strict.
        """
        self._outcome.second = second
        self._documents = dict(documents)
        if spent := self._budget_spent():
            return await self._stop(spent)
        try:
            async with self._response.keep_alive():
                answer = await self._dispatch.accepted(self._dispatch.post_call)
        except EngineError as why:
            if why.passing or not self._may_be_made_again:
                raise
            return await self._drop()  # the engine died before it answered: nothing that it sampled is known
        try:
            self._reply.prompt.sent = self._outcome.plan.sent
            if self._dispatch.sender.proven:
                self._reply.prompt.confirm()
            if self._chat.media:
                self._outcome.places = read_places(answer.headers)
            self._reply.version = answer.headers.get(WEIGHT_VERSION_HEADER, "")
            if self._chat.echoes:
                await self._compare_returned_ids()
            if answer.status != _OK:
                return await self._pass_refusal(answer)
            if self._dispatch.gathers and answer.content_type == EVENT_STREAM:
                return await self._pass_gathered(answer)
            delivery = ReplyForwarder(
                self._response,
                self._reply,
                self._dispatch.driver,
                self,
                may_resample=self._may_resample,
                may_continue=self._dispatch.continues,
                arrives_whole=self._dispatch.whole or self._dispatch.sender.request.parse is not None,
            )
            if answer.content_type == EVENT_STREAM:
                return await self._pass_stream(answer, delivery)
            return await self._pass_whole(answer, delivery)
        finally:
            answer.close()

    @property
    def _may_be_made_again(self) -> bool:
        """Whether a call whose engine gave no answer may be made again.

        It may if its reply would have been continued, or if the engine was dying already when the call was planned: then the probe has
        found nothing.
        """
        dying = self._outcome.plan.reason == Reason.ENGINE_UNKNOWN and self._services.aborted == "continue"
        return self._may_resample and (self._dispatch.continues or dying)

    def _budget_spent(self) -> str:
        """Describe which limit of the session's budget is used up; `""` if none is, or if the store failed."""
        if self._begun is None or not self._budget:
            return ""
        begun = self._begun
        return self._budget.spent(calls=begun.calls, tokens=begun.tokens, seconds=begun.age)

    async def _stop(self, spent: str) -> web.StreamResponse:
        """End the episode with a reply of the proxy, without an engine."""
        metrics.CALLS.labels(self._chat.dialect, IncidentKind.BUDGET_SPENT).inc()
        number = self._ledger.count_over_budget(self._session)
        log.info("session %s call %s: %s: %s", self._session, self.id, IncidentKind.BUDGET_SPENT, spent)
        await self.close([self._outcome.incident(IncidentKind.BUDGET_SPENT, f"{spent}: stopped call no. {number}")] if number else [])
        return await self._response.send(budget_reply(self._chat, self.id), self._reply)

    # Forward the engine's answer

    async def _compare_returned_ids(self) -> None:
        """Add incidents where token ids that the client sent back differ from the record."""
        plan = self._outcome.plan
        differences = await compare(
            self._session,
            self._chat,
            parent=plan.parent,
            parent_messages=plan.parent_messages,
            used=plan.client_places,
            prefixes=self._ledger.prefixes,
            store=self._ledger.store,
        )
        self._outcome.noted += [self._outcome.incident(kind, detail) for kind, detail in differences]

    async def _pass_refusal(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send an engine's error to the client; nothing was sampled.

        Raises:
            UnexpectedAnswerError: the answer is neither a reply nor an error, for example a redirect.
        """
        body = await self._read(answer)
        if body is None:
            return web.Response()
        if not is_error(answer.status):
            unexpected = UnexpectedAnswerError(answer.status)
            sampled = is_success(answer.status) and bool(body)  # its body may hold sampled tokens
            await self._settle(IncidentKind.UPSTREAM_BROKE if sampled else IncidentKind.ENGINE_REFUSED, str(unexpected))
            raise unexpected
        if self._exchange.token_ids and self._dispatch.driver.is_overflow(answer.status, body):
            return await self._answer_overflow(answer.status, body)
        await self._settle(IncidentKind.ENGINE_REFUSED, f"{answer.status}: {body[:300].decode(errors='replace')}")
        if self._response.opened is not None:
            return await self._response.fail(answer.status, parse_engine_error(answer.status, body)[0])
        if self._exchange.refuse is not None:
            body = self._exchange.refuse(answer.status, body)
        elif body.lstrip()[:1] == b"<":  # HTML, so it is not the engine's, but a gateway's
            body = CHAT_DIALECT.error(answer.status, *parse_engine_error(answer.status, body))
        else:
            return whole_response(answer, body)
        response = whole_response(answer, body)
        response.headers["Content-Type"] = "application/json"
        return response

    async def _answer_overflow(self, status: int, words: bytes) -> web.StreamResponse:
        """Answer a prompt that is too long with an empty reply; nothing was sampled."""
        await self._settle(IncidentKind.ENGINE_REFUSED, f"{status}: {words[:300].decode(errors='replace')}; {OVERFLOW_DETAIL}")
        return await self._response.send(overflow_reply(self._chat, self.id), self._reply)

    async def _pass_whole(self, answer: aiohttp.ClientResponse, delivery: ReplyForwarder) -> web.StreamResponse | None:
        """Send a whole reply to the client, after its turn is stored.

        Raises:
            EngineError: tokens were sampled, but their text is not available.
        """
        body = await self._read(answer)
        if body is None:
            return web.Response()
        no_text = ""
        if self._dispatch.sender.request.parse is not None:
            parsed = await self._parse(self._dispatch.sender.request.parse(body), delivery)
            body, no_text, self._outcome.places = parsed.body, parsed.error, parsed.places
        body = delivery.take(body)
        if delivery.withheld == "aborted":
            return await self._drop()
        if no_text:
            self._dispatch.engine.doubt(no_text)
            await self._record()
            raise EngineError(no_text)
        if self._reply.unreadable and self._exchange.refuse is not None:  # an incomplete body cannot be translated
            await self._record()
            raise EngineError(_UNREADABLE)
        as_stream = delivery.sends_as_stream
        try:
            written = self._response.as_events(body, self._reply) if as_stream else self._response.as_body(body, self._reply)
        finally:  # record the reply even if it cannot be written for the client
            async with self._response.keep_alive():
                await self._record()
        if as_stream:
            return await self._response.finish(written)
        if self._response.opened is not None:
            return await self._response.fail(_BAD_GATEWAY, "the engine did not stream its reply")
        return whole_response(answer, written)

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes | None:
        """Read a whole answer. If the engine breaks it off, close the client's connection too and return `None`.

        Raises:
            MemoryFullError: requests hold as much memory as they may; the session says that the reply is missing.
        """
        try:
            async with self._response.keep_alive():
                return await read_reply(answer, self._response.holding)
        except MemoryFullError as why:
            sampled = is_success(answer.status)
            await self._settle(IncidentKind.REPLY_NOT_READ if sampled else IncidentKind.ENGINE_REFUSED, str(why))
            raise
        except (aiohttp.ClientError, TimeoutError) as why:
            await self._settle(IncidentKind.UPSTREAM_BROKE, f"{type(why).__name__}: {why}")
            self._response.break_off()
            return None

    async def _parse(self, parsing: Awaitable[ParsedCompletion], delivery: ReplyForwarder) -> ParsedCompletion:
        """Wait for the second request that parses a reply. If the client leaves meanwhile, still record the tokens."""
        work = asyncio.ensure_future(parsing)
        try:
            async with self._response.keep_alive():
                return await asyncio.shield(work)
        except asyncio.CancelledError:
            await self._store(self._write_parsed_turns(work, delivery))
            raise

    async def _write_parsed_turns(self, work: "asyncio.Future[ParsedCompletion]", delivery: ReplyForwarder) -> None:
        parsed = await work
        delivery.take(parsed.body)
        self._outcome.places = parsed.places
        self._outcome.broke, self._outcome.detail = ABORTED, CLIENT_LEFT
        await self._write_turns()

    async def _pass_stream(self, answer: aiohttp.ClientResponse, delivery: ReplyForwarder) -> web.StreamResponse | None:
        """Forward a stream, and store its turn before its last event is sent."""
        reply, outcome = self._reply, self._outcome
        held, broke = await delivery.follow(answer)
        if delivery.cut:
            held, broke = await self._continue(delivery, broke)
        if delivery.withheld == "overflow":
            return await self._answer_overflow(reply.refusal, reply.error)
        if delivery.withheld == "aborted" and not delivery.client_left:
            return await self._drop()
        if broke is None and delivery.client_left:  # it will not receive the held part
            broke = ABORTED, CLIENT_LEFT
        cut = broke is not None
        ended_early = not reply.finished and not reply.error
        if broke is None and ended_early:
            broke = BROKE, _ENDED_EARLY
        if broke is not None:
            if ended_early and broke[0] == BROKE and self._exchange.refuse is not None and not delivery.ended:
                held += self._exchange.encoder.error(_BAD_GATEWAY, _ENDED_EARLY)  # a translated stream must not look complete
                cut = False
            outcome.broke, outcome.detail = broke
        try:
            async with self._response.keep_alive():
                await self._record()
        except StoreError as why:  # the head was sent, so send the error in the stream, like an engine
            held, cut = self._exchange.encoder.error(_UNAVAILABLE, why.client_message), False
        return await self._response.finish(held, cut=cut)

    # Continue a reply that the engine broke off

    async def _continue(self, delivery: ReplyForwarder, broke: Broken | None) -> tuple[bytes, Broken | None]:
        """Continue a reply, as often as needed. Returns the part that must wait for the store, and why the stream was cut off."""
        outcome = self._outcome
        assert self._dispatch.driver.derender is not None  # noqa: S101 - `Dispatch.continues` requires it
        outcome.continuation = continuation = Continuation(
            self._chat, self._reply, self._dispatch.driver.derender, delivery.head, outcome.places
        )
        continuation.begin_piece(self._dispatch.sender.posted, self._dispatch.engine.upstream.url)
        held = b""
        while delivery.cut:
            how = continuation.broke or delivery.cut
            await outcome.end_piece(how)
            self._log_cut(how)
            try:
                continuation.check()
                async with self._response.keep_alive():
                    answer = await self._next_piece(continuation)
                try:
                    held, broke = await delivery.resume(continuation.chunks(answer, self._dispatch.derender_request()))
                finally:
                    if answer is not None:
                        answer.close()
            except (ContinuationError, EngineError) as why:
                log.warning("session %s call %s: the reply cannot be continued: %s", self._session, self.id, why)
                outcome.again = str(why)
                return delivery.give_up(), broke
        if continuation.differs:
            detail = "the client received words that are not those of the reply's tokens"
            outcome.noted.append(outcome.incident(IncidentKind.WORDS_DIFFER, detail))
        return held, broke

    async def _pass_gathered(self, answer: aiohttp.ClientResponse) -> web.StreamResponse | None:
        """Gather a stream for a client that gets a whole reply, and send it. Raises the errors of `_gather`.

        Raises:
            MemoryFullError: requests hold as much memory as they may; what was read is recorded.
        """
        try:
            return await self._gather(answer)
        except MemoryFullError as why:
            self._outcome.noted.append(self._outcome.incident(IncidentKind.REPLY_NOT_READ, str(why)))
            self._outcome.broke, self._outcome.detail = BROKE, str(why)
            await self._record()
            raise

    async def _gather(self, answer: aiohttp.ClientResponse) -> web.StreamResponse | None:
        """Gather a stream for a client that gets a whole reply, continue it if it is broken off, and send it when it is stored.

        Raises:
            EngineError: tokens were sampled, but their text is not available; or the engine broke off its reply before it had sampled.
        """
        reply, derender = self._reply, self._dispatch.driver.derender
        assert derender is not None  # noqa: S101 - `Dispatch.continues` requires it
        gathered = GatheredReply(reply, self._response.holding)
        async with self._response.keep_alive():
            how = await gathered.read(answer)
        if how and not any(choice.ids for choice in reply.choices.values()):
            return await self._pass_nothing(how)
        if how and (why := await self._gather_pieces(gathered, derender, how)):
            log.warning("session %s call %s: the reply cannot be continued: %s", self._session, self.id, why)
            self._outcome.again = why
            if self._may_resample:
                return await self._drop()
            self._outcome.broke, self._outcome.detail = BROKE, why
            await self._record()
            raise EngineError("the engine broke off its reply, and it cannot be continued", private=why)
        try:
            body = await gathered.body(self._chat, derender, self._dispatch.derender_request())
        except EngineError as why:
            self._dispatch.engine.doubt(str(why))
            await self._record()
            raise
        as_events = self._chat.stream
        written = self._response.as_events(body, reply) if as_events else self._response.as_body(body, reply)
        await self._record()
        if as_events:
            return await self._response.finish(written)
        response = whole_response(answer, written)
        response.headers["Content-Type"] = "application/json"
        return response

    async def _gather_pieces(self, gathered: GatheredReply, derender: Derender, how: str) -> str:
        """Continue a gathered reply until it is complete. Returns why that is not possible, otherwise `""`."""
        outcome, reply = self._outcome, self._reply
        outcome.continuation = continuation = Continuation(self._chat, reply, derender, gathered.first, outcome.places)
        continuation.begin_piece(self._dispatch.sender.posted, self._dispatch.engine.upstream.url)
        while how:
            await outcome.end_piece(how)
            self._log_cut(how)
            try:
                continuation.check()
                check = continuation.prompt_check()
                answer = await self._next_piece(continuation)
                reply.reopen()
                if answer is None:
                    reply.choices[0].finish_reason = "length"
                    return ""
                with contextlib.closing(answer):
                    how = await gathered.read(answer, check)
            except (ContinuationError, EngineError) as why:
                return str(why)
        return ""

    async def _pass_nothing(self, how: str) -> web.StreamResponse | None:
        """Answer a client that requested a whole reply, if the engine broke it off before it had sampled."""
        error = self._reply.error
        if how == "error":
            code = self._reply.error_code
            await self._settle(IncidentKind.ENGINE_REFUSED, f"{code}: {error[:300].decode(errors='replace')}")
            body = b'{"error":%s}' % error
            if self._response.opened is not None:
                return await self._response.fail(code, parse_engine_error(code, body)[0])
            return web.Response(
                body=body if self._exchange.refuse is None else self._exchange.refuse(code, body),
                status=code,
                content_type="application/json",
            )
        if self._may_resample:
            return await self._drop()
        await self._settle(IncidentKind.UPSTREAM_BROKE, _ENDED_EARLY)
        self._response.break_off()
        return web.Response()

    def _log_cut(self, how: str) -> None:
        log.info("session %s call %s: the reply was broken off (%s), and is continued", self._session, self.id, how)
        metrics.CONTINUED.labels(how).inc()

    async def _next_piece(self, continuation: Continuation) -> aiohttp.ClientResponse | None:
        """Send the request for the next piece; `None` if the limits of the request allow no more tokens.

        Raises:
            ContinuationError: the engine refuses the request.
            EngineError: no engine accepted it in time.
        """
        if not continuation.has_room(self._outcome.model.capability.max_model_len if self._outcome.model is not None else 0):
            return None
        answer = await self._dispatch.accepted(partial(self._dispatch.post_piece, continuation))
        if answer.status != _OK or answer.content_type != EVENT_STREAM:
            words = (await answer.read())[:300].decode(errors="replace")
            answer.close()
            raise ContinuationError(f"the engine answered {answer.status}: {words}")
        continuation.check_places(read_places(answer.headers))
        return answer

    async def _drop(self) -> web.StreamResponse | None:
        """Record a reply that the engine broke off before the client received any of it. Returns `None`: the call is made again."""
        self._outcome.broke, self._outcome.detail = DROPPED, "the engine aborted the reply before anything was shown; asked again"
        await self._record()
        return None


def undelivered(call: str) -> str:
    """Return the name of the document that marks a reply as not received yet. The request that deletes it may send the reply."""
    return f"unheard:{call}"
