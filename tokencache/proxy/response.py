"""Writes the HTTP response to a model call: a stream, a whole body, or an error.

`Exchange`  contains how one call is written for the engine and its reply for the client (only data)
`Response`  is the HTTP response to one client request; it may begin with keep-alive events before any engine has answered

`delivery` decides which parts of an engine's reply the client receives, and when.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from itertools import filterfalse

import msgspec
from aiohttp import HttpVersion10, web
from multidict import CIMultiDict

from tokencache.dialects import gym
from tokencache.dialects.base import Dialect
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.reply_encoder import EVENT_STREAM, ReplyEncoder
from tokencache.dialects.sse import event_of
from tokencache.engine.chunks import as_chunks
from tokencache.engine.connections import Answer
from tokencache.engine.figures import certain_choices
from tokencache.engine.images import PLACES_HEADER
from tokencache.engine.prefixes import MISS_HEADER, PROMPT_HEADER
from tokencache.engine.reply import Reply
from tokencache.net import end_to_end_headers, without_address
from tokencache.proxy.call_states import CLIENT, ClientEvent, ClientState, Party
from tokencache.request_memory import Holding
from tokencache.wakeup import end

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
RETURNED_ID = web.RequestKey("returned_id", str)
"""A client's own id of its request, which comes back with the answer."""
_PLUGIN_HEADERS = frozenset({PLACES_HEADER, "x-tokencache-plugin", PROMPT_HEADER, MISS_HEADER})
"""Headers that the plugin adds to answers. They are not for clients."""


class Exchange(msgspec.Struct, frozen=True):
    """How one call is written for the engine, and how its reply is written for the client.

    Attributes:
        path: path and query of the engine's route.
        headers: headers for the engine.
        dialect: the client's dialect.
        encoder: writes the reply in it.
        keep_alive: seconds for which a stream may be silent.
        media_type: content type of a streamed reply.
        token_ids: whether messages of the reply contain their token ids (`dialects.gym`).
        body: the engine's request body; `b""` if the driver writes it.
    """

    path: str
    headers: CIMultiDict[str]
    dialect: Dialect
    encoder: ReplyEncoder
    keep_alive: float
    media_type: str
    token_ids: bool
    body: bytes


class RelayedResponse(web.StreamResponse):
    """A response that is sent with the engine's headers and no others."""

    absent: tuple[str, ...] = ()
    """Headers that aiohttp adds, and that the engine did not send."""


class WholeRelayedResponse(RelayedResponse, web.Response):
    """A relayed response with a whole body. Head and body are sent in one write, so the client wakes up once."""


def open_response(answer: Answer, *, drop: frozenset[str] = frozenset()) -> RelayedResponse:
    """Make a response with the engine's status, reason and headers; `drop` names headers to leave out, in lower case."""
    headers = _headers_of(answer, drop)
    response = RelayedResponse(status=answer.status, reason=answer.reason, headers=headers)
    response.absent = _absent(headers)
    return response


def whole_response(answer: Answer, body: bytes, *, made: bool = False) -> web.Response:
    """Make a response with the engine's status, reason and headers, and this body; `made`: it is JSON, and not the engine's own."""
    headers = _headers_of(answer, _PLUGIN_HEADERS | {"content-length"})
    if made:
        headers["Content-Type"] = "application/json"
    response = WholeRelayedResponse(status=answer.status, reason=answer.reason, headers=headers, body=body)
    response.absent = _absent(headers)
    return response


def _absent(headers: CIMultiDict[str]) -> tuple[str, ...]:
    return tuple(filterfalse(headers.__contains__, ("Content-Type", "Server")))


def _headers_of(answer: Answer, drop: frozenset[str]) -> CIMultiDict[str]:
    """Copy an engine's headers. A redirect to the engine's own address leads to the same path at the proxy: no client is sent past it."""
    headers, own = end_to_end_headers(answer.headers, drop=drop), answer.url.raw_host or ""
    for name, value in [*headers.items()]:
        if own in value:
            headers[name] = without_address(value, answer.url)
    return headers


