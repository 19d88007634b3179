"""Keeps HTTP/1.1 connections to one server, and makes requests on them.

aiohttp opens a connection (addresses, TLS) and parses what arrives. Its client session is not used: its cookies, redirects and timers, and
a task for each body, enter three times as many functions (docs/decisions/0037).

A server, or a box before it, may close a kept connection at the moment at which it is used again. So idle connections are closed before
vLLM's server does it (uvicorn: after 5 s), and none is kept after 429 or a failure, after which servers close it. Before a connection is
used again, the kernel says whether the other side has closed it, even if the event loop has not noticed yet. If so, nothing is sent, and
another connection is used.
"""

import asyncio
import math
import socket
import weakref
from collections.abc import AsyncIterable, Callable, Mapping
from functools import partial
from typing import cast

import aiohttp
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_parser import RawResponseMessage
from aiohttp.http_writer import StreamWriter, _serialize_headers
from multidict import CIMultiDict
from yarl import URL

from tokencache.errors import OK, EngineError, is_error
from tokencache.net import keep_alive

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 4.0
READ_BUFFER = 256 * 1024
Segments = tuple[bytes | memoryview, ...]
"""A body in segments: each is written to the socket without a copy."""
Body = bytes | Segments | AsyncIterable[bytes] | None
_MOST_HEAD = 64 * 1024
"""Bytes of a line of an answer's head."""
_SWITCHING_PROTOCOLS, _TOO_MANY_REQUESTS, _SERVER_ERROR = 101, 429, 500
_SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_ESTABLISHED = b"\1"
"""`tcpi_state` of an open connection, the first byte of `struct tcp_info` (Linux, `linux/tcp.h` and `net/tcp_states.h`)."""
_sockets: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()
"""Sockets by file descriptor, until their connection is made."""


class _Protocol(ResponseHandler):
    """aiohttp's protocol of one connection.

    Attributes:
        connection: aiohttp's entry of it.
        upload: writes a body whose parts still arrive; `None` if there is none.
        kept_since: when it was last used, in seconds of the event loop's clock.
    """

    connection: Connection
    upload: asyncio.Task[None] | None = None
    kept_since = 0.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Find the socket: uvloop does not give it to a protocol."""
        super().connection_made(transport)
        self._socket = _sockets.pop(transport.get_extra_info("socket").fileno(), None)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume a connection that is paused; a reader calls this for each part that it takes."""
        if self._reading_paused or self._buffer_paused:
            super().resume_reading(resume_parser)

    def is_usable(self, now: float) -> bool:
        """Whether it may be used again: nothing has arrived that no request asked for, and the other side keeps it open."""
        if self.should_close or self.transport is None or self.transport.is_closing() or now - self.kept_since > IDLE_SECONDS:
            return False
        return self._socket is None or self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _ESTABLISHED

    def drop(self) -> None:
        """Close it, and end what is written to it."""
        if self.upload is not None:
            self.upload.cancel()
        self.connection.close()


class Answer:
    """The answer to a request, whose head has arrived. It must be read to its end, or closed.

    Attributes:
        status: the HTTP status.
        reason: the reason phrase.
        headers: the headers.
        content_type: the media type, without parameters, in lower case; `""` if there is none.
        content: the body, as it arrives.
        url: the server's base URL.
        connection: the connection; `None` when the answer has ended.
        protocol: that of the connection.
    """

    __slots__ = ("_body", "_connections", "connection", "content", "content_type", "headers", "protocol", "reason", "status", "url")

    def __init__(
        self,
        url: URL,
        message: RawResponseMessage,
        content: StreamReader,
        protocol: _Protocol,
        connections: "Connections",
    ) -> None:
        """Begin to read an answer; `connections` get its connection back."""
        self.url, self.content = url, content
        self.status, self.reason, self.headers = message.code, message.reason, message.headers
        self.content_type = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.connection: Connection | None = protocol.connection
        self.protocol, self._connections = protocol, connections
        self._body = b""
        content.on_eof(partial(connections.take_back, self))

    async def read(self, take: Callable[[int], object] | None = None, *, most: float = math.inf) -> bytes:
        """Read the body to its end; the second time, return it again. If that fails, the answer is closed.

        Of an error that the server broke off, what arrived is returned: its status says that nothing was done.

        Args:
            take: is called with the size of each part before the part is kept, and may raise.
            most: the limit in bytes.

        Raises:
            aiohttp.ClientError: the server broke off an answer that is not an error.
            EngineError: it is longer than `most`.
        """
        parts: list[bytes] = []
        try:
            while not self.content.at_eof():
                part, _ = await self.content.readchunk()  # `readany` would join the parts that wait, and this joins them all
                if take is not None:
                    take(len(part))
                parts.append(part)
                if self.content.total_bytes > most:
                    raise EngineError("the answer is too large", private=f"{self.url}: more than {most} bytes")  # noqa: TRY301 - see below
        except aiohttp.ClientError:
            self.close()
            if not is_error(self.status):
                raise
        except BaseException:  # what is left would be the beginning of the next answer
            self.close()
            raise
        self._body = self._body or b"".join(parts)
        return self._body

    def close(self) -> None:
        """Close the connection, unless the answer has ended."""
        if self.connection is not None:
            self.protocol.force_close()
            self._connections.take_back(self)
            self.content.set_exception(aiohttp.ClientConnectionError("the answer was closed"))


