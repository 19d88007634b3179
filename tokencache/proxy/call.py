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
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from tokencache import metrics
from tokencache.core.chain import REQUEST_KEY
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.reasons import Reason
from tokencache.core.session import Budget
from tokencache.core.turn import Turn, TurnMark
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.figures import judge_reply
from tokencache.engine.reply import Reply
from tokencache.errors import EngineError, HarnessError, TokencacheError
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
from tokencache.proxy.continuation import AbortedPolicy
from tokencache.proxy.delivery import CLIENT_LEFT, delivery_of
from tokencache.proxy.dispatch import Dispatch, Services
from tokencache.proxy.facts import FIRST_SAMPLE, BegunCall, CallFacts, PlannedCall, RequestSample
from tokencache.proxy.generated_replies import budget_reply, overflow_reply
from tokencache.proxy.ledger import settle_refused
from tokencache.proxy.planner import keys_wanted
from tokencache.proxy.recorder import Recorded, turns_of
from tokencache.proxy.reply_source import End, EndKind, ReplySource
from tokencache.proxy.response import REQUEST_ID, Response
from tokencache.store.base import BeginResult, Join, OpenCall, Store, StoreError
from tokencache.store.clock import RECORD_CLOCK

if TYPE_CHECKING:
    from tokencache.proxy.spans import CallSpans

log = logging.getLogger(__name__)

_INCIDENTS = frozenset(IncidentKind)
_PLAIN = re.compile(r"[\w.:@/-]{1,128}", re.ASCII)
_LEFT_WHILE_STORED = "the client left before the end of the reply was sent"
_ASKED_AGAIN = "the engine aborted the reply before anything was shown; asked again"


class CallRequest(msgspec.Struct, frozen=True):
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


class Opening(msgspec.Struct, frozen=True):
    """What the store knows about other calls with the same fingerprint: one in flight, and the recorded turns in order.

    `left`: the client left meanwhile, and there are such turns.
    """

    epoch: str = ""
    duplicate: OpenCall | None = None
    earlier: tuple[Turn, ...] = ()
    left: bool = False