async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Remove headers that aiohttp adds to an engine's response, and return the client's id of a model call (for `on_response_prepare`).

    A stream to a client of HTTP/1.0 has no chunks, so its end is that of the connection, which aiohttp would keep open (3.14).
    """
    if request.version == HttpVersion10 and response.content_length is None:
        response.force_close()
    if REQUEST_ID in request.headers and (own := request.get(RETURNED_ID)):
        response.headers[REQUEST_ID] = own
    for name in getattr(response, "absent", ()):  # of a relayed response
        response.headers.popall(name, None)


class Response(msgspec.Struct, eq=False):
    """The response to one client request.

    Attributes:
        request: the request.
        chat: the request, as a chat completion.
        exchange: how the reply is written.
        holding: what the request holds in memory.
        encoder_for: makes an encoder like that of the exchange for another handle; `None` after `release_body`.
        opened: the response after its head was sent, before that `None`. Later errors are sent within the stream.
        client: the state of the connection.
        silent: whether nothing was sent since the last interval of `keep_alive`; who sends a part of a stream sets it to false.
    """

    request: web.Request
    chat: ChatCall
    exchange: Exchange
    holding: Holding
    encoder_for: Callable[[str], Awaitable[ReplyEncoder]] | None
    opened: web.StreamResponse | None = None
    client: Party[ClientState, ClientEvent] = msgspec.field(default_factory=partial(Party, CLIENT, ClientState.WAITING))
    silent: bool = True
    _timer: asyncio.TimerHandle | None = None
    _sending: "asyncio.Task[None] | None" = None  # sends a keep-alive event

    @property
    def disconnected(self) -> bool:
        """Whether the client has closed the connection."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    @property
    def gone(self) -> bool:
        """Whether the client has left and nobody else waits for the reply, so that the call must end."""
        return self.disconnected and self.client.state is not ClientState.ORPHANED

    def release_body(self, until: int) -> None:
        """Release the body, which neither an engine nor a retry needs any more, but for messages from `until` on and other members."""
        left, self.encoder_for = self.chat.release(until), None
        body, self.holding.body = self.holding.body, None
        self.holding.give("body", max(0, len(body or b"") - left))

    def keep_alive(self) -> None:
        """Until `end_keep_alive`, send a keep-alive event after each interval in which nothing was sent.

        Clients, and proxies in front of them, close silent connections. Few calls are silent for an interval. Until then there is only a
        timer, because creating and cancelling a task costs about 20 µs.
        """
        self._timer = asyncio.get_running_loop().call_later(self.exchange.keep_alive, self._break_silence)

    def _break_silence(self) -> None:
        if self.silent and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send_keep_alive())
        self.silent = True
        self.keep_alive()

    async def _send_keep_alive(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client may have left
            await (await self.open()).write(self.exchange.encoder.keep_alive())

    async def end_keep_alive(self) -> None:
        """Send no more keep-alive events, which may open the response, and cancel one that is being sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sending is not None:
            await end(self._sending)
            self._sending = None

    async def open(self) -> web.StreamResponse:
        """Send the head of a streamed response, unless it was sent."""
        if self.opened is None:
            headers = {"Content-Type": self.exchange.media_type, "Cache-Control": "no-cache"}
            await self._send_head(web.StreamResponse(headers=headers))
        assert self.opened is not None  # noqa: S101 - `_send_head` sets it
        return self.opened

    async def open_like(self, answer: Answer) -> web.StreamResponse:
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
        self.client.advance(ClientEvent.HEAD)

    async def fail(self, status: int, message: str) -> web.StreamResponse:
        """End an opened response with an error, in the client's dialect."""
        return await self.finish(self.exchange.encoder.error(status, message))

    async def finish(self, rest: bytes, *, cut: bool = False) -> web.StreamResponse:
        """Send the rest of a stream and end it; with `cut`, close the connection instead of ending it properly."""
        await self.end_keep_alive()
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
        encoder, counted = self.exchange.encoder, prompt_tokens or reply.prompt.tokens
        try:
            chunks = [self.with_token_ids(chunk, reply) for chunk in as_chunks(body, self.chat.fields)]
        except ValueError as why:
            return encoder.error(HTTPStatus.BAD_GATEWAY, str(why))
        return b"".join([*[encoder.chunk(event_of(chunk), chunk, counted) for chunk in chunks], encoder.end()])

    def with_token_ids(self, data: bytes, reply: Reply) -> bytes:
        """Add token ids to the messages of a chunk or a body, if this client receives them."""
        return gym.with_tokens(data, reply.prompt.raw, partial(certain_choices, reply)) if self.exchange.token_ids else data
