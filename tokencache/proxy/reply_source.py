"""Reads the reply of an engine from its answer to its end.

A source adds what it reads to its `reply`. When it has ended, its `end` says how:

`Body`        a whole reply; if the engine's route does not parse, a second request makes the chat completion
`Stream`      a streamed reply
`Continued`   a streamed reply that the requests of `continuation` continue as often as the engine breaks it off
`gathered_reply.Gathered`  a whole reply that is made of a stream
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial

import aiohttp
import msgspec

from tokencache import metrics
from tokencache.core.incidents import IncidentKind
from tokencache.core.turn import TurnMark
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.sse import DONE, EventSplitter, data_of, event_of
from tokencache.engine.chunks import split_cut
from tokencache.engine.connections import Answer
from tokencache.engine.derender import Derender
from tokencache.engine.drivers.base import ParsedCompletion, StreamChunk
from tokencache.engine.reply import WEIGHT_VERSION_HEADER, Reply
from tokencache.engine.stream_protocol import StreamProtocol
from tokencache.errors import OK, EngineError, MemoryFullError, UnexpectedAnswerError, is_error, is_success
from tokencache.pauses import LARGE, pause
from tokencache.proxy.continuation import Continuation, ContinuationError
from tokencache.proxy.dispatch import Dispatch
from tokencache.proxy.facts import BegunCall, EndedPiece
from tokencache.proxy.response import Response
from tokencache.request_memory import Holding

log = logging.getLogger(__name__)

ENDED_EARLY = "the engine's stream ended before the reply did"


class EndKind(StrEnum):
    """How the reply of an engine ended."""

    FINISHED = "finished"
    """As the engine ended it: complete, or with an error event."""
    REFUSED = "refused"
    """The engine's answer is an error, and nothing was sampled."""
    OVERFLOW = "overflow"
    """The prompt is too long, and the client gets an empty reply for that (`generated_replies`)."""
    ABORTED = "aborted"
    """The engine aborted it, or broke it off before it had sampled. If the client received nothing of it, the call may be made again."""
    BROKEN = "broken"
    """It is incomplete."""
    UNPARSED = "unparsed"
    """Tokens were sampled, but their text is not available."""


class End(msgspec.Struct, frozen=True):
    """The end of a reply.

    Attributes:
        kind: how it ended.
        detail: the same in words, for the record.
        mark: the mark of its turns (`CallFacts.mark`); `""` if they are complete as far as the engine is concerned.
        incident: the incident with which the call ends if there is no turn to record; otherwise `None`.
        error: what the client receives in place of the reply; `None` if it receives the reply.
        cut: whether the connection to the engine broke, and not only the reply.
        status: the engine's HTTP status, if it is not that of a reply.
        body: of a refusal: the engine's error.
    """

    kind: EndKind
    detail: str = ""
    mark: str = ""
    incident: IncidentKind | None = None
    error: Exception | None = None
    cut: bool = False
    status: int = 0
    body: bytes = b""


def refusal(status: int, body: bytes) -> End:
    """Return the end of a call that an engine refused."""
    detail = f"{status}: {body[:300].decode(errors='replace')}"
    return End(EndKind.REFUSED, detail, incident=IncidentKind.ENGINE_REFUSED, status=status, body=body)


class ReplySource:
    """A source of a reply. This one has nothing: no engine has answered.

    Attributes:
        reply: what was read of the reply.
        end: how it ended; known when it was read.
        pieces: the pieces that have ended, of a reply that an engine broke off.
        gave_up: why a reply that was broken off is not continued; `""` if none was, or it is.
    """

    __slots__ = ("end", "gave_up", "pieces", "reply")

    end: End

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.pieces: Sequence[EndedPiece] = ()
        self.gave_up = ""

    async def read_for_record(self) -> None:
        """Add what is still missing in the record, because the client left while the reply was read."""


