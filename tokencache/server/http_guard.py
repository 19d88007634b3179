"""Refuses requests that two servers could read differently, before any handler sees them.

aiohttp's parser refuses most of them: two lengths, a length together with chunks, folded lines, line ends without CR, control characters,
heads that are too long (`tests/system/fuzz/test_framing.py` checks this). This module handles the rest:

    an incomplete head       the connection is closed after `HEAD_SECONDS`; otherwise a byte a minute would hold a socket forever
    a huge head              the connection is closed after `HEAD_BYTES`: aiohttp limits only its lines and their number
    many heads               incomplete ones are counted (`request_memory`), and the connection is closed if its own does not fit
    no request               the connection is closed after `IDLE_SECONDS`, unless one has arrived that a busy process has not read yet
    not HTTP                 the response is a JSON error like every other; it is logged only at debug level
    an ambiguous head        refused: a version other than HTTP/1.0 and 1.1, a transfer coding other than chunked, two keys, two sessions
    a path above the root    refused: `/../x`
"""

import asyncio
import fcntl
import logging
import re
import sys
import termios
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, cast

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.typedefs import Handler

from tokencache.dialects.registry import credential_headers
from tokencache.errors import HarnessError, MemoryFullError
from tokencache.proxy.request_body import LATE_SECONDS, PIECE
from tokencache.request_memory import REQUEST_MEMORY, Holding, Owner, RequestMemory

log = logging.getLogger(__name__)

HEAD_SECONDS = 60.0
"""Longest time from the first byte of a request's head to its last."""
HEAD_BYTES = 256 * 1024
"""Largest head whose end has not arrived."""
IDLE_SECONDS = 75.0
"""Longest time without a request, on a new connection or between two. It is nginx's default (`keepalive_timeout`), and longer than most
clients and load balancers keep an unused connection: httpx 5 s, aiohttp 15 s, AWS's balancers 60 s. A connection on which a request runs
is not idle, however long that takes."""
_HEADS = Owner(" heads")
"""Holds all incomplete heads; no session has this name."""
WAITING_SECONDS, UNREAD_SECONDS = 1.0, 60.0
"""Seconds for which a connection has waited for its client at least before it is closed because files are short; and for which its client
has read nothing, if it is sent a reply."""
_SHOWN = 120
_SEPARATORS = tuple(re.compile(some, re.IGNORECASE) for some in ("/", r"[/\\]", "/|%2f", r"[/\\]|%2f|%5c"))
"""Patterns of the characters that a server may read as the end of a path segment, in all combinations."""


def check_head(request: web.Request, session_headers: Iterable[str]) -> None:
    """Check that an engine, or a server in front of the proxy, reads a request's head as the proxy does.

    Raises:
        HarnessError: another server may read the head differently.
    """
    if request.version not in {HttpVersion10, HttpVersion11}:
        raise HarnessError(f"HTTP/{request.version.major}.{request.version.minor} is not supported; use HTTP/1.1")
    coding = request.headers.get("Transfer-Encoding", "chunked").strip()
    if coding.lower() != "chunked" or (request.version != HttpVersion11 and "Transfer-Encoding" in request.headers):
        raise HarnessError("the only supported transfer coding is 'chunked', with HTTP/1.1")
    for name in (*session_headers, *credential_headers()):
        if name in request.headers and len(set(request.headers.getall(name))) > 1:  # servers would disagree about which one counts
            raise HarnessError(f"the header {name} is given twice, with different values")


def check_path(path: str) -> None:
    """Check that a path does not leave the engine's base URL through `..`, in any encoding. Raises `HarnessError` if the path leaves it."""
    route = path.partition("?")[0]
    if ".." in route.lower().replace("%2e", ".") and any(_climbs(separator.split(route)) for separator in _SEPARATORS):
        raise HarnessError("this path climbs above the engine's base URL")


def _climbs(segments: list[str]) -> bool:
    depth = 0
    for segment in segments:
        plain = segment.lower().replace("%2e", ".")
        depth += -1 if plain == ".." else plain not in {"", "."}
        if depth < 0:
            return True
    return False


class GuardedRunner(web.AppRunner):
    """Runs an application on guarded connections.

    `wrap` adds to the application's handler what a middleware would: two coroutines fewer, which a long stream would keep in memory.
    """

    def __init__(self, app: web.Application, wrap: Callable[[Handler], Handler], **settings: Any) -> None:
        super().__init__(app, **settings)
        self._wrap = wrap

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            self._wrap(made.request_handler),  # type: ignore[arg-type]
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_SECONDS,
            **made._kwargs,  # noqa: SLF001 - aiohttp (3.14) has no public way to set the protocol class
        )
        server.memory = self.app[REQUEST_MEMORY]
        return server


class _Server(web.Server):
    memory: RequestMemory

    def __call__(self) -> web.RequestHandler:
        return GuardedConnection(self, loop=self._loop, **self._kwargs)


