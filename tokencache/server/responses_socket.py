"""Serves the Responses dialect over WebSocket: each message that asks for a response is served like a POST request.

This is OpenAI's WebSocket mode, as Codex 0.169 uses it (openai/codex: `codex-rs/codex-api/src/endpoint/responses_websocket.rs`, and
`prepare_websocket_request` in `codex-rs/core/src/client.rs`). Each message is JSON:

====================================  ==================================================================================================
client: `response.create`             the members of the POST request. Responses are served one after the other
client: `response.processed`          Codex has read a response; nothing is sent back
server: `response.…`, `error`         the events of the stream
server: `error` with a `status`       the error for which an HTTP request would get this status
====================================  ==================================================================================================

With `previous_response_id` the client sends only what follows the last response of its connection. That response need not be stored
(Codex sends `store: false`): the connection keeps its items, and the request is served as if it contained them all. Another response is
looked up as for a POST request. `generate: false` (Codex warms up its connection) samples nothing; the next request continues its input.

A request may name a lane (`stream_id`, in the beta of openai 3.52): its events repeat the name, and the last response of each lane is kept.

A request has the headers of the handshake, except those that mark a retry. It passes routing, memory limits and the call like any other. A
client that closes the connection has left its call, and the requests that wait. The proxy closes a connection that waits for its client
when it stops, or when it runs short of files; its client opens another one, and sends its whole input.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from tokencache.dialects.json_io import NULL, TRUE, fields_of, member
from tokencache.dialects.reply_encoder import EVENT_STREAM
from tokencache.dialects.sse import EventSplitter, data_of, event_of
from tokencache.errors import BodyTooLargeError, HarnessError, MemoryFullError, TokencacheError
from tokencache.proxy.dedup.fingerprint import IDEMPOTENCY_KEY, RETRY_COUNT
from tokencache.proxy.request_body import check_values
from tokencache.request_memory import REQUEST_MEMORY, Holding, Owner, holding_of
from tokencache.server.http_guard import GuardedConnection
from tokencache.wakeup import end, to_the_end

Raw = msgspec.Raw
Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]
Guard = Callable[[web.Request, Serve], Awaitable[web.StreamResponse]]
Refused = Callable[[web.Request, str, TokencacheError], Coroutine[Any, Any, None]]

ROUTE = "/v1/responses"
PING_SECONDS = 30.0
"""How long a connection may be silent before it is checked whether its client is still there."""
LONGEST_LANE = 256
"""Most characters of a lane's name (`stream_id`), which each of its events repeats."""
MOST_LANES = 64
"""How many lanes of a connection keep their last response; then the oldest is forgotten."""
_OF_HANDSHAKE = frozenset({"connection", "upgrade", "content-type", "content-length", RETRY_COUNT, IDEMPOTENCY_KEY.lower()})
"""Headers that requests do not have: a repeated handshake repeats no request."""
_OF_SOCKET = frozenset({"type", "generate", "stream_id"})
"""Members of a message that a POST request does not have."""
_PREVIOUS = "previous_response_id"


class _Response(msgspec.Struct):
    id: str
    output: Raw


class _LastEvent(msgspec.Struct):
    type: Literal["response.completed", "response.incomplete"]
    response: _Response


_LAST_EVENT = msgspec.json.Decoder(_LastEvent)
_ERROR = msgspec.json.Decoder(dict[str, Raw])


def is_handshake(request: web.Request, route: str) -> bool:
    """Whether a request that has `Upgrade` opens a connection that can be served here."""
    return request.method == "GET" and route == ROUTE and web.WebSocketResponse().can_prepare(request).ok


class ResponsesSockets:
    """Serves the connections of an application.

    Args:
        serve: serves a request.
        guard: sends the errors of what it calls.
        refused: is called with a request that is refused before it is served, and its session.
    """

    def __init__(self, serve: Serve, guard: Guard, refused: Refused) -> None:
        self._serve, self._guard, self._refused = serve, guard, refused
        self._stopping = asyncio.Event()

    def close(self) -> None:
        """Close each connection after its current response, because the server stops."""
        self._stopping.set()

    async def serve(self, handshake: web.Request, session: str) -> web.StreamResponse:
        """Serve a connection of a session until it is closed. Raises `HarnessError` if the server stops."""
        if self._stopping.is_set():
            raise HarnessError("the server stops", status=HTTPStatus.SERVICE_UNAVAILABLE)
        socket = web.WebSocketResponse(heartbeat=PING_SECONDS, compress=False, max_msg_size=handshake.client_max_size)
        connection = _Connection(handshake, socket, self._serve, self._guard, self._refused, session=session)
        await socket.prepare(handshake)
        await connection.run(self._stopping)
        return socket