class Connections:
    """The connections to one server.

    Attributes:
        answering: answers that are counted until they have ended; the caller of `request` adds them.
    """

    def __init__(self, url: URL) -> None:
        """Prepare to connect to a base URL, in the running event loop."""
        self.answering: set[Answer] = set()
        self._url, self._host = url, url.host_port_subcomponent or ""
        self._loop = asyncio.get_running_loop()
        self._connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
        # aiohttp (3.14) has no public way to set the class of connections
        self._connector._factory = partial(_Protocol, self._loop)  # type: ignore[assignment]  # noqa: SLF001
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        self._idle: list[_Protocol] = []  # the one that was used last is at the end
        self._cleaning: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._cleaning is not None:
            self._cleaning.cancel()
        self._drop_idle(math.inf)
        await self._connector.close()

    async def request(self, method: str, target: str, headers: Mapping[str, str], body: Body) -> Answer:
        """Make a request, and return when the head of its answer has arrived.

        A safe request (RFC 9110, 9.2.1) without a body is repeated once if the connection breaks before that.

        Args:
            method: the HTTP method.
            target: path and query, as they are sent.
            headers: the headers, but not `Host`; a length only for a body whose parts still arrive, which is sent in chunks without one.
            body: the body.

        Raises:
            aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError: no connection can be made.
            aiohttp.ClientError, aiohttp.http.HttpProcessingError: the connection broke, or what arrived is not HTTP.
        """
        sent = CIMultiDict(Host=self._host)
        sent.update(headers)
        segments = (body,) if isinstance(body, bytes) else body if isinstance(body, tuple) else ()
        parts = None if body is None or isinstance(body, bytes | tuple) else body
        repeatable = body is None and method in _SAFE
        if parts is None and not repeatable:
            sent["Content-Length"] = str(sum(map(len, segments)))
        while True:
            if (protocol := self._kept()) is None:
                protocol = await self._open()
            try:
                protocol.set_response_params(
                    skip_payload=method == "HEAD",
                    read_until_eof=True,
                    auto_decompress=False,
                    read_bufsize=READ_BUFFER,
                    max_line_size=_MOST_HEAD,
                    max_field_size=_MOST_HEAD,
                )
                if parts is not None:
                    protocol.upload = asyncio.create_task(_upload(protocol, f"{method} {target} HTTP/1.1", sent, parts))
                elif protocol.transport is not None:
                    protocol.transport.writelines((_serialize_headers(f"{method} {target} HTTP/1.1", sent), *segments))
                message, content = await protocol.read()
                while message.code < OK and message.code != _SWITCHING_PROTOCOLS:
                    message, content = await protocol.read()
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                protocol.drop()
                if not repeatable:
                    raise
                repeatable = False
                continue
            except BaseException:
                protocol.drop()
                raise
            return Answer(self._url, message, content, protocol, self)

    def _kept(self) -> _Protocol | None:
        """Take a kept connection that can still be used; `None` if there is none."""
        while self._idle:
            protocol = self._idle.pop()
            if protocol.is_usable(self._loop.time()):
                return protocol
            protocol.drop()
        return None

    async def _open(self) -> _Protocol:
        asked = aiohttp.ClientRequest("GET", self._url, loop=self._loop)
        try:
            connection = await self._connector.connect(asked, [], self._timeout)
        except TimeoutError as why:
            raise aiohttp.ConnectionTimeoutError(f"no connection within {CONNECT_SECONDS:g} s") from why
        protocol = cast("_Protocol", connection.protocol)
        protocol.connection = connection
        return protocol

    def take_back(self, answer: Answer) -> None:
        """Take the connection of an answer that has ended, once, and keep it if it can be used again."""
        if answer.connection is None:
            return
        answer.connection, protocol = None, answer.protocol
        self.answering.discard(answer)
        often_closed = answer.status == _TOO_MANY_REQUESTS or answer.status >= _SERVER_ERROR
        if often_closed or protocol.should_close or (protocol.upload is not None and not protocol.upload.done()):
            protocol.drop()
            return
        protocol.upload, protocol.kept_since = None, self._loop.time()
        self._idle.append(protocol)
        if self._cleaning is None:
            self._cleaning = self._loop.call_later(IDLE_SECONDS, self._clean)

    def _clean(self) -> None:
        """Close the connections that were not used for some time."""
        self._cleaning = None
        self._drop_idle(self._loop.time() - IDLE_SECONDS)
        if self._idle:
            self._cleaning = self._loop.call_later(IDLE_SECONDS, self._clean)

    def _drop_idle(self, before: float) -> None:
        idle, self._idle = self._idle, []
        for protocol in idle:
            if protocol.kept_since <= before:
                protocol.drop()
            else:
                self._idle.append(protocol)


async def _upload(protocol: _Protocol, line: str, headers: CIMultiDict[str], parts: AsyncIterable[bytes]) -> None:
    """Write a request whose body still arrives. If that fails, who waits for the answer gets an error."""
    writer = StreamWriter(protocol, asyncio.get_running_loop())
    if "Content-Length" not in headers:
        headers["Transfer-Encoding"] = "chunked"
        writer.enable_chunking()
    try:
        await writer.write_headers(line, headers)
        async for part in parts:
            await writer.write(part)
        await writer.write_eof()
    except Exception as why:  # noqa: BLE001 - see above
        protocol.set_exception(aiohttp.ClientConnectionError(f"the body cannot be sent: {type(why).__name__}"), why)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    keep_alive(made)
    _sockets[made.fileno()] = made
    return made
