"""Delivers an engine's reply to the client: takes it from its source, decides what the client receives and when, and sends the rest.

A call first receives the reply, then stores its turn, and then answers the client:

`StreamDelivery`  forwards a stream as it arrives, up to the event that finishes its last choice. That event and everything after it wait
                  until the turn is stored. Nothing is sent before the first sampled token, because until then the call can be made again.
`WholeDelivery`   sends a whole reply, as a body, or in chunks if the client requested a stream
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from tokencache.core.turn import TurnMark
from tokencache.dialects.base import parse_engine_error
from tokencache.dialects.completion_reader import CHOICE_BEGIN, CHOICE_END
from tokencache.dialects.reply_encoder import EVENT_STREAM
from tokencache.dialects.sse import DONE, event_of
from tokencache.engine.connections import Answer
from tokencache.engine.drivers.base import Driver
from tokencache.engine.reply import AT_ONCE, Reply
from tokencache.engine.upstream import error_text
from tokencache.errors import OK, EngineError
from tokencache.proxy.call_states import ClientState, Party, ShownEvent, ShownState, may_answer_with_status, may_resample
from tokencache.proxy.dispatch import Dispatch
from tokencache.proxy.facts import BegunCall
from tokencache.proxy.gathered_reply import Gathered
from tokencache.proxy.generated_replies import OVERFLOW_DETAIL
from tokencache.proxy.reply_source import ENDED_EARLY, Body, Continued, End, EndKind, ReplySource, Stream, WholeSource, refusal
from tokencache.proxy.response import Response, whole_response

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

CLIENT_LEFT = "the client closed the connection"
_MAX_UNSENT = 64 * 1024
"""Bytes that may wait for a slow client before the engine must wait too; aiohttp has the same limit."""
_FINISH, _ERROR = b'"finish_reason":"', b'"error"'
_NOT_NEEDED = CIMultiDictProxy(CIMultiDict[str]())
_LEFT = End(EndKind.BROKEN, CLIENT_LEFT, TurnMark.ABORTED, cut=True)


def _as_overflow(refused: End) -> End:
    """Return the end of a call whose prompt is too long."""
    return msgspec.structs.replace(refused, kind=EndKind.OVERFLOW, detail=f"{refused.detail}; {OVERFLOW_DETAIL}")


class ReplyDelivery(ABC):
    """Delivers one reply.

    Attributes:
        source: the reply.
    """

    __slots__ = ("_answer", "_chat", "_driver", "_exchange", "_may_resample", "_reply", "_response", "_shown", "source")

    def __init__(
        self,
        source: ReplySource,
        response: Response,
        answer: Answer,
        driver: Driver,
        shown: Party[ShownState, ShownEvent],
        *,
        may_resample: bool,
    ) -> None:
        """Prepare to deliver.

        Args:
            source: the reply.
            response: the response to the client.
            answer: the engine's answer.
            driver: the engine's driver.
            shown: what the client has received of the reply.
            may_resample: whether the call may be made again if the client received nothing of the reply.
        """
        self._response, self._answer, self._driver, self._shown, self._may_resample = response, answer, driver, shown, may_resample
        self.source: ReplySource = source
        self._reply, self._chat, self._exchange = source.reply, response.chat, response.exchange

    @abstractmethod
    async def receive(self) -> End:
        """Take the reply from its source. The client receives what need not wait for the store. Returns how the reply ended."""

    @abstractmethod
    def decided(self, end: End) -> End:
        """Return the end of the call for the end of its reply; `ABORTED` only if the call must be made again."""

    @abstractmethod
    async def answer(self, end: End) -> web.StreamResponse:
        """Send the rest of a reply after the turn is stored, or the error that the engine gave in its place."""

    @property
    def _orphaned(self) -> bool:
        """Whether the client has left, but the reply is still read to its end."""
        return self._response.client.state is ClientState.ORPHANED

    def _is_overflow(self, status: int, body: bytes) -> bool:
        """Whether an engine's error says that the prompt is too long, and the client receives an empty reply for that."""
        return self._exchange.token_ids and self._driver.is_overflow(status, body)