class CallAttempt:
    """One attempt at a model call, which ends in the store exactly once, whatever happens.

    Call `open`, and then `run` or `close` unless there is a duplicate. If any of them raises, call `fail`.

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
        self._call = BegunCall(
            id=self.id,
            session=asked.session,
            chat=asked.chat,
            fingerprint=asked.fingerprint,
            started=time.monotonic() + (offset := RECORD_CLOCK.offset),
            offset=offset,
        )
        self._response, self._settings, self._exchange = asked.response, asked.settings, asked.response.exchange
        self._services, self._ledger, self._budget, self._may_resample = services, services.ledger, budget, may_resample
        self._begun: BeginResult | None = None
        self._dispatch: Dispatch
        self._source, self._sample = ReplySource(Reply(asked.chat.n)), FIRST_SAMPLE
        self._ended: asyncio.Event | None = None

    def _end(self, event: RecordEvent) -> None:
        self.record.advance(event)
        self._ledger.placement.end(self.id, time.monotonic())
        if self._ended is not None:
            self._ended.set()

    async def fail(self, why: BaseException) -> None:
        """End the call after an exception: in the store, unless it has ended there or was never opened.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        if self.record.state is RecordState.UNOPENED and isinstance(why, TokencacheError):
            self.report(why.kind, status=why.status)
        if self.record.state is not RecordState.OPEN:
            return
        match why:
            case asyncio.CancelledError():
                self.client.advance(ClientEvent.LEAVE)  # unless `cancel` did: the event loop may cancel a task, too
                if may_have_sampled(self.engine.state):
                    await self._store(self._write_turns(TurnMark.ABORTED, CLIENT_LEFT))
                else:
                    self.report(IncidentKind.CLIENT_GONE)
                    late = self._sample.of_answered and self.engine.state is RequestState.IDLE
                    await self.close([] if late else [self._call.left("the client left before an engine took the call")])
            case HarnessError():
                self.report(why.kind, status=why.status)
                refused = self._call.incident(IncidentKind.CALL_REFUSED, str(why), status=why.status)
                await self._store(settle_refused(self._ledger, self._begun, self._call.session, refused, self._sample.documents))
            case EngineError():
                sampled = may_have_sampled(self.engine.state)
                await self._settle(IncidentKind.UPSTREAM_BROKE if sampled else IncidentKind.UPSTREAM_DOWN, str(why))
            case _:  # a bug in tokencache; calls that wait for this one must not wait endlessly
                await self._settle(IncidentKind.INTERNAL_ERROR, f"{type(why).__name__}: {why}", hole=may_have_sampled(self.engine.state))

    # Open and end

    async def open(self, join: Join) -> Opening:
        """Open the call in the store, unless there is a duplicate in flight that it may `join`.

        Raises:
            SessionSealedError: the session is sealed. Other errors of `Store.begin` are raised too.
            StoreError: the store failed and the policy is strict.
            CancelledError: the client left meanwhile, and no equal call is recorded.
        """
        keys = keys_wanted(self._call.chat)
        first = [REQUEST_KEY + self._call.fingerprint] if self._call.fingerprint else []  # the look-up ends at the first known `c` key
        self.record.advance(RecordEvent.OPEN)
        begun, opened = None, False
        try:
            begun = await self._ledger.begin(
                self._call.session, self.id, [*first, *keys], fingerprint=self._call.fingerprint, join=join, settings=self._settings
            )
            opened = begun is None or begun.duplicate is None
        finally:
            if opened:
                self.record.advance(RecordEvent.OPENED)
            else:
                self._end(RecordEvent.NOT_OPENED)
        found = msgspec.structs.replace(begun, hits=begun.hits[len(first) :]) if begun is not None and opened else None
        self._begun = msgspec.structs.replace(found, hits=[]) if found is not None else None
        self._dispatch = Dispatch(self._call, self._exchange, self._services, keys, found, request=self.engine)
        hits, left = begun.hits[0] if begun is not None and first else (), self.client.state is ClientState.LEFT
        if left and not hits:
            raise asyncio.CancelledError
        earlier = tuple([hit.turn for hit in hits]) if hits else ()
        return Opening(begun.epoch, begun.duplicate, earlier, left) if begun is not None else Opening()

    async def close(self, incidents: Sequence[Incident] = ()) -> None:
        """End a call without a turn.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        await self._store(self._ledger.settle(self._begun, self._call.session, self.id, incidents, documents=self._sample.documents))

    def report(self, ended: str, *, status: int = 0, detail: str | None = None) -> None:
        """Log how the call ended without a turn, and write its span. The arguments are those of `report_end`."""
        report_end(self._services.spans, self._call, self._exchange.headers, ended, status=status, detail=detail)

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

    async def _store(self, work: Awaitable[None], *, sends: bool = False) -> None:
        """Write the end of the call, and finish the write even if the client leaves meanwhile: if a reply `sends` follows, that is noted.

        Raises:
            StoreError: the store failed and the policy is strict.
            CancelledError: the client left meanwhile.
        """
        self.record.advance(RecordEvent.STORE)
        client, written = self.client.state, False
        try:
            await work
            if sends and client is not ClientState.ORPHANED and self.client.state is ClientState.LEFT:
                left, documents = self._call.left(_LEFT_WHILE_STORED), {undelivered(self.id): b"1"}
                await self._ledger.settle(self._begun, self._call.session, self.id, [left], documents=documents)
            written = True
        finally:
            self._end(RecordEvent.WRITTEN if written else RecordEvent.FAILED)
        if self.client.state is ClientState.LEFT and client is not ClientState.LEFT:
            raise asyncio.CancelledError

    async def _settle(self, kind: IncidentKind, detail: str, *, hole: bool | None = None, status: int = 0) -> None:
        """End a call without a turn, and record an incident; none if the call may be late. Raises the errors of `close`."""
        metrics.CALLS.labels(self._call.chat.dialect, kind).inc()
        self.report(kind, status=status, detail=detail)
        incident = self._call.incident(kind, detail, hole=hole, status=status)
        late = self._sample.of_answered and self.client.state is ClientState.ORPHANED and not incident.hole
        await self.close([] if late else [incident])

    async def _write_turns(self, mark: str, detail: str) -> None:
        """Write the turns of the reply; `mark` and `detail` as in `CallFacts`."""
        call, reply, weights, ended = self._call, self._source.reply, self._dispatch.planned.weights, time.monotonic()
        unanswered = self.client.state is ClientState.ORPHANED
        try:
            if mark == TurnMark.ABORTED:
                await self._source.read_for_record()
            await weights.end()
            if call.chat.media:
                await self._dispatch.find_places(reply)
            media_kept = not (call.chat.media and reply.choices) or await self._ledger.keep_media(self._begun, call)
            facts = await self._ledger.keep_experts(self._facts(mark, detail, unanswered=unanswered, media_kept=media_kept))
            recorded = await turns_of(facts, self._ledger.prefixes)
            documents = {**weights.salt.documents, **(self._exchange.encoder.documents() if facts.judged.whole else {})}
        except StoreError:
            raise
        except Exception as why:  # a bug in tokencache: the client gets its reply, and the trainer an incident
            log.exception("session %s call %s: no turn could be made of the reply", call.session, call.id)
            incidents = [call.incident(IncidentKind.INTERNAL_ERROR, f"{type(why).__name__}: {why}")]
            await self._ledger.settle(self._begun, call.session, call.id, incidents)
        else:
            incidents = recorded.incidents
            if incidents:
                self._dispatch.check({incident.kind for incident in incidents}, facts.reply)
            if facts.judged.whole and unanswered:
                documents |= {undelivered(self.id): b"1"}
            await self._ledger.end(self._begun, facts, recorded, documents)
            if log.isEnabledFor(logging.INFO):
                log_call(facts, recorded)
            if self._services.spans is not None:
                self._services.spans.answered(facts, recorded, self._exchange.headers)
        metrics.AFTER.observe(time.monotonic() - ended)
        metrics.counter(metrics.CALLS, call.chat.dialect, mark or ("error" if reply.error else "answered")).add(1)
        _log(self._call, incidents)

    def _facts(self, mark: str, detail: str, *, unanswered: bool, media_kept: bool) -> CallFacts:
        """Collect what the parties know at the end of the call, and learn from a reply that is certain."""
        source, reply, dispatch, model = self._source, self._source.reply, self._dispatch, self._dispatch.planned.model
        judged = judge_reply(reply, broken_off=bool(mark))
        if judged.whole and model is not None:
            for choice in reply.choices.values():
                model.observe(choice)
        return CallFacts(
            call=self._call,
            epoch=dispatch.epoch,
            sample=self._sample,
            planned=dispatch.planned,
            request=dispatch.sender.posted,
            late_grammar=dispatch.sender.request.late_grammar,
            reply=reply,
            pieces=source.pieces,
            again=source.gave_up or dispatch.planned.again,
            mark=mark,
            detail=detail,
            judged=judged,
            unanswered=unanswered,
            media_kept=media_kept,
            ended=time.monotonic() + self._call.offset,
        )

    # Plan and send

    async def run(self, sample: RequestSample = FIRST_SAMPLE) -> web.StreamResponse | None:
        """Serve the call to its last byte.

        Args:
            sample: which sample of its request it is.

        Returns:
            The response; `None` if the engine aborted the reply before the client received any of it, so that the call must be made again.

        Raises:
            EngineError: no engine took the call in time, or the engine broke off its answer; nothing was sent to the client.
            HarnessError: the prompt would not begin with the ids that the client requires.
            StoreError: the store failed and the policy is strict.
        """
        self._sample = sample
        begun = self._begun
        if (
            begun is not None
            and self._budget.spent(calls=begun.calls, tokens=begun.tokens, seconds=begun.age)
            and (spent := await _spent(self._budget, begun, self._ledger.store, self._call.session))
        ):
            return await self._stop(spent)
        try:
            answer = await self._dispatch.accepted()
        except EngineError as why:
            if why.passing or not self._may_resample or not _may_be_made_again(self._dispatch.planned, self._services.aborted):
                raise
            await self._conclude(End(EndKind.ABORTED))  # the engine died before it answered: nothing that it sampled is known
            return None
        try:
            reply, call, dispatch = self._source.reply, self._call, self._dispatch
            delivery = delivery_of(answer, reply, call, dispatch, self._response, shown=self.shown, may_resample=self._may_resample)
            self._source = delivery.source
            if self._call.chat.echoes:
                await compare(self._call, self._dispatch.planned.plan, self._ledger.prefixes, self._ledger.store)
            end = delivery.decided(await delivery.receive())
            await self._conclude(end)
            if end.kind is EndKind.OVERFLOW:
                return await self._response.send(overflow_reply(self._exchange.dialect, self._call.chat, self.id), self._source.reply)
            if end.kind is EndKind.ABORTED:
                return None
            if end.error is not None:
                raise end.error
            return await delivery.answer(end)
        finally:
            answer.close()

    async def _conclude(self, end: End) -> None:
        """End the call in the store. Raises the errors of `close`."""
        if end.kind is EndKind.ABORTED:
            await self._store(self._write_turns(TurnMark.ENGINE_ABORTED, _ASKED_AGAIN))
        elif end.incident is not None:
            await self._settle(end.incident, end.detail, status=end.status)
        else:
            if end.kind is EndKind.UNPARSED and end.detail:
                self._dispatch.planned.engine.doubt(end.detail)
            if end.kind is EndKind.FINISHED and end.error is not None:  # the reply is whole, and cannot be written for the client
                self._call.note(IncidentKind.INTERNAL_ERROR, f"{type(end.error).__name__}: {end.error}", hole=False)
            await self._store(self._write_turns(end.mark, end.detail), sends=end.mark != TurnMark.ABORTED)

    async def _stop(self, spent: str) -> web.StreamResponse:
        """End the episode with a reply of the proxy, without an engine."""
        metrics.CALLS.labels(self._call.chat.dialect, IncidentKind.BUDGET_SPENT).inc()
        number = self._ledger.over_budget.count(self._dispatch.epoch)
        self.report(IncidentKind.BUDGET_SPENT)
        await self.close([self._call.incident(IncidentKind.BUDGET_SPENT, f"{spent}: stopped call no. {number}")] if number else [])
        return await self._response.send(budget_reply(self._exchange.dialect, self._call.chat, self.id), self._source.reply)


async def _spent(budget: Budget, begun: BeginResult, store: Store, session: str) -> str:
    """Describe which limit of a session's budget is used up; `""` if none is. A call that got a recorded reply again costs nothing."""
    with contextlib.suppress(StoreError):
        info = await store.session(session)
        replayed = [one for one in info.incidents if one.kind == IncidentKind.RETRY_REPLAYED] if info is not None else []
        return budget.spent(calls=begun.calls - len(replayed), tokens=begun.tokens, seconds=begun.age)
    return budget.spent(calls=begun.calls, tokens=begun.tokens, seconds=begun.age)


