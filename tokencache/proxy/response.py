"""Sends the reply to a model call to its client: as a stream, as a whole body, or as an error.

Three classes share the work:

`Exchange`  contains how one call is written for the engine and its reply for the client (only data)
`Response`  is the HTTP response to one client request; it may begin with keep-alive events before any engine has answered
`ReplyForwarder`  decides which parts of one engine reply the client receives, and when

A stream is forwarded as it arrives, up to the event that finishes its last choice. That event and everything after it wait until the turn
is stored. Nothing is sent before the first sampled token, because until then the call can be made again. If the client requested a stream
and the engine does not stream, the whole reply is sent in chunks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tokencache.core.turn import TurnMark
from tokencache.dialects import gym
from tokencache.dialects.base import EVENT_STREAM, ReplyEncoder
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.sse import DONE, EventSplitter, data_of, event_of
from tokencache.engine.chunks import as_chunks, split_cut
from tokencache.engine.drivers.base import Driver
from tokencache.engine.figures import certain_choices
from tokencache.engine.images import PLACES_HEADER
from tokencache.engine.prefixes import MISS_HEADER, PROMPT_HEADER
from tokencache.engine.reply import Reply
from tokencache.engine.stream_protocol import StreamProtocol
from tokencache.net import end_to_end_headers
from tokencache.proxy.recorder import ABORTED, BROKE
from tokencache.request_memory import Holding, holding_of
from tokencache.wakeup import end

log = logging.getLogger(__name__)

CLIENT_LEFT = "the client closed the connection"
_PLUGIN_HEADERS = frozenset({PLACES_HEADER, "x-tokencache-plugin", PROMPT_HEADER, MISS_HEADER})
"""Headers that the plugin adds to answers. They are not for clients."""
_BAD_GATEWAY = 502
_MAX_UNSENT = 64 * 1024
"""Bytes that may wait for a slow client before the engine must wait too; aiohttp has the same limit."""
_DATA = slice(len(b"data: "), -len(b"\n\n"))
"""The JSON in an event that contains only one line of data."""
_NO_KEEP_ALIVE = contextlib.nullcontext()
_FINISH = b'"finish_reason":"'

Broken = tuple[str, str]
"""Why a reply was cut off: a `TurnMark`, and the detail in words."""


class Exchange(NamedTuple):
    """How one call is written for the engine, and how its reply is written for the client.

    Attributes:
        path: path and query of the engine's route.
        headers: headers for the engine.
        encoder: writes the reply in the client's dialect.
        keep_alive: seconds for which a stream may be silent.
        refuse: writes an engine's error (status, body) in the client's dialect; `None` if the client receives the engine's own bytes.
        media_type: content type of a streamed reply.
        token_ids: whether messages of the reply contain their token ids (`dialects.gym`).
        encoder_for: makes an encoder for another handle; `None` if the dialect has no handles.
        body: the engine's request body; `None` if the driver writes it.
    """

    path: str
    headers: CIMultiDict[str]
    encoder: ReplyEncoder
    keep_alive: float
    refuse: Callable[[int, bytes], bytes] | None = None
    media_type: str = EVENT_STREAM
    token_ids: bool = False
    encoder_for: Callable[[str], Awaitable[ReplyEncoder]] | None = None
    body: bytes | None = None


class KeepAlive:
    """Calls `send` every `seconds` while the context is open, until `send` raises `ConnectionError`. A context is entered only once.

    Clients, and proxies in front of them, close silent connections. Nearly every wait ends before the first interval. Until then there is
    only a timer, because creating and cancelling a task costs about 20 µs per streamed call.
    """

    def __init__(self, seconds: float, send: Callable[[], Awaitable[Any]]) -> None:
        self._seconds, self._send = seconds, send
        self._timer: asyncio.TimerHandle
        self._task: asyncio.Task[None] | None = None
        self.active = False

    async def __aenter__(self) -> None:
        """Start the timer."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._start)
        self.active = True

    async def __aexit__(self, *_: object) -> None:
        """Stop, and cancel an event that is being sent."""
        self.active = False
        self._timer.cancel()
        del self._send  # usually a bound method of this object's owner: the reference cycle would keep a request in memory
        task, self._task = self._task, None
        if task is not None:
            await end(task)

    def _start(self) -> None:
        self._task = asyncio.create_task(self._repeat(self._send))

    async def _repeat(self, send: Callable[[], Awaitable[Any]]) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await send()
                await asyncio.sleep(self._seconds)