class _Connection:
    """A connection; `holding` is what its messages hold while they arrive, and the items that it keeps."""

    def __init__(
        self, handshake: web.Request, socket: web.WebSocketResponse, serve: Serve, guard: Guard, refused: Refused, *, session: str
    ) -> None:
        self._handshake, self._socket, self._session = handshake, socket, session
        self._serve, self._guard, self._refused = serve, guard, refused
        headers = [pair for pair in handshake.headers.items() if not _is_of_handshake(pair[0])]
        self._headers = CIMultiDict([*headers, ("Content-Type", "application/json")])
        self.holding = Holding(handshake.app[REQUEST_MEMORY])
        self.holding.belong_to(Owner(session))
        assert isinstance(handshake.protocol, GuardedConnection)  # noqa: S101 - the server makes no others
        self._wire = handshake.protocol
        self._asked: bytes | None = None  # the items of the current request; `None` if they are not all known
        self._kept: dict[str | None, tuple[str, bytes]] = {}  # of each lane's last response: its id, the items of its input and output

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve the messages, one after the other."""
        self._wire.count_messages(self.holding)
        stop = asyncio.create_task(stopping.wait())
        receiving = asyncio.create_task(self._socket.receive())
        call: asyncio.Task[Any] = receiving
        waiting: deque[bytes] = deque()
        try:
            while True:
                if not waiting:
                    await asyncio.wait({receiving, stop}, return_when=asyncio.FIRST_COMPLETED)
                    if not receiving.done():
                        await end(receiving)
                        await self._socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server stops")
                        return
                    waiting.append(_text_of(receiving.result()))
                    receiving = asyncio.create_task(self._socket.receive())
                data = waiting.popleft()
                self._wire.begin_message(len(data))
                call = asyncio.create_task(self._answer(data))
                while not call.done():
                    await asyncio.wait({receiving, call}, return_when=asyncio.FIRST_COMPLETED)
                    if receiving.done():
                        waiting.append(_text_of(receiving.result()))
                        receiving = asyncio.create_task(self._socket.receive())
                await call
                self._wire.end_message()
        except EOFError:  # nothing is sent if the connection is closed already
            await self._socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"send JSON as text")
        finally:
            try:
                await end(stop, receiving, call)
            finally:  # the loss of the connection cancels this task, also here
                self._wire.count_messages(None)
                self.holding.give_all()
                if self._wire.refused is not None:
                    await to_the_end(self._refused(self._handshake.clone(method="POST"), self._session, self._wire.refused))

    async def _answer(self, message: bytes) -> None:
        """Serve a message as a request, and keep what the next one may continue."""
        request = self._handshake.clone(method="POST", headers=self._headers)
        frames = request._payload_writer = _Frames(self._socket)  # noqa: SLF001 - aiohttp has no public way to set the writer
        self._asked = None
        with contextlib.suppress(ConnectionError):  # the client has left
            response = await self._guard(request, partial(self._serve_message, message, frames))
            await response.prepare(request)
            await response.write_eof()
            await frames.send_error()
        with contextlib.suppress(ValueError):  # the response failed
            self._keep(frames.lane, _LAST_EVENT.decode(frames.last).response, holding_of(request).owner)

    async def _serve_message(self, message: bytes, frames: "_Frames", request: web.Request) -> web.StreamResponse:
        """Serve a message as the body of a request. Raises the errors of `_read` and of the request."""
        try:
            answer = await self._read(message, frames, request)
        except TokencacheError as why:
            await self._refused(request, self._session, why)
            raise
        return await self._serve(request) if answer is None else answer

    async def _read(self, message: bytes, frames: "_Frames", request: web.Request) -> web.Response | None:
        """Read a message. Returns its answer; `None` if it is now the body of the request, which is to be served.

        Raises:
            HarnessError: it is not a request for a response, or is too large.
            MemoryFullError: requests hold as much memory as they may.
        """
        holding = holding_of(request)
        holding.take("body", len(message))
        await check_values(message)
        fields = fields_of(message)
        lane = member(fields, "stream_id", (str,), None)
        if lane is not None and len(lane) > LONGEST_LANE:
            raise HarnessError(f"'stream_id' must have at most {LONGEST_LANE} characters", param="stream_id")
        frames.lane = lane
        kind = member(fields, "type", (str,), "")
        if kind == "response.processed":
            return web.Response(content_type=EVENT_STREAM)
        if kind != "response.create":
            raise HarnessError(f"a message of the type {kind[:80]!r} is not supported: send 'response.create'", param="type")
        samples = member(fields, "generate", (bool,), True)
        items = _inner(bytes(fields.get("input", NULL)).strip())
        previous = member(fields, _PREVIOUS, (str,), None)
        known = next((kept for last, kept in self._kept.values() if last == previous), None)
        if items is not None and known is not None:
            items = _joined(known, items)
            fields[_PREVIOUS], fields["input"] = NULL, Raw(b"[%s]" % items)
        if bytes(fields.get(_PREVIOUS, NULL)) == bytes(NULL):
            self._asked = items
        if not samples:
            return _warmed_up(fields)
        fields["stream"] = TRUE
        body = msgspec.json.encode({name: value for name, value in fields.items() if name not in _OF_SOCKET})
        if len(body) > request.client_max_size:
            raise BodyTooLargeError(request.client_max_size)
        holding.take("body", len(body))
        await check_values(body)
        holding.body = body
        return None

    def _keep(self, lane: str | None, response: _Response, owner: Owner) -> None:
        """Keep the items that the next request of a lane may continue."""
        self.holding.give("body", len(self._kept.pop(lane, ("", b""))[1]))
        if self._asked is None:
            return
        items = _joined(self._asked, bytes(response.output)[1:-1])
        with contextlib.suppress(MemoryFullError):  # then the client learns that the response is not known, and sends its whole input
            self.holding.belong_to(owner)
            self.holding.take("body", len(items))
            self._kept[lane] = response.id, items
        if len(self._kept) > MOST_LANES:
            self.holding.give("body", len(self._kept.pop(next(iter(self._kept)))[1]))


class _Frames(AbstractStreamWriter):
    """Sends the events of a response as messages, and a response that is no stream as an error.

    Attributes:
        last: the data of the last event.
        lane: the lane of the request, which each message names; `None` if it has none.
    """

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket, self._events, self._body = socket, EventSplitter(), bytearray()
        self._status, self._streams = 0, False
        self.last = b""
        self.lane: str | None = None

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Note the status, and whether a stream follows. It has no chunks of HTTP, which `delivery` would write past this object."""
        headers.popall("Transfer-Encoding", None)
        self._status = int(status_line.split(" ", 2)[1])
        self._streams = headers.get("Content-Type", "").startswith(EVENT_STREAM)

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Send the events that are complete now. Raises `ConnectionError` if the client has left."""
        self.output_size += len(chunk)
        if not self._streams:
            self._body += chunk
            return
        for event in self._events.feed(bytes(chunk)):
            if data := data_of(event):
                self.last = data
                await self._send(data)

    async def write_eof(self, chunk: bytes = b"") -> None:
        """See `write`."""
        await self.write(chunk)

    async def send_error(self) -> None:
        """Send the body, unless it was a stream."""
        if not self._streams:
            error = {**_ERROR.decode(self._body), "type": "error", "status": self._status}
            await self._send(msgspec.json.encode(error))

    async def _send(self, data: bytes) -> None:
        if self.lane is not None:
            data = b'%s,"stream_id":%s}' % (data.rstrip()[:-1], msgspec.json.encode(self.lane))
        await self._socket.send_frame(data, WSMsgType.TEXT)

    async def drain(self) -> None:
        """Do nothing: `write` waits for the client."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Do nothing: messages are not compressed."""

    def enable_chunking(self) -> None:
        """Do nothing: messages have a length."""