class WholeDelivery(ReplyDelivery):
    """Delivers a whole reply, or an engine's error."""

    __slots__ = ("_as_events", "_body", "_source", "_streams", "_written")

    def __init__(self, source: WholeSource, *prepared: Any, streams: bool, may_resample: bool) -> None:
        """Prepare to deliver.

        Args:
            source: the reply.
            prepared: see `ReplyDelivery`.
            streams: whether the engine was asked for a stream if the client requested one.
            may_resample: see `ReplyDelivery`.
        """
        super().__init__(source, *prepared, may_resample=may_resample)
        self._source, self._streams = source, streams
        self._body = b""
        self._written: bytes | None = None
        self._as_events = False

    async def receive(self) -> End:
        """See `ReplyDelivery.receive`."""
        self._body = await self._source.read()
        return self._source.end

    def decided(self, end: End) -> End:
        """See `ReplyDelivery.decided`."""
        body, self._body = self._body, b""
        if end.kind is EndKind.ABORTED and self._may_resample:
            return end
        if end.kind is EndKind.REFUSED and self._is_overflow(end.status, end.body):
            return _as_overflow(end)
        if end.kind is EndKind.ABORTED:
            received = EndKind.FINISHED if end.error is None else EndKind.UNPARSED
            end = msgspec.structs.replace(end, kind=received if body else EndKind.BROKEN)
        if end.kind is not EndKind.FINISHED:
            return end
        if self._reply.unreadable and not (self._exchange.encoder.verbatim and _is_object(body)):  # a page of HTML, or half a reply
            return End(EndKind.UNPARSED, error=EngineError("the engine's reply cannot be read"))
        self._as_events = self._chat.stream and not (self._streams or self._orphaned)
        write = self._response.as_events if self._as_events else self._response.as_body
        try:
            self._written = write(body, self._reply)
        except Exception as why:  # noqa: BLE001 - the reply is recorded even if it cannot be written for the client
            return msgspec.structs.replace(end, error=why)
        return end

    async def answer(self, end: End) -> web.StreamResponse:
        """See `ReplyDelivery.answer`."""
        if self._chat.stream:
            await self._response.end_keep_alive()
        if end.kind is EndKind.REFUSED:
            return await self._refuse(end)
        if self._written is None:  # the engine broke it off: a direct client would see the same
            self._response.break_off()
            return web.Response()
        if self._as_events:
            return await self._response.finish(self._written)
        if not may_answer_with_status(self._response.client.state):
            return await self._response.fail(HTTPStatus.BAD_GATEWAY, "the engine did not stream its reply")
        return whole_response(self._answer, self._written, made=self._in_stream)

    @property
    def _in_stream(self) -> bool:
        """Whether the engine's answer is a stream."""
        return self._answer.content_type == EVENT_STREAM

    async def _refuse(self, end: End) -> web.StreamResponse:
        """Send an engine's error, in the client's dialect."""
        words = error_text(end.body, self._answer)
        if not may_answer_with_status(self._response.client.state):
            return await self._response.fail(end.status, parse_engine_error(end.status, words)[0])
        body = self._exchange.dialect.engine_error(end.status, words)
        response = whole_response(self._answer, body, made=body is not words or self._in_stream)
        if self._in_stream:
            response.set_status(end.status)
        return response


