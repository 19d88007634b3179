"""Runs one model call of a session as a state machine: open it in the store, plan, send, deliver, record.

`call_states` has the table of all legal transitions.

The turn is stored before the last byte of the reply is sent. So a client that has received a whole reply can send its next call to any
replica of the proxy.

If a client disconnects, its call is cancelled (`CallAttempt.cancel`). During a write to the store, the cancellation is deferred until the
store has answered; otherwise it would be unknown what is stored. (A shielded task for each write would do the same, but costs about 50 µs
per call.) If the client has received nothing yet, its call may instead continue as an *orphaned generation* (`dedup.in_flight`).
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
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
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.reply_encoder import EVENT_STREAM
from tokencache.engine.images import read_places
from tokencache.engine.reply import WEIGHT_VERSION_HEADER, Reply
from tokencache.errors import EngineError, HarnessError
from tokencache.proxy.call_states import (
    RECORD,
    REQUEST,
    SHOWN,
    TERMINAL,
    ClientEvent,
    ClientState,
    Party,
    RecordEvent,
    RecordState,
    RequestState,
    ShownState,
    may_be_orphaned,
    may_cancel,
    may_have_sampled,
)
from tokencache.proxy.client_ids import compare
from tokencache.proxy.delivery import CLIENT_LEFT, ReplyDelivery, StreamDelivery, WholeDelivery
from tokencache.proxy.dispatch import Dispatch, Services
from tokencache.proxy.gathered_reply import Gathered
from tokencache.proxy.generated_replies import budget_reply
from tokencache.proxy.plan import Plan
from tokencache.proxy.planner import keys_wanted
from tokencache.proxy.recorder import ABORTED, DROPPED, Outcome, Recorded
from tokencache.proxy.reply_source import Body, Continued, End, EndKind, Stream
from tokencache.proxy.response import Response
from tokencache.store.base import BeginResult, Join, OpenCall

log = logging.getLogger(__name__)

_OK = 200
_PLACES_SECONDS = 10.0
"""Seconds to wait for the places of the images in a prompt."""
_ASKED_AGAIN = "the engine aborted the reply before anything was shown; asked again"


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
        record: the call in the store.
        engine: the request to the engine.
        client: the connection to the client; its `Response` has the same.
        shown: what the client has received of the reply.
    """

    def __init__(self, asked: CallRequest, services: Services, budget: Budget, *, may_resample: bool) -> None:
        self.id = os.urandom(8).hex()
        self.record = Party(RECORD, RecordState.NEW)
        self.engine = Party(REQUEST, RequestState.IDLE)
        self.client = asked.response.client
        self.shown = Party(SHOWN, ShownState.NOTHING)
        self._session, self._chat, self._response, self._fingerprint, self._settings = asked
        self._exchange = asked.response.exchange
        self._services, self._ledger = services, services.ledger
        self._budget, self._may_resample = budget, may_resample
        self._keys = keys_wanted(asked.chat)
        self._reply = Reply(asked.chat.n)
        self._begun: BeginResult | None = None
        self._outcome: Outcome
        self._dispatch: Dispatch
        self._delivery: ReplyDelivery | None = None
        self._documents: dict[str, bytes] = {}
        self._started = time.time()
        self._ended: asyncio.Event | None = None

    def _end(self, event: RecordEvent) -> None:
        self.record.advance(event)
        if self._ended is not None:
            self._ended.set()

    async def __aenter__(self) -> Self:
        """Do nothing: `open` opens the call."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None) -> None:
        """End the call in the store, unless it has ended.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        if self.record.state is not RecordState.OPEN:
            return
        match why:
            case asyncio.CancelledError():
                self.client.advance(ClientEvent.LEAVE)  # unless `cancel` did: the event loop may cancel a task, too
                if may_have_sampled(self.engine.state):
                    await self._store(self._write_cancelled_turns())
                else:
                    await self.close()
            case HarnessError():
                await self.close()
            case EngineError():
                await self._settle(IncidentKind.UPSTREAM_BROKE if why.reached else IncidentKind.UPSTREAM_DOWN, str(why))
            case _:  # a bug in tokencache; calls that wait for this one must not wait endlessly
                await self._settle(IncidentKind.INTERNAL_ERROR, f"{type(why).__name__}: {why}", hole=may_have_sampled(self.engine.state))

    # Open and end

    async def open(self, join: Join) -> Opening:
        """Open the call in the store, unless there is a duplicate in flight that it may `join`.

        Raises:
            SessionSealedError: the session is sealed. Other errors of `Store.begin` are raised too.
            StoreError: the store failed and the policy is strict.
            CancelledError: the client left meanwhile.
        """
        first = [request_key(self._fingerprint)] if self._fingerprint else []  # the look-up ends at the first known `c` key
        self.record.advance(RecordEvent.OPEN)
        begun = None
        opened = False
        try:
            begun = await self._ledger.begin(
                self._session, self.id, [*first, *self._keys], fingerprint=self._fingerprint, join=join, settings=self._settings
            )
            opened = begun is None or begun.duplicate is None
        finally:
            if opened:
                self.record.advance(RecordEvent.OPENED)
            else:
                self._end(RecordEvent.NOT_OPENED)
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
        self._dispatch = Dispatch(self._outcome, self._exchange, self._services, self._keys, self._begun, request=self.engine)
        if self.client.state is ClientState.LEFT:
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
        return self.record.state in TERMINAL

    async def until_ended(self) -> bool:
        """Wait until the call has ended; false if the store did not confirm that it opened the call, which may still be open there."""
        self._ended = self._ended or asyncio.Event()
        if not self.ended:
            await self._ended.wait()
        return self._begun is not None

    def cancel(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task that serves the call; during a write to the store, as soon as the store has answered."""
        self.client.advance(ClientEvent.LEAVE)
        if self.record.state is RecordState.NEW:
            self._end(RecordEvent.NOT_OPENED)
        if may_cancel(self.record.state):
            task.cancel()

    @property
    def may_be_orphaned(self) -> bool:
        """Whether the call may continue without the client: an engine samples, and nothing of the reply was sent."""
        return self._begun is not None and may_be_orphaned(self.record.state, self.engine.state, self.client.state, self.shown.state)

    def orphan(self) -> None:
        """Continue without the client, or for another grace period."""
        self.client.advance(ClientEvent.ORPHAN)
        self._outcome.unanswered = True

    async def _store(self, work: Awaitable[None]) -> None:
        """Write the end of the call, and finish the write even if the client leaves meanwhile.

        Raises:
            StoreError: the store failed and the policy is strict.
            CancelledError: the client left meanwhile.
        """
        self.record.advance(RecordEvent.STORE)
        had_left, written = self.client.state is ClientState.LEFT, False
        try:
            await work
            written = True
        finally:
            self._end(RecordEvent.WRITTEN if written else RecordEvent.FAILED)
        if self.client.state is ClientState.LEFT and not had_left:
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

    async def _write_cancelled_turns(self) -> None:
        if self._delivery is not None:
            await self._delivery.receive_for_record()
        self._outcome.broke, self._outcome.detail = ABORTED, CLIENT_LEFT
        await self._write_turns()

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
            await self._conclude(End(EndKind.ABORTED))  # the engine died before it answered: nothing that it sampled is known
            return None
        try:
            await self._note_answer(answer)
            self._delivery = self._delivery_of(answer)
            end = await self._delivery.receive()
            async with self._response.keep_alive():
                await self._conclude(end)
            return None if end.kind is EndKind.ABORTED else await self._delivery.answer(end)
        finally:
            answer.close()

    async def _note_answer(self, answer: aiohttp.ClientResponse) -> None:
        """Note what the head of the engine's answer says."""
        self._reply.prompt.sent = self._outcome.plan.sent
        if self._dispatch.sender.proven:
            self._reply.prompt.confirm()
        if self._chat.media:
            self._outcome.places = read_places(answer.headers)
        self._reply.version = answer.headers.get(WEIGHT_VERSION_HEADER, "")
        if self._chat.echoes:
            await self._compare_returned_ids()

    def _delivery_of(self, answer: aiohttp.ClientResponse) -> ReplyDelivery:
        """Choose how the engine's answer is read, and how the client receives it."""
        dispatch, response, outcome = self._dispatch, self._response, self._outcome
        deliver = response, answer, dispatch.driver, self._outcome, self.shown
        again = self._may_resample
        if answer.status != _OK or answer.content_type != EVENT_STREAM:
            streams = dispatch.sender.streams and not dispatch.whole
            return WholeDelivery(Body(answer, outcome, dispatch, response.holding), *deliver, streams=streams, may_resample=again)
        if dispatch.gathers:
            stream = Continued(answer, outcome, dispatch, response, with_prompt=False, with_words=False)
            return WholeDelivery(Gathered(stream, outcome, dispatch, response.holding), *deliver, streams=False, may_resample=again)
        if dispatch.continues:
            stream = Continued(answer, outcome, dispatch, response, with_prompt=self._chat.shows_ids, with_words=True)
            return StreamDelivery(stream, *deliver, may_resample=again)
        return StreamDelivery(Stream(answer, outcome, with_prompt=self._chat.shows_ids), *deliver, may_resample=again)

    async def _conclude(self, end: End) -> None:
        """End the call in the store. Raises the errors of `close`."""
        outcome = self._outcome
        if end.kind is EndKind.ABORTED:
            outcome.broke, outcome.detail = DROPPED, _ASKED_AGAIN
            await self._record()
        elif end.incident is not None:
            await self._settle(end.incident, end.detail)
        else:
            if end.kind is EndKind.UNPARSED and end.detail:
                self._dispatch.engine.doubt(end.detail)
            outcome.broke, outcome.detail = end.mark, end.detail
            await self._record()

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
        return await self._response.send(budget_reply(self._exchange.dialect, self._chat, self.id), self._reply)

    # Forward the engine's answer

    async def _compare_returned_ids(self) -> None:
        """Add incidents where token ids that the client sent back differ from the record."""
        plan = self._outcome.plan
        differences = await compare(
            self._session,
            self._chat,
            parent=plan.parent,
            parent_messages=plan.basis.messages,
            used=plan.client_places,
            prefixes=self._ledger.prefixes,
            store=self._ledger.store,
        )
        self._outcome.noted += [self._outcome.incident(kind, detail) for kind, detail in differences]


def undelivered(call: str) -> str:
    """Return the name of the document that marks a reply as not received yet. The request that deletes it may send the reply."""
    return f"unheard:{call}"