class WholeSource(ReplySource, ABC):
    """A source of one whole reply."""

    __slots__ = ()

    @abstractmethod
    async def read(self) -> bytes:
        """Return the chat or text completion (JSON) for the client; `b""` if there is none."""


class Body(WholeSource):
    """A whole reply, or an engine's error."""

    __slots__ = ("_answer", "_body", "_chat", "_dispatch", "_holding", "_parsing")

    def __init__(self, answer: Answer, reply: Reply, chat: ChatCall, dispatch: Dispatch, holding: Holding) -> None:
        super().__init__(reply)
        self._answer, self._chat, self._dispatch, self._holding = answer, chat, dispatch, holding
        self._parsing: asyncio.Future[ParsedCompletion] | None = None
        self._body = b""  # a long one whose ids are read ahead

    async def read(self) -> bytes:
        """See `WholeSource.read`; without long arrays that the client did not request."""
        answer = self._answer
        try:
            body = await answer.read(partial(self._holding.take, "reply"))
        except MemoryFullError as why:
            kind = IncidentKind.REPLY_NOT_READ if is_success(answer.status) else IncidentKind.ENGINE_REFUSED
            self.end = End(EndKind.BROKEN, str(why), incident=kind, error=why, status=answer.status)
            return b""
        except (aiohttp.ClientError, TimeoutError) as why:
            self.end = End(EndKind.BROKEN, f"{type(why).__name__}: {why}", incident=IncidentKind.UPSTREAM_BROKE)
            return b""
        if answer.status != OK:
            self.end = self._no_reply(answer.status, body)
            return b""
        parse = self._dispatch.sender.request.parse
        if parse is None:
            if len(body) > LARGE:
                self._body = body
                await self.reply.prompt.read_ahead(body)
                await pause()
                self._body = b""
            return self._take(body)
        self._parsing = asyncio.ensure_future(parse(body))
        return self._take_parsed(await asyncio.shield(self._parsing))

    async def read_for_record(self) -> None:
        """See `ReplySource.read_for_record`."""
        if self._body:
            self._take(self._body)
        if self._parsing is not None:
            self._take_parsed(await self._parsing)

    def _take_parsed(self, parsed: ParsedCompletion) -> bytes:
        body = self._take(parsed.body)
        self.reply.places = parsed.places
        if parsed.error:
            kind = EndKind.UNPARSED if self.end.kind is EndKind.FINISHED else self.end.kind
            self.end = End(kind, parsed.error, error=EngineError(parsed.error))
        return body

    def _take(self, body: bytes) -> bytes:
        body = self._dispatch.planned.engine.driver.read(self.reply.without_experts(body))
        brief = self.reply.add(body, hide_logprobs=not self._chat.shows_logprobs)
        self.end = End(EndKind.ABORTED if self.reply.aborted else EndKind.FINISHED)
        return body if self._chat.shows_ids else brief

    def _no_reply(self, status: int, body: bytes) -> End:
        if is_error(status):
            return refusal(status, body)
        unexpected = UnexpectedAnswerError(status)
        sampled = is_success(status) and bool(body)  # its body may hold sampled tokens
        kind = IncidentKind.UPSTREAM_BROKE if sampled else IncidentKind.ENGINE_REFUSED
        return End(EndKind.BROKEN, str(unexpected), incident=kind, error=unexpected, status=status)