class StreamDelivery(ReplyDelivery):
    """Forwards a stream."""

    __slots__ = (
        "_as_is", "_direct", "_encoder", "_held", "_late", "_made", "_needs_from", "_pending", "_source", "_token_ids", "_unread",
        "_write_unread",
    )  # fmt: skip

    def __init__(self, source: Stream, *prepared: Any, needs_from: int | None, may_resample: bool) -> None:
        """Prepare to deliver.

        Args:
            source: the reply.
            prepared: see `ReplyDelivery`.
            needs_from: the first message of the request that is still needed once the client receives the reply; `None` if all of the
                request is. From then on the call is not made again.
            may_resample: see `ReplyDelivery`.
        """
        super().__init__(source, *prepared, may_resample=may_resample)
        self._source, self._needs_from = source, needs_from
        source.settle = self._pass_directly
        self._encoder, self._token_ids = self._exchange.encoder, self._exchange.token_ids
        self._as_is = self._encoder.verbatim
        self._held = bytearray()  # what waits for the store
        self._pending: tuple[tuple[bytes, bytes], ...] = ()  # chunks that wait for the first sampled token
        self._late: list[bytes] | None = None  # chunks from the first finish reason on, if they get token ids: these wait for the usage
        self._made = source.read_chunk is not None  # a chunk for the client is not the engine's own
        self._write_unread = None if self._token_ids or self._made else self._encoder.chunk_unparsed
        self._unread: Callable[[bytes], bytes | None] | None = None  # the same while events can be parsed later
        self._direct: asyncio.WriteTransport | None = None  # to the client, once the head and a first event were written

    def decided(self, end: End) -> End:
        """See `ReplyDelivery.decided`."""
        status, error = self._reply.refusal, self._reply.error
        if self._shown.state is ShownState.WITHHELD and self._is_overflow(status, error):
            return _as_overflow(refusal(status, error))
        if self._response.gone and end.mark != TurnMark.INTERNAL_ERROR:
            end = _LEFT
        if end.kind is EndKind.ABORTED:
            if self._may_resample and may_resample(self._shown.state):
                return end
            end = msgspec.structs.replace(end, kind=EndKind.BROKEN if end.mark else EndKind.FINISHED)
        self._held += self._release() + self._rest()
        return end

    async def receive(self) -> End:
        """See `ReplyDelivery.receive`: forwards the stream as it arrives, up to what must wait for the store."""
        response = await self._response.open_like(self._answer)
        self._answer.headers = _NOT_NEEDED  # the client has them
        chunked = response.headers.get("Transfer-Encoding") == "chunked"
        parts = aiter(self._source)
        try:
            writer = await response.prepare(self._response.request)  # prepared already, unless the client had left: returns the writer
            assert writer is not None  # noqa: S101 - only a response that has ended has none
            async for events in parts:
                shown = self._read_events(events)
                del events  # see `Stream.__aiter__`; the same for `shown`
                if shown and not self._orphaned:
                    self._response.silent = False
                    await writer.write(shown)
                    self._direct = self._response.request.transport if chunked else None
                del shown
        except ConnectionResetError:  # the client's: the source notes that its connection broke
            return _LEFT
        except Exception as why:  # a codec cannot write it; the sampled tokens are recorded in any case
            log.exception("the reply cannot be written in the client's dialect")
            return End(EndKind.BROKEN, f"{type(why).__name__}: {why}", TurnMark.INTERNAL_ERROR, cut=True)
        finally:
            await parts.aclose()
        return self._source.end

    async def answer(self, end: End) -> web.StreamResponse:
        """See `ReplyDelivery.answer`."""
        rest, cut = bytes(self._held), end.cut
        complete = self._source.done or self._reply.finished or bool(self._reply.error)
        if end.mark == TurnMark.UPSTREAM_BROKE and not complete:
            rest += self._encoder.error(HTTPStatus.BAD_GATEWAY, ENDED_EARLY)  # the stream must not look complete
            cut = False
        elif self._as_is and not self._source.done and not cut:
            rest += self._source.rest
        return await self._response.finish(rest, cut=cut)

    def _encode(self, event: bytes, data: bytes) -> bytes:
        """Return the client's bytes of a chunk, unless it gets token ids when the reply is complete."""
        if self._token_ids and (self._late is not None or _FINISH in data):
            self._late = self._late or []  # a list: of several choices one may end long before the others
            self._late.append(data)
            return b""
        return self._encoder.chunk(event, data, self._reply.prompt.tokens)

    def _rest(self) -> bytes:
        """Return what waited for the end of the stream."""
        if not self._late:
            return self._encoder.rest()
        late, self._late = [self._response.with_token_ids(data, self._reply) for data in self._late], None
        count = self._reply.prompt.tokens
        return b"".join([*[self._encoder.chunk(event_of(data), data, count) for data in late], self._encoder.rest()])

    def _pass_directly(self, event: bytes) -> bool:
        """Forward an event that can be parsed later; false if it must be parsed now, or if the client is slow."""
        direct, unread = self._direct, self._unread
        if unread is None or direct is None or direct.is_closing() or direct.get_write_buffer_size() > _MAX_UNSENT:
            return False
        shown = unread(event)
        if shown is None:
            return False
        reply = self._reply
        reply.later.append(event[event.find(CHOICE_BEGIN) : CHOICE_END])
        if len(reply.later) >= AT_ONCE:
            reply.read_later()
        if shown and self._response.client.state is not ClientState.ORPHANED:
            self._response.silent = False
            direct.write(b"%x\r\n%b\r\n" % (len(shown), shown))  # as `StreamResponse.write` would
        return True

    def _read_events(self, events: Iterable[bytes]) -> bytes:
        """Return the bytes of some events that the client receives now; keep the bytes that must wait."""
        shown = bytearray()
        for event in events:
            written = self._unread(event) if self._unread is not None else None
            if written is not None:
                self._reply.later.append(event[event.find(CHOICE_BEGIN) : CHOICE_END])
            else:
                written = self._read_event(event)
                self._unread = self._write_unread if self._shown.state is ShownState.BEGUN and not self._source.cut else None
            (self._held if self._shown.state is ShownState.ENDING else shown).extend(written)
        if len(self._reply.later) >= AT_ONCE:
            self._reply.read_later()
        return bytes(shown)

    def _read_event(self, event: bytes) -> bytes:
        """Read one event, and return the client's bytes of it."""
        ended = self._source.done
        data = self._source.read(event)
        if self._shown.state is ShownState.WITHHELD or ended:
            return b""
        if data is None:
            return event if self._as_is else b""  # a comment of the engine, for direct clients
        if _ERROR in data and self._reply.error:
            data = error_text(data, self._answer)
            event = event_of(data)
        if data == DONE:
            written = self._release()
            self._finish()
            return written + self._rest() + self._encoder.end()
        return self._read_chunk(event_of(data) if self._source.cut or self._made else event, data) if data else b""

    def _read_chunk(self, event: bytes, data: bytes) -> bytes:
        if self._shown.state is not ShownState.NOTHING:
            written = self._encode(event, data)
        else:
            self._pending += ((event, data),)
            if self._source.cut or not (self._reply.begun or self._reply.error):
                return b""  # nothing was sampled yet, or the engine broke it off at once: the call can still be made again
            written = self._withhold_or_release()
        if self._shown.state is ShownState.BEGUN and not self._source.cut and (self._reply.finished or self._reply.error):
            self._shown.advance(ShownEvent.FINISH)
        return written

    def _withhold_or_release(self) -> bytes:
        aborted = self._reply.aborted and self._may_resample
        if aborted or self._is_overflow(self._reply.refusal, self._reply.error):
            self._shown.advance(ShownEvent.WITHHOLD)
        return self._release()

    def _release(self) -> bytes:
        """Return the chunks that waited for the first sampled token, unless the reply is withheld."""
        if self._shown.state is ShownState.NOTHING:
            self._shown.advance(ShownEvent.SHOW)
            if self._needs_from is not None:
                self._response.release_body(self._needs_from)
            pending, self._pending = self._pending, ()  # the echo of the prompt is in one
            return b"".join([self._encode(*chunk) for chunk in pending])
        return b""

    def _finish(self) -> None:
        """From here on, everything waits for the store."""
        if self._shown.state is ShownState.BEGUN:
            self._shown.advance(ShownEvent.FINISH)


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def delivery_of(
    answer: Answer,
    reply: Reply,
    call: BegunCall,
    dispatch: Dispatch,
    response: Response,
    *,
    shown: Party[ShownState, ShownEvent],
    may_resample: bool,
) -> StreamDelivery | WholeDelivery:
    """Choose how an engine's answer is read into a new reply, and how the client receives it."""
    dispatch.begin_reply(reply, answer)
    planned, chat, streams = dispatch.planned, call.chat, False
    source: WholeSource | Stream
    if answer.status != OK or answer.content_type != EVENT_STREAM:
        source = Body(answer, reply, chat, dispatch, response.holding)
        streams = dispatch.sender.streams and not planned.whole
    elif planned.continues is None:
        source = Stream(answer, reply, with_prompt=chat.shows_ids, read_chunk=dispatch.sender.request.read_chunk)
    else:
        words = not planned.gathers
        asked = {"with_prompt": chat.shows_ids and words, "with_words": words}
        stream = Continued(answer, reply, call, dispatch, planned.continues, response=response, **asked)
        source = stream if words else Gathered(stream, call, dispatch, response.holding)
    deliver = response, answer, planned.engine.driver, shown
    if isinstance(source, Stream):
        # the next piece or the record needs the whole request, or it is a text completion's, which has no messages
        stays = isinstance(source, Continued) or bool(chat.media) or not chat.raw_messages
        return StreamDelivery(source, *deliver, needs_from=None if stays else planned.plan.basis.messages, may_resample=may_resample)
    return WholeDelivery(source, *deliver, streams=streams, may_resample=may_resample)
