"""Guarding: what comes in over a connection before it is a request that anybody reads.

aiohttp's parser refuses what two servers could read in two ways: two lengths, a length beside chunks, folded lines, line ends without CR,
control characters, heads that are too long (`tests/system/fuzz/test_framing.py` holds it to that). What it leaves open is done here:

    a head that dribbles     closed when it is not whole in time; else one socket could be held for ever with a byte a minute
    what is no HTTP          told so in JSON like every other error, and in one line of the log, without what was sent
    an ambiguous head        another version or coding than both sides mean the same by, two keys, two sessions: refused
    a path that climbs       `/../x`: refused
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
"""For a request's head, from its first byte to its last."""
_BAD_REQUEST = 400
_SHOWN = 120
_SEPARATORS = tuple(re.compile(some, re.IGNORECASE) for some in ("/", r"[/\\]", "/|%2f", r"[/\\]|%2f|%5c"))
"""What servers take for the end of a segment, in all combinations that there are."""


def check_head(request: web.Request, session_headers: Iterable[str]) -> None:
    """Refuse a head that an engine, or a server before us, may read otherwise than we do.

    Raises:
        HarnessError: it is one.
    """
    if request.version not in {HttpVersion10, HttpVersion11}:
        raise HarnessError(f"HTTP/{request.version.major}.{request.version.minor} is not spoken here: HTTP/1.1 is")
    coding = request.headers.get("Transfer-Encoding", "chunked").strip()
    if coding.lower() != "chunked" or (request.version != HttpVersion11 and "Transfer-Encoding" in request.headers):
        raise HarnessError("the only transfer coding that is taken is 'chunked', of HTTP/1.1")
    for name in (*session_headers, *credential_headers()):
        _only_one(request.headers, name)


def check_path(path: str) -> None:
    """Refuse a path that climbs above its beginning, however that is written: an engine's base URL may have a path in front of it.

    Raises:
        HarnessError: it does.
    """
    route = path.partition("?")[0]
    if ".." in route.lower().replace("%2e", ".") and any(_climbs(separator.split(route)) for separator in _SEPARATORS):
        raise HarnessError("this path leads out of what the engine serves")


def _climbs(segments: list[str]) -> bool:
    depth = 0
    for segment in segments:
        plain = segment.lower().replace("%2e", ".")
        depth += -1 if plain == ".." else plain not in {"", "."}
        if depth < 0:
            return True
    return False


def _only_one(headers: CIMultiDictProxy[str], name: str) -> None:
    """One request belongs to one session: two headers that name it would leave the choice to whoever reads first."""
    if name in headers and len(set(headers.getall(name))) > 1:
        raise HarnessError(f"there are two headers {name}, and they differ")


class Runner(web.AppRunner):
    """Runs an application on connections that are guarded."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
            **made._kwargs,  # noqa: SLF001 - aiohttp has no way to name another protocol (3.14)
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    """One connection: aiohttp's, with a clock for heads and words of ours for what is no request."""

    __slots__ = ("_clock",)

    def __init__(self, manager: web.Server, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._clock: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Take bytes in; those that end no head begin one, or go on with it."""
        super().data_received(data)
        if self._waits_for_head:
            if self._clock is None:
                self._clock = self._loop.call_later(HEAD_SECONDS, self._too_slow)
        elif self._clock is not None:
            self._stop_clock()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the clock, too."""
        self._stop_clock()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is no request: in JSON, and the connection is closed. Whoever scans ports must not fill the log."""
        if status != _BAD_REQUEST or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        log.debug("no request from %s", request.remote, exc_info=exc)
        said = (message or "").strip().partition("\n")[0][:_SHOWN].rstrip(": ")
        error = {"message": f"this is no HTTP request: {said}", "type": "invalid_request_error", "param": None, "code": status}
        answer = web.Response(body=msgspec.json.encode({"error": error}), status=status, content_type="application/json")
        answer.force_close()
        return answer

    @property
    def _waits_for_head(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _too_slow(self) -> None:
        self._clock = None
        if self._waits_for_head:
            log.info("a connection is closed: its request's head did not end within %g s", HEAD_SECONDS)
            self.force_close()

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