def _may_be_made_again(planned: PlannedCall, aborted: AbortedPolicy) -> bool:
    """Whether a call whose engine gave no answer may be made again.

    It may if its reply would have been continued, or if the engine was dying already when the call was planned: then the probe has found
    nothing.
    """
    return planned.continues is not None or (planned.plan.reason == Reason.ENGINE_UNKNOWN and aborted == "continue")


def _log(call: BegunCall, incidents: Sequence[Incident]) -> None:
    """Log incidents. Their details may quote the client, so they are logged only at debug level."""
    for incident in incidents:
        status = f" (the engine answered {incident.status})" if incident.status else ""
        log.warning("session %s call %s: %s%s", call.session, call.id, incident.kind, status)
        log.debug("session %s call %s: %s: %s", call.session, call.id, incident.kind, incident.detail)


def report_end(
    spans: "CallSpans | None", call: BegunCall, headers: Mapping[str, str], ended: str, *, status: int, detail: str | None
) -> None:
    """Log how a call ended without a turn, in one line, and write its span.

    Args:
        spans: writes the span, if there are spans.
        call: the call.
        headers: those of the client.
        ended: the kind of an incident, or of the error with which the proxy refused it.
        status: the HTTP status of the engine's answer, or of the refusal; 0 if there was neither.
        detail: the detail of the incident, if one is recorded. It may quote the client, so it is logged only at debug level.
    """
    if spans is not None:
        spans.ended(call, headers, ended, status)
    subject, ms = f"session {call.session} call {call.id}", round(1000 * (time.monotonic() + call.offset - call.started))
    known = {"session": call.session, "call": call.id, "ms": ms}
    log_end(subject, known, headers, ended, status=status, level=logging.INFO if detail is None else logging.WARNING)
    if detail is not None:
        log.debug("%s: %s: %s", subject, ended, detail)