class Stream(ReplySource):
    """A streamed reply: an asynchronous iterator of the events that arrive together.

    Attributes:
        cut: how the engine broke off a reply that may be continued (`core.turn.ReplyPiece.ended`); otherwise `""`.
        done: whether the engine sent the end of its stream.
        head: the first chunk (JSON), if the reply may be continued; otherwise `b""`.
        read_chunk: makes chunks in vLLM's format (`EngineRequest.read_chunk`); `None` if they are in it.
    """

    __slots__ = ("_answer", "_splitter", "_with_prompt", "cut", "done", "head", "read_chunk", "settle")

    _may_be_continued = False

    def __init__(
        self, answer: Answer, reply: Reply, *, with_prompt: bool, read_chunk: Callable[[bytes], StreamChunk] | None = None
    ) -> None:
        """Prepare to read a stream.

        Args:
            answer: the engine's answer.
            reply: receives what is read.
            with_prompt: whether chunks keep the ids of the prompt.
            read_chunk: see the attribute.
        """
        super().__init__(reply)
        self._answer, self._with_prompt, self.read_chunk = answer, with_prompt, read_chunk
        self._splitter = EventSplitter()
        self.cut, self.done, self.head = "", False, b""
        self.settle: Callable[[bytes], bool] = lambda _event: False
        """Takes an event that need not be parsed now (`StreamProtocol`)."""

    @property
    def rest(self) -> bytes:
        """The bytes of an incomplete event at the end."""
        return self._splitter.rest

    async def __aiter__(self) -> AsyncGenerator[Iterable[bytes], None]:
        """Read the stream to its end; yields events."""
        lost = ""
        try:
            with StreamProtocol(self._answer, self.settle) as stream:
                while True:
                    if (arrival := stream.arrival()) is not None:
                        await arrival
                        del arrival
                    if not (data := await stream.next()):
                        break
                    arrived = self._splitter.feed(data)
                    for event in arrived:
                        if len(event) > LARGE:
                            await self.reply.prompt.read_ahead(event)
                    event = b""
                    del data  # what this frame names, it keeps until the next event: the echo of a prompt, for as long as the stream
                    yield arrived
                    del arrived
        except (aiohttp.ClientError, ConnectionResetError, TimeoutError) as why:
            lost = f"{type(why).__name__}: {why}"
        self.end = self._ending(lost)
        if (more := self._continuation()) is not None:
            async with contextlib.aclosing(more):
                async for events in more:
                    yield events

    def _continuation(self) -> AsyncGenerator[Iterable[bytes], None] | None:
        """Return the events of what continues the stream; `None` if nothing does."""
        return None

    def _ending(self, lost: str = "") -> End:
        """Return how the reply ended; `lost` is why the connection broke, `""` if it did not."""
        if lost:
            return End(EndKind.BROKEN, lost, TurnMark.UPSTREAM_BROKE, cut=True)
        if self.reply.aborted:
            return End(EndKind.ABORTED)
        if self.reply.finished or self.reply.error:
            return End(EndKind.FINISHED)
        return End(EndKind.BROKEN, ENDED_EARLY, TurnMark.UPSTREAM_BROKE)

    def read(self, event: bytes) -> bytes | None:
        """Add an event to the reply.

        Returns:
            Its data for the client: the JSON of a chunk, `DONE`, or `b""` if the client gets nothing of it. `None` if it has none, as a
            comment.
        """
        data = data_of(event)
        if data is None:
            return None
        if self.done:
            return b""  # what follows the end is not part of the reply
        if data == DONE:
            self.done = True
            return data
        counted = None
        if self.read_chunk is not None:
            data, counted = self.read_chunk(data)
        data = self.reply.without_experts(data)
        brief = self.reply.add(data)
        if counted is not None:
            self.reply.prompt_counted = counted
        if self._may_be_continued:
            self.head = self.head or brief
        return data if self._with_prompt else brief


