"""Sends HTTP requests to one engine through a connection pool.

The number of connections and the total time of a request have no limit: an agent's turn may take long, and a proxy must not give up before
its client does.

A server, or a box before it, may close a kept connection at the moment at which it is used again. So the pool closes idle connections
before vLLM's server does (uvicorn: after 5 s), and keeps none after 429 or a failure, after which servers close it. Before a connection is
used again, the kernel says whether the other side has closed it, even if the event loop has not noticed yet. If so, nothing is sent, and
another connection is used. A connection that is reset later may have carried the request to the engine: only requests that sample nothing
are then repeated (`Upstream.query`).
"""

import asyncio
import base64
import contextlib
import errno
import io
import logging
import math
import socket
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_parser import RawResponseMessage
from aiohttp.payload import Payload
from multidict import CIMultiDict
from yarl import URL

from tokencache.backoff import delays
from tokencache.errors import OK, EngineError
from tokencache.net import keep_alive, without_address

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 4.0
READ_BUFFER = 256 * 1024
FIRST_DELAY, LONGEST_DELAY = 0.05, 1.0
"""Seconds before a request is repeated by `Upstream.query`."""
_RETRIES = 3
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500
MOST_ANSWER = 256 * 2**20
"""Bytes of an answer to one of the proxy's own requests."""
_LARGE = 2**20
_ESTABLISHED = b"\1"
"""`tcpi_state` of an open connection, the first byte of `struct tcp_info` (Linux, `linux/tcp.h` and `net/tcp_states.h`)."""
_sockets: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()
"""Sockets by file descriptor, until their connection is made."""
_SEGMENTED_FROM = 2**16
"""Bytes. Copying a body up to this size is faster than writing its segments one by one (docs/performance.md)."""
_REMIND_SECONDS = 60.0


class EngineResponse(msgspec.Struct, frozen=True):
    """A complete answer of an engine: HTTP status, body and headers."""

    status: int
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})

    def json(self) -> Any:
        """Decode the body; `None` if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (ValueError, RecursionError):
            return None


class EngineClient(Protocol):
    """Sends small requests to an engine; implemented by `Upstream` and by `probe.ProbeRequests`."""

    async def get(self, path: str) -> EngineResponse:
        """See `Upstream.get`."""

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """See `Upstream.post`."""

    async def query(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """See `Upstream.query`."""


AskChat = Callable[[Mapping[str, Any]], Awaitable[EngineResponse]]
"""Sends a small chat request that the proxy itself makes. The answer has token ids where vLLM puts them. Raises `EngineError`."""


class SegmentedPayload(Payload):
    """A JSON body in segments, each written to the socket without a copy; aiohttp joins the first with the head of the request.

    The ids of a long history are hundreds of kilobytes of digits. As one body they would be copied twice for every call: once to join them
    with the messages, once to join them with the head of the request (`aiohttp.http_writer`).
    """

    _autoclose = True  # there is nothing to close

    def __init__(self, segments: Sequence[bytes | memoryview]) -> None:
        super().__init__(segments, content_type="application/json")
        self._segments = segments
        self._size = sum(map(len, segments))

    async def write(self, writer: AbstractStreamWriter) -> None:
        """See `Payload.write`."""
        for segment in self._segments:
            await writer.write(segment)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """See `Payload.write_with_length`; the length is always that of all segments."""
        del content_length
        await self.write(writer)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """See `Payload.decode`."""
        return b"".join(self._segments).decode(encoding, errors)


def segmented_body(*segments: bytes | memoryview) -> bytes | SegmentedPayload:
    """Make a request body of segments; a short one is joined. The first segment should be short, because it is always copied."""
    return SegmentedPayload(segments) if sum(map(len, segments)) > _SEGMENTED_FROM else b"".join(segments)


class _Request(aiohttp.ClientRequest):
    """A request without the headers that aiohttp adds by default.

    aiohttp's own option for that (`skip_auto_headers`) doubles the time to create a request (3.14; 10 µs).
    """

    _skip_auto_headers = CIMultiDict[None]((name, None) for name in ("Accept", "Accept-Encoding", "Content-Type", "User-Agent"))

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        """See `ClientRequest.send`.

        Raises:
            _ClosedError: the other side has closed the connection.
        """
        if isinstance(conn.protocol, _Connection) and not conn.protocol.is_open:
            raise _ClosedError
        return await super().send(conn)

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:
        """Add no headers."""


class _Connection(ResponseHandler):
    """aiohttp's connection, which knows whether the other side has closed it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Find the socket: uvloop does not give it to a protocol."""
        super().connection_made(transport)
        self._socket = _sockets.pop(transport.get_extra_info("socket").fileno(), None)

    async def read(self) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
        """Read the head of an answer. The connection is not kept after one that servers often close it after."""
        message, payload = await super().read()
        if message.code == _TOO_MANY_REQUESTS or message.code >= _SERVER_ERROR:
            self.force_close()
        return message, payload

    @property
    def is_open(self) -> bool:
        """Whether the other side has not closed the connection, as far as the kernel knows now."""
        return self._socket is None or self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _ESTABLISHED