def _text_of(message: WSMessage) -> bytes:
    """Return the text of a message. Raises `EOFError` if there is none: the client has closed the connection, or the message is binary."""
    if message.type is not WSMsgType.TEXT:
        raise EOFError
    text: str = message.data
    return text.encode()


def _is_of_handshake(header: str) -> bool:
    return header.lower() in _OF_HANDSHAKE or header.lower().startswith("sec-websocket-")


def _inner(value: bytes) -> bytes | None:
    """Return the items of an `input`, without brackets; `None` if it is neither a list nor a text."""
    if value.startswith(b"["):
        return value[1:-1].strip()
    return b'{"role":"user","content":%s}' % value if value.startswith(b'"') else None


def _joined(*lists: bytes) -> bytes:
    return b",".join(filter(None, lists))


def _warmed_up(fields: dict[str, Raw]) -> web.Response:
    """Return a response without output, for a request that samples nothing."""
    shown = {"object": "response", "created_at": int(time.time()), "model": fields.get("model", NULL), "output": []}
    response = {"id": f"resp_{os.urandom(16).hex()}", **shown}
    events = [
        {"type": "response.created", "sequence_number": 0, "response": {**response, "status": "in_progress"}},
        {"type": "response.completed", "sequence_number": 1, "response": {**response, "status": "completed"}},
    ]
    return web.Response(body=b"".join([event_of(msgspec.json.encode(event)) for event in events]), content_type=EVENT_STREAM)