class Continued(Stream):
    """A streamed reply that may be continued."""

    __slots__ = ("_call", "_cut_off", "_dispatch", "_response", "_with_words", "derender")

    _may_be_continued = True

    def __init__(
        self,
        answer: Answer,
        reply: Reply,
        call: BegunCall,
        dispatch: Dispatch,
        derender: Derender,
        *,
        response: Response,
        with_prompt: bool,
        with_words: bool,
    ) -> None:
        """Prepare to read a stream.

        Args:
            answer: the engine's answer.
            reply: receives what is read.
            call: the call.
            dispatch: requests the next pieces.
            derender: makes their words.
            response: the response to the client, which may leave.
            with_prompt: see `Stream`.
            with_words: whether the chunks of the pieces have words.
        """
        super().__init__(answer, reply, with_prompt=with_prompt)
        self._call, self._dispatch, self._response, self._with_words = call, dispatch, response, with_words
        self.derender = derender
        self.pieces: list[EndedPiece] = []
        self._cut_off: list[bytes] = []  # the data of the events with which a reply that was broken off ended

    def _continuation(self) -> AsyncGenerator[Iterable[bytes], None] | None:
        if not (self.cut or self.done or self.reply.finished or self.reply.error) and not self._response.gone:
            if any(choice.ids for choice in self.reply.choices.values()):
                self.cut = "lost"
            else:
                self.end = msgspec.structs.replace(self.end, kind=EndKind.ABORTED)  # nothing was sampled, as far as is known
        return self._continue() if self.cut else None

    async def _continue(self) -> AsyncGenerator[Iterable[bytes], None]:
        """Continue the reply; yields events. If that is not possible, the reply ends as the engine ended it."""
        try:
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for chunk in pieces:
                    yield (event_of(chunk),)
        except (ContinuationError, EngineError) as why:
            log.warning("session %s call %s: the reply cannot be continued: %s", self._call.session, self._call.id, why)
            self.gave_up = str(why)
            self.cut = ""
            yield map(event_of, self._cut_off)
            self.end = self._ending(self.end.detail if self.end.cut else "")

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        """Continue the reply as often as needed; yields chunks (JSON).

        Raises:
            ContinuationError, EngineError: it cannot be continued.
        """
        call, reply, dispatch = self._call, self.reply, self._dispatch
        continuation = Continuation(call.chat, reply, self.derender, self.head, self.pieces)
        while self.cut:
            await dispatch.planned.weights.end()
            continuation.end_piece(dispatch.planned, dispatch.sender.posted, self.cut)
            log.info("session %s call %s: the reply was broken off (%s), and is continued", call.session, call.id, self.cut)
            metrics.CONTINUED.labels(self.cut).inc()
            continuation.check()
            answer = await dispatch.next_piece(continuation)
            try:
                reply.reopen()
                reply.version = answer.headers.get(WEIGHT_VERSION_HEADER, "") if answer is not None else ""
                self.cut, self._cut_off, self.end = "", [], self._ending()
                request = dispatch.derender_request(reply.prompt.raw)
                chunks = continuation.chunks(answer, request) if self._with_words else continuation.chunks_without_words(answer)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
            finally:
                if answer is not None:
                    answer.close()
            if self._with_words:
                reply.trust_count()  # `chunks` compares the engine's
            self.cut = self.cut or continuation.broke or ("" if reply.finished else "lost")
        self.end = End(EndKind.FINISHED)
        if continuation.differs:
            call.note(IncidentKind.WORDS_DIFFER, "the client received words that are not those of the reply's tokens")

    def read(self, event: bytes) -> bytes | None:
        """See `Stream.read`. Of a chunk with which the engine broke the reply off, the client receives the tokens at most."""
        if self.cut or self.gave_up:
            return self._read_end(event)
        chunk = super().read(event)
        if not chunk or chunk == DONE or not (cut := self.reply.cut):
            return chunk
        self.cut = cut
        self.reply.take_back_message(chunk)
        tokens, end = split_cut(chunk)
        self._cut_off.append(end)
        return tokens

    def _read_end(self, event: bytes) -> bytes | None:
        """Keep an event that follows the cut; after the reply was given up, return what was kept."""
        data = data_of(event)
        if data is None:
            return None
        if data == DONE and self.gave_up:
            self.done = True
        elif self.gave_up:
            self.reply.give_back_message(data)
        else:
            self._cut_off.append(data)
            if data != DONE:
                self.reply.add_after_end(data)
            return b""
        return data