def log_end(subject: str, known: Mapping[str, Any], headers: Mapping[str, str], ended: str, *, status: int, level: int) -> None:
    """Log how a call ended without a turn, or a request before its call began. `subject` names it; `known` are further members of the line.

    `headers`, `ended` and `status` are those of `report_end`. The client's own request id is written only if it is a plain word.
    """
    own = headers.get(REQUEST_ID, "")
    fields = {**known, "ended": f"{ended}", "status": status or "", "request_id": own if _PLAIN.fullmatch(own) else ""}
    answered = f" ({'the engine answered' if ended in _INCIDENTS else 'answered with'} {status})" if status else ""
    request = f", request {fields['request_id']}" if fields["request_id"] else ""
    given = {name: value for name, value in fields.items() if value != ""}
    log.log(level, "%s: %s%s%s", subject, ended, answered, request, extra={"fields": given})


def log_call(facts: CallFacts, recorded: Recorded) -> None:
    """Log a call that an engine answered, in one line. The client's own request id is written only if it is a plain word."""
    call, first = facts.call, recorded.entries[0].turn if recorded.entries else None
    own, sent, _ = facts.request.partition(f"-{call.id}")
    request_id = own if sent and _PLAIN.fullmatch(own) else ""
    match, reason, prompt_tokens = (first.match, first.reason, first.prompt_tokens) if first is not None else ("no turn", "", 0)
    completion_tokens, ms = sum(map(attrgetter("turn.completion_tokens"), recorded.entries)), round(1000 * (facts.ended - call.started))
    ended = facts.mark or (first.finish_reason if first is not None else "") or ""
    fields = {
        "session": call.session,
        "call": call.id,
        "match": match,
        "reason": reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "ms": ms,
        "ended": ended,
        "request_id": request_id,
    }
    why = f" ({reason})" if reason else ""
    words = f"session {call.session} call {call.id}: {match}{why}, {prompt_tokens} + {completion_tokens} tokens, {ms} ms, {ended}"
    if request_id:
        words += f", request {request_id}"
    extra = {"fields": {name: value for name, value in fields.items() if value != ""}}
    log.handle(log.makeRecord(log.name, logging.INFO, "", 0, words, (), None, extra=extra))  # without a search for the caller's place


def undelivered(call: str) -> str:
    """Return the name of the document that marks a reply as not received yet. The request that deletes it may send the reply."""
    return f"unheard:{call}"