class GuardedConnection(web.RequestHandler):
    """aiohttp's connection with limits for heads, an order of what is closed first, and an error message for bytes that are not HTTP.

    Attributes:
        refused: why a WebSocket was closed whose message does not fit into memory; `None` if none was.
    """

    __slots__ = ("_counted", "_head_size", "_head_timer", "_idle", "_memory", "_message_size", "_received", "_since", "_wire", "refused")

    def __init__(self, manager: _Server, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._memory, self._head_size = manager.memory, 0  # of a head that is incomplete
        self._head_timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # when the head, or the current piece of a body, began, or the client stopped to read
        self._received = 0  # bytes since then
        self._wire: asyncio.Transport | None = None  # also after aiohttp has closed it
        self._counted: Holding | None = None  # of a WebSocket
        self.refused: MemoryFullError | None = None
        self._message_size, self._idle = 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._wire = cast("asyncio.Transport", transport)
        self._since = self._loop.time()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Receive bytes, and start or stop the timeout of a head."""
        if self._counted is not None and not self._hold_message(self._counted, len(data)):
            return
        waiter = self._waiter
        waited = waiter is not None and not waiter.done()
        super().data_received(data)
        self._received += len(data)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            if self._head_timer is None:
                self._begin(len(data))
                self._limit_head(HEAD_SECONDS)
            self._hold_head(len(data))
        elif waited or self._received >= PIECE:
            self._begin()
            if self._head_timer is not None:
                self._end_head()

    def count_messages(self, holding: Holding | None) -> None:
        """From now on the connection is a WebSocket, whose messages are counted as they arrive; `None`: it is closed."""
        self._counted = holding
        self.end_message()

    def begin_message(self, size: int) -> None:
        """Serve a message of so many bytes: it is counted with its request now."""
        if self._counted is not None:
            taken = min(size, self._message_size)  # a part may have arrived with the handshake
            self._counted.give("body", taken)
            self._message_size -= taken
        self._idle = False

    def end_message(self) -> None:
        """Wait for the next message."""
        self._idle, self._since = True, self._loop.time()

    def _hold_message(self, holding: Holding, size: int) -> bool:
        try:
            holding.take("body", size)
        except MemoryFullError as why:
            log.info("a WebSocket is closed: %s", why)
            self.refused = why
            self.abort()
            return False
        self._message_size += size
        return True

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume a connection that is paused; a reader calls this for each part that it takes."""
        if self._reading_paused or self._buffer_paused:
            super().resume_reading(resume_parser)

    def _hold_head(self, size: int) -> None:
        if self._received > HEAD_BYTES:
            log.info("a connection is closed: its request's head has more than %d bytes", HEAD_BYTES)
            self.force_close()
            return
        try:
            self._memory.add(_HEADS, "head", size)
            self._head_size += size
        except MemoryFullError as why:
            log.info("a connection is closed: %s", why)
            self.force_close()

    def _begin(self, received: int = 0) -> None:
        self._since, self._received = self._loop.time(), received

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client reads more slowly than it is sent."""
        super().pause_writing()
        self._since = self._loop.time()

    @property
    def dispensable(self) -> tuple[int, float] | None:
        """How early the connection is closed when files are short, smallest first; `None` if it is needed.

        First those that are idle (as a WebSocket between two responses) or ended already, then heads, bodies and replies that do not
        progress; of each the one that waits longest for its client. A connection is never closed while an engine works for it, or in its
        first seconds of waiting.
        """
        now, wire = self._loop.time(), self._wire
        if wire is None or self._manager is None:
            return None
        if self._waits_for_head and not wire.is_closing():
            idle = self._head_timer is None
            kind, since = (0, self._next_keepalive_close_time - self._keepalive_timeout) if idle else (1, self._since)
        elif wire.is_closing() or (self._counted is not None and self._idle):
            kind, since = 0, self._since
        elif self._paused:
            kind, since = 3, self._since + (UNREAD_SECONDS - WAITING_SECONDS)
        elif self._current_request is not None and not self._current_request.content.is_eof() and not self._reading_paused:
            kind, since = 2, self._since
        else:
            return None
        return (kind, since) if now - since >= WAITING_SECONDS else None

    def has_unread(self) -> bool:
        """Whether bytes have arrived that are not read yet. A busy loop runs its timers first; to close then would lose the request."""
        if self._wire is None or self._wire.is_closing() or self._paused:  # a client that reads no reply is not waited for
            return False
        size = fcntl.ioctl(self._wire.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(size, sys.byteorder) > 0

    def abort(self) -> None:
        """Close the connection at once, without sending what is left."""
        self.force_close()
        if self._wire is not None:
            self._wire.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timeout when the connection ends."""
        self._end_head()
        self._wire = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Send a JSON error for bytes that are not HTTP, and close the connection. Logged only at debug level, because of port scans."""
        if status != HTTPStatus.BAD_REQUEST or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        log.debug("not an HTTP request from %s", request.remote, exc_info=exc)
        detail = (message or "").strip().partition("\n")[0][:_SHOWN].rstrip(": ")
        error = {"message": f"this is not an HTTP request: {detail}", "type": "invalid_request_error", "param": None, "code": status}
        response = web.Response(body=msgspec.json.encode({"error": error}), status=status, content_type="application/json")
        response.force_close()
        return response

    @property
    def _waits_for_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _process_keepalive(self) -> None:
        """See aiohttp's. While a head arrives, its own timeout holds, and the end of its request sets the next one."""
        if self._head_timer is None and not self.has_unread():
            super()._process_keepalive()
        else:
            self._keepalive_handle = None

    def _limit_head(self, seconds: float) -> None:
        self._head_timer = self._loop.call_later(seconds, self._time_out, self._loop.time() + seconds)

    def _time_out(self, due: float) -> None:
        self._head_timer = None
        if self._waits_for_head and self._loop.time() - due > LATE_SECONDS:
            self._limit_head(LATE_SECONDS)
        elif self._waits_for_head:
            log.info("a connection is closed: its request's head was not complete after %g s", HEAD_SECONDS)
            self.force_close()

    def _end_head(self) -> None:
        if self._head_size:
            self._memory.remove(_HEADS, "head", self._head_size)
            self._head_size = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