class _ClosedError(aiohttp.ServerDisconnectedError):
    """A kept connection was closed; nothing of the request was sent."""


class Upstream:
    """An engine's base URL (scheme, host, port, optional path before `/v1`) and a pool of connections to it.

    `key` replaces the `Authorization` header that the harness sends. Without a key, user and password in the URL do. `url` does not contain
    them.
    """

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._authorization = f"Bearer {key}" if key else ""
        if (given := URL(self.url)).user is not None:
            self.url = str(given.with_user(None)).rstrip("/")  # the URL appears in logs and answers
            basic = base64.b64encode(f"{given.user}:{given.password or ''}".encode()).decode()
            self._authorization = self._authorization or f"Basic {basic}"
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._awaited = 0
        self._answering: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()
        self._warned = -math.inf

    async def open(self) -> None:
        """Open the pool, in the running event loop."""
        self._closed = False
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket)
        # aiohttp (3.14) has no public way to set the class of connections
        connector._factory = partial(_Connection, asyncio.get_running_loop())  # type: ignore[assignment]  # noqa: SLF001
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=_Request,
            read_bufsize=READ_BUFFER,
            max_line_size=64 * 1024,
            max_field_size=64 * 1024,
        )

    async def close(self) -> None:
        """Close the pool."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    @property
    def under_way(self) -> int:
        """Number of requests of `send` that have started and not ended. The proxy's own requests (`get`, `post`) do not count."""
        return self._awaited + sum(not answer.closed for answer in self._answering)

    async def send(self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: Any = None) -> aiohttp.ClientResponse:
        """Send a request and return when the head of the answer has arrived; the caller must release or close the answer.

        `path` is sent unchanged, with its percent-encoding and query.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection without an answer.
        """
        self._awaited += 1
        try:
            answer = await self._send(method, path, headers, body)
        finally:
            self._awaited -= 1
        self._answering.add(answer)
        return answer

    async def _send(self, method: str, path: str, headers: Mapping[str, str] | None, body: Any) -> aiohttp.ClientResponse:
        if self._session is None:
            raise RuntimeError("Upstream.open() has not been called")
        if self._closed:
            raise EngineError("the engine was removed", private=self.url, reached=False)
        url = URL(self.url + path, encoded=True)
        sent = CIMultiDict(headers or {})
        if self._authorization:
            sent.popall("Authorization", None)
            sent["Authorization"] = self._authorization
        if isinstance(body, bytes) and len(body) > _LARGE:
            body = io.BytesIO(body)  # written in blocks, so that other calls can run in between
        while True:
            try:
                return await self._session.request(method, url, headers=sent, data=body, allow_redirects=False)
            except _ClosedError:
                log.debug("engine %s: a kept connection was closed: another one is used", self.url)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as why:
                cause = why.os_error if isinstance(why, aiohttp.ClientConnectorError) else why
                raise self._unreachable(cause, str(cause or why)) from why
            except (aiohttp.ClientError, TimeoutError) as why:
                raise EngineError("the engine gave no answer", private=f"{self.url}: {_described(why)}") from why

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """Post JSON (bytes unchanged, anything else encoded) and read the complete answer.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection before the end of its answer.
        """
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self._complete(await self._send("POST", path, {**(headers or {}), "Content-Type": "application/json"}, data))

    async def get(self, path: str) -> EngineResponse:
        """Send a GET request and read the complete answer.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection before the end of its answer.
        """
        return await self._complete(await self._send("GET", path, None, None))

    async def query(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """Send a request that is safe to repeat, because it samples nothing that is recorded: up to four times, until it is answered.

        With a body it is sent as by `post`, without one as by `get`. A closed connection proves nothing about an engine: uvicorn closes
        the connection after each 500, and a request may be sent at that moment.

        Raises:
            EngineError: the engine cannot be reached, or closed every connection before the end of its answer.
        """
        pauses: Iterator[float] | None = None
        while True:
            try:
                return await (self.get(path) if body is None else self.post(path, body, headers))
            except EngineError as why:
                pauses = pauses or islice(delays(FIRST_DELAY, LONGEST_DELAY, factor=5.0), _RETRIES)
                pause = next(pauses, None)
                if pause is None or not why.reached:
                    raise
                log.debug("engine %s: the request to %s is sent again in %g s: %s", self.url, path, pause, why)
                await asyncio.sleep(pause)

    async def connect(self) -> None:
        """Open a connection and close it without a request, to test whether a server is listening.

        Raises:
            EngineError: the engine cannot be reached.
        """
        url = URL(self.url)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(url.host, url.port)
        except (OSError, TimeoutError) as why:
            raise self._unreachable(why, str(why) or "no connection in time") from why
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _unreachable(self, cause: BaseException, described: str) -> EngineError:
        """Make the error. If the cause is this process and not the engine, log it, at most once a minute."""
        short = isinstance(cause, OSError) and cause.errno in {errno.EMFILE, errno.ENFILE}
        if short and time.monotonic() - self._warned > _REMIND_SECONDS:
            self._warned = time.monotonic()
            log.error("OUT OF FILE DESCRIPTORS: cannot connect to the engine at %s; raise the limit of open files (ulimit -n)", self.url)
        return EngineError("the engine cannot be reached", private=f"{self.url}: {described}", reached=False)

    async def _complete(self, response: aiohttp.ClientResponse) -> EngineResponse:
        chunks, size = [], 0
        try:
            while chunk := await response.content.readany():
                chunks.append(chunk)
                size += len(chunk)
                if size > MOST_ANSWER:
                    raise EngineError("the engine's answer is too large", private=f"{self.url}: more than {MOST_ANSWER} bytes")
        except (aiohttp.ClientError, TimeoutError) as why:
            raise EngineError("the engine broke off its answer", private=f"{self.url}: {_described(why)}") from why
        finally:
            response.close()  # at its end, it has given its connection back
        body = b"".join(chunks)
        return EngineResponse(response.status, body if response.status == OK else error_text(body, response), response.headers)


def error_text(body: bytes, answer: aiohttp.ClientResponse) -> bytes:
    """Return an engine's error for a client, without the engine's address."""
    return without_address(body.decode(errors="surrogateescape"), answer.url).encode(errors="surrogateescape")


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    keep_alive(made)
    _sockets[made.fileno()] = made
    return made


def _described(why: Exception) -> str:
    """Describe an error without the requested URL, because its query may contain a harness's own key."""
    return f"{type(why).__name__}: {why.message if isinstance(why, aiohttp.ClientResponseError) else why}"