class RelayedResponse(web.StreamResponse):
    """A response that is sent with the engine's headers and no others."""

    given: frozenset[str] = frozenset()


class WholeRelayedResponse(RelayedResponse, web.Response):
    """A relayed response with a whole body. Head and body are sent in one write, so the client wakes up once."""


def open_response(answer: aiohttp.ClientResponse, *, drop: frozenset[str] = frozenset()) -> RelayedResponse:
    """Make a response with the engine's status, reason and headers; `drop` names headers to leave out, in lower case."""
    headers = end_to_end_headers(answer.headers, drop=drop)
    response = RelayedResponse(status=answer.status, reason=answer.reason, headers=headers)
    response.given = frozenset(name.lower() for name in headers)
    return response


def whole_response(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    """Make a response with the engine's status, reason and headers, and this body."""
    headers = end_to_end_headers(answer.headers, drop=_PLUGIN_HEADERS | {"content-length"})
    response = WholeRelayedResponse(status=answer.status, reason=answer.reason, headers=headers, body=body)
    response.given = frozenset(name.lower() for name in headers)
    return response


async def keep_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Remove headers that aiohttp adds to an engine's response (a handler for `on_response_prepare`)."""
    if isinstance(response, RelayedResponse):
        for name in ("Content-Type", "Server"):
            if name.lower() not in response.given:
                response.headers.popall(name, None)


class Response:
    """The response to one client request.

    Attributes:
        opened: the response after its head was sent, before that `None`. Later errors are sent within the stream.
    """

    def __init__(self, request: web.Request, chat: ChatCall, exchange: Exchange) -> None:
        self.request, self.chat, self.exchange = request, chat, exchange
        self.opened: web.StreamResponse | None = None
        self._keep_alive: KeepAlive | None = None

    @property
    def holding(self) -> Holding:
        """What the request holds in memory."""
        return holding_of(self.request)

    @property
    def disconnected(self) -> bool:
        """Whether the client has closed the connection."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def keep_alive(self) -> AbstractAsyncContextManager[None]:
        """Send keep-alive events while the context is open, if the client requested a stream."""
        if not self.chat.stream or (self._keep_alive is not None and self._keep_alive.active):
            return _NO_KEEP_ALIVE
        self._keep_alive = KeepAlive(self.exchange.keep_alive, self._send_keep_alive)
        return self._keep_alive

    async def _send_keep_alive(self) -> None:
        await (await self.open()).write(self.exchange.encoder.keep_alive())

    async def open(self) -> web.StreamResponse:
        """Send the head of a streamed response, unless it was sent."""
        if self.opened is None:
            headers = {"Content-Type": self.exchange.media_type, "Cache-Control": "no-cache"}
            await self._send_head(web.StreamResponse(headers=headers))
        assert self.opened is not None  # noqa: S101 - `_send_head` sets it
        return self.opened

    async def open_like(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send the engine's head, unless a head was sent."""
        if self.opened is None:
            response = open_response(answer, drop=_PLUGIN_HEADERS | {"content-length"})
            if self.exchange.media_type != EVENT_STREAM:
                response.headers["Content-Type"] = self.exchange.media_type
            await self._send_head(response)
        assert self.opened is not None  # noqa: S101 - `_send_head` sets it
        return self.opened

    async def _send_head(self, response: web.StreamResponse) -> None:
        with contextlib.suppress(ConnectionError):  # the client may have left: the next write finds out
            await response.prepare(self.request)
        self.opened = response

    async def fail(self, status: int, message: str) -> web.StreamResponse:
        """End an opened response with an error, in the client's dialect."""
        return await self.finish(self.exchange.encoder.error(status, message))

    async def finish(self, rest: bytes, *, cut: bool = False) -> web.StreamResponse:
        """Send the rest of a stream and end it; with `cut`, close the connection instead of ending it properly."""
        response = await self.open()
        with contextlib.suppress(ConnectionError):  # the client may still leave; its turn is recorded
            if cut:
                await response.write(rest)
            else:
                await response.write_eof(rest)  # one write, so the client wakes up once
        if cut:
            self.break_off()
        return response

    def break_off(self) -> None:
        """Close the connection, because the engine did: a direct client would see the same."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def send(self, body: bytes, reply: Reply, prompt_tokens: int = 0) -> web.StreamResponse:
        """Send a chat completion that was not just made by an engine, as a body or as a stream.

        Args:
            body: the chat completion, JSON.
            reply: the engine's reply, for its token ids; empty if there is none.
            prompt_tokens: the number of tokens in the prompt, for dialects that report it.
        """
        if self.chat.stream:
            return await self.finish(self.as_events(body, reply, prompt_tokens))
        return web.Response(body=self.as_body(body, reply), content_type="application/json")

    def as_body(self, body: bytes, reply: Reply) -> bytes:
        """Write a whole chat completion as a body in the client's dialect."""
        return self.exchange.encoder.whole(self.with_token_ids(body, reply))

    def as_events(self, body: bytes, reply: Reply, prompt_tokens: int = 0) -> bytes:
        """Write a whole chat completion as a stream in the client's dialect; write an error if it is not a chat completion."""
        encoder, counted = self.exchange.encoder, prompt_tokens or self.prompt_tokens(reply)
        try:
            chunks = [self.with_token_ids(chunk, reply) for chunk in as_chunks(body, self.chat.fields)]
        except ValueError as why:
            return encoder.error(_BAD_GATEWAY, str(why))
        return b"".join([*[encoder.chunk(event_of(chunk), chunk, counted) for chunk in chunks], encoder.end()])

    def with_token_ids(self, data: bytes, reply: Reply) -> bytes:
        """Add token ids to the messages of a chunk or a body, if this client receives them."""
        return gym.with_tokens(data, reply.prompt.raw, partial(certain_choices, reply)) if self.exchange.token_ids else data

    def prompt_tokens(self, reply: Reply) -> int:
        """Count the prompt's tokens, for dialects that report them; 0 for chat, where the engine's own bytes contain the count."""
        return 0 if self.exchange.refuse is None else reply.prompt.tokens


class Progress(Protocol):
    """The state of a call, as a delivery reads and changes it."""

    @property
    def orphaned(self) -> bool:
        """Whether the client has left, but the reply is still read to its end."""

    def show(self) -> None:
        """Note that the client now receives a part of the reply, so that the call cannot be made again."""


class ReplyForwarder:
    """Forwards one engine reply to the client.

    Attributes:
        ended: whether the engine sent the end of its stream.
        cut: how the engine broke the reply off (`core.turn.ReplyPiece.ended`), if the reply may be continued; otherwise `""`.
        withheld: why the client receives nothing of this reply. `aborted`: the engine aborted it before any of it was sent, and the call
            may be made again. `overflow`: the prompt is too long, and the client receives an empty reply. Otherwise `""`.
    """

    def __init__(
        self,
        response: Response,
        reply: Reply,
        driver: Driver,
        progress: Progress,
        *,
        may_resample: bool,
        may_continue: bool,
        arrives_whole: bool = False,
    ) -> None:
        self._response, self._reply, self._driver, self._progress = response, reply, driver, progress
        self._chat, self._encoder, self._token_ids = response.chat, response.exchange.encoder, response.exchange.token_ids
        self._may_resample, self._may_continue = may_resample, may_continue
        self._streams = driver.streams and not arrives_whole
        self._as_is = response.exchange.refuse is None
        self.ended = False
        self.cut = ""
        self.head = b""  # the first chunk
        self._cut_off: list[bytes] = []  # the data of the events with which a reply that was broken off ended
        self.withheld: Literal["", "aborted", "overflow"] = ""
        self._finished = False  # whether the last choice is complete: the rest waits for the store
        self._silent = True  # whether nothing was sent since the last keep-alive interval
        self._pending: list[tuple[bytes, bytes]] | None = []  # chunks that wait for the first sampled token; `None` after it
        self._late: list[bytes] = []  # chunks from the first finish reason on, if they get token ids: these wait for the usage
        self._unread = None if self._token_ids else self._encoder.chunk_unparsed
        self._direct: asyncio.WriteTransport | None = None  # to the client, once the head and a first event were written

    @property
    def client_left(self) -> bool:
        """Whether the client has left and the call must end."""
        return self._response.disconnected and not self._progress.orphaned

    @property
    def sends_as_stream(self) -> bool:
        """Whether a whole reply must be sent as a stream: the client requested a stream, but the engine does not stream this reply."""
        return self._chat.stream and not self._streams and self._chat.dialect != "completions" and not self._progress.orphaned

    def take(self, body: bytes) -> bytes:
        """Read a whole reply.

        Returns:
            The body for the client, without long arrays that it did not request.
        """
        body = self._driver.read(self._reply.without_experts(body))
        brief = self._reply.add(body, hide_logprobs=not self._chat.shows_logprobs)
        self._decide_whether_withheld()
        return body if self._chat.shows_ids else brief

    async def follow(self, answer: aiohttp.ClientResponse) -> tuple[bytes, Broken | None]:
        """Forward a stream as it arrives.

        Returns:
            The part that must wait for the store, and why the stream was cut off (`None` if it was not).
        """
        response = await self._response.open_like(answer)
        async with KeepAlive(self._response.exchange.keep_alive, lambda: self._break_silence(response)):
            return await self._pass_on(answer, response)

    async def _pass_on(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> tuple[bytes, Broken | None]:
        splitter, held = EventSplitter(), bytearray()
        try:
            writer = await response.prepare(self._response.request)  # prepared already: this returns the writer
            assert writer is not None  # noqa: S101 - only a response that has ended has none
            chunked = response.headers.get("Transfer-Encoding") == "chunked"
            with StreamProtocol(answer, self._pass_directly) as stream:
                while data := await stream.next():
                    shown = self._read_events(splitter.feed(data), held)
                    if shown and not self._progress.orphaned:
                        self._silent = False
                        await writer.write(shown)
                        self._direct = self._response.request.transport if chunked else None
        except (aiohttp.ClientError, ConnectionResetError, TimeoutError) as why:
            # aiohttp raises the same errors for a failed read and a failed write.
            broke = (ABORTED, CLIENT_LEFT) if self.client_left else (BROKE, f"{type(why).__name__}: {why}")
            self._note_lost()
        except Exception as why:  # a codec cannot write it; the sampled tokens are recorded in any case
            log.exception("the reply cannot be written in the client's dialect")
            broke = (TurnMark.INTERNAL_ERROR, f"{type(why).__name__}: {why}")
        else:
            self._note_lost()
            if self.cut:
                return b"", None
            return self._release() + bytes(held) + self._rest() + (splitter.rest if self._as_is and not self.ended else b""), None
        return b"" if self.cut else self._release() + bytes(held) + self._rest(), broke

    def _note_lost(self) -> None:
        """Note that the stream ended before the reply did, if the reply may be continued."""
        if not self._may_continue or self.cut or self.client_left:
            return
        sampled = any(choice.ids for choice in self._reply.choices.values())
        if sampled and not self._finished:
            self.cut = "lost"
        elif self._may_resample and self._pending is not None:
            self.withheld = "aborted"  # nothing was sampled, as far as is known

    async def resume(self, chunks: AsyncIterator[bytes]) -> tuple[bytes, Broken | None]:
        """Forward the chunks (JSON) of a continuation as they arrive.

        Returns:
            As `follow`.

        Raises:
            EngineError, ContinuationError: those of the iterator.
        """
        self._reply.reopen()
        self.cut, self._cut_off, self._finished = "", [], False
        response, held = await self._response.open(), bytearray()
        async with KeepAlive(self._response.exchange.keep_alive, lambda: self._break_silence(response)):
            async for chunk in chunks:
                shown = self._read_events([event_of(chunk)], held)
                if shown and not self._progress.orphaned:
                    self._silent = False
                    try:
                        await response.write(shown)
                    except ConnectionResetError:
                        return bytes(held), (ABORTED, CLIENT_LEFT)
        self._reply.trust_count()  # `chunks` compares the engine's
        if not self._finished:
            self.cut = "lost"
        return bytes(held) + self._rest(), None

    def give_up(self) -> bytes:
        """Return the end of a reply that was broken off and is not continued, as the engine sent it."""
        self._may_continue, self._finished = False, bool(self._cut_off)
        self._decide_whether_withheld()
        if self.withheld:
            return b""
        written = [self._release()]
        for data in self._cut_off:
            if data == DONE:
                self.ended = True
                written.append(self._rest() + self._encoder.end())
            else:
                self._reply.give_back_message(data)
                written.append(self._encode(event_of(data), data))
        return b"".join([*written, self._rest()])

    def _encode(self, event: bytes, data: bytes) -> bytes:
        """Return the client's bytes of a chunk, unless it gets token ids when the reply is complete."""
        if self._token_ids and (self._late or _FINISH in data):
            self._late.append(data)
            return b""
        return self._encoder.chunk(event, data, self._response.prompt_tokens(self._reply))

    def _rest(self) -> bytes:
        """Return what waited for the end of the stream."""
        late, self._late = [self._response.with_token_ids(data, self._reply) for data in self._late], []
        count = self._response.prompt_tokens(self._reply)
        return b"".join([*[self._encoder.chunk(event_of(data), data, count) for data in late], self._encoder.rest()])

    def _pass_directly(self, event: bytes) -> bool:
        """Forward an event that can be parsed later; false if it must be parsed now, or if the client is slow."""
        direct = self._direct
        if direct is None or direct.is_closing() or direct.get_write_buffer_size() > _MAX_UNSENT:
            return False
        shown = self._without_reading(event)
        if shown and not self._progress.orphaned:
            self._silent = False
            direct.write(b"%x\r\n%b\r\n" % (len(shown), shown))  # as `StreamResponse.write` would
        return shown is not None

    def _read_events(self, events: Iterable[bytes], held: bytearray) -> bytes:
        """Return the bytes of some events that the client receives now, and add to `held` the bytes that must wait."""
        shown = bytearray()
        for event in events:
            written = self._without_reading(event)
            written = self._read_event(event) if written is None else written
            (held if self._finished else shown).extend(written)
        return bytes(shown)

    def _without_reading(self, event: bytes) -> bytes | None:
        """Return the client's bytes of an event that can be parsed later; `None` if it must be parsed now."""
        if self._unread is None or self._finished or self._pending is not None:
            return None
        shown = self._unread(event)
        if shown is not None:
            self._reply.add_later(event[_DATA])
        return shown

    def _read_event(self, event: bytes) -> bytes:
        """Parse one event, and return the client's bytes of it."""
        data = data_of(event)
        if self.withheld or self.ended:
            return b""  # what follows the end is not part of the reply
        if data is None:
            return event if self._as_is else b""  # a comment of the engine, for direct clients
        if self.cut:
            self._cut_off.append(data)
            if data != DONE:
                self._reply.add_after_end(data)
            return b""
        if data == DONE:
            self._finished = self.ended = True
            return self._release() + self._rest() + self._encoder.end()
        return self._read_chunk(event, self._reply.without_experts(data))

    def _read_chunk(self, event: bytes, data: bytes) -> bytes:
        """Parse one chunk, and return the client's bytes of it."""
        brief = self._reply.add(data)
        self.head = self.head or brief
        if self._may_continue and (cut := self._reply.cut):
            self.cut = cut
            self._reply.take_back_message(brief)  # the client does not receive them from this chunk
            tokens, end = split_cut(brief)
            self._cut_off.append(end)
            return self._show_tokens(tokens)
        self._finished = self._finished or self._reply.finished or bool(self._reply.error)
        chunk = event, data if self._chat.shows_ids else brief
        if self._pending is None:
            return self._encode(*chunk)
        self._pending.append(chunk)
        if not (self._reply.begun or self._reply.error):
            return b""  # nothing was sampled yet, so the call can be made again
        self._decide_whether_withheld()
        return self._release()

    def _show_tokens(self, data: bytes) -> bytes:
        """Return the client's bytes of a chunk that has only ids, or let it wait for the first chunk with words."""
        if not data:
            return b""
        if self._pending is None:
            return self._encode(event_of(data), data)
        self._pending.append((event_of(data), data))
        return b""

    def _release(self) -> bytes:
        """Return the chunks that waited for the first sampled token; `b""` if the reply is withheld."""
        if self.withheld or self._pending is None:
            return b""
        self._progress.show()
        pending, self._pending = self._pending, None
        return b"".join([self._encode(*chunk) for chunk in pending])

    def _decide_whether_withheld(self) -> None:
        if self._pending is not None:
            if self._reply.aborted and self._may_resample:
                self.withheld = "aborted"
            elif self._token_ids and self._driver.is_overflow(self._reply.refusal, self._reply.error):
                self.withheld = "overflow"

    async def _break_silence(self, response: web.StreamResponse) -> None:
        if self._silent:
            await response.write(self._encoder.keep_alive())
        self._silent = True
