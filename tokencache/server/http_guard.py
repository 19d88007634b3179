"""Refuses requests that two servers could read differently, before any handler sees them.

aiohttp's parser refuses most of them: two lengths, a length together with chunks, folded lines, line ends without CR, control characters,
heads that are too long (`tests/system/fuzz/test_framing.py` checks this). This module handles the rest:

    an incomplete head       the connection is closed after `HEAD_SECONDS`; otherwise a byte a minute would hold a socket forever
    not HTTP                 the response is a JSON error like every other; it is logged only at debug level
    an ambiguous head        refused: a version other than HTTP/1.0 and 1.1, a transfer coding other than chunked, two keys, two sessions
    a path above the root    refused: `/../x`
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, web
from multidict import CIMultiDictProxy

from tokencache.dialects.registry import credential_headers
from tokencache.errors import HarnessError

log = logging.getLogger(__name__)

HEAD_SECONDS = 60.0
"""Longest time from the first byte of a request's head to its last."""
_BAD_REQUEST = 400
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
        _only_one(request.headers, name)


def check_path(path: str) -> None:
    """Check that a path does not leave the engine's base URL through `..`, in any encoding.

    Raises:
        HarnessError: the path leaves it.
    """
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


def _only_one(headers: CIMultiDictProxy[str], name: str) -> None:
    """Refuse two different values of one header: servers would disagree about which one counts."""
    if name in headers and len(set(headers.getall(name))) > 1:
        raise HarnessError(f"the header {name} is given twice, with different values")


class GuardedRunner(web.AppRunner):
    """Runs an application on guarded connections."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,  # noqa: SLF001 - aiohttp (3.14) has no public way to set the protocol class
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """aiohttp's connection with a timeout for heads and an error message for bytes that are not HTTP."""

    __slots__ = ("_head_timer",)

    def __init__(self, manager: web.Server, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Receive bytes, and start or stop the timeout of a head."""
        super().data_received(data)
        if self._waits_for_head:
            if self._head_timer is None:
                self._head_timer = self._loop.call_later(HEAD_SECONDS, self._time_out)
        elif self._head_timer is not None:
            self._stop_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timeout when the connection ends."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Send a JSON error for bytes that are not HTTP, and close the connection. Logged only at debug level, because of port scans."""
        if status != _BAD_REQUEST or request.writer.output_size:
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

    def _time_out(self) -> None:
        self._head_timer = None
        if self._waits_for_head:
            log.info("a connection is closed: its request's head was not complete after %g s", HEAD_SECONDS)
            self.force_close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
