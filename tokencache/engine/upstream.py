"""Sends HTTP requests to one engine.

The number of connections and the total time of a request have no limit: an agent's turn may take long, and a proxy must not give up before
its client does.

A kept connection that is reset when it is used again may have carried the request to the engine: only requests that sample nothing are then
repeated (`Upstream.query`).
"""

import asyncio
import base64
import contextlib
import errno
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from tokencache.backoff import delays
from tokencache.engine.connections import CONNECT_SECONDS, Answer, Body, Connections, Segments
from tokencache.errors import OK, EngineError, OutOfFilesError
from tokencache.net import without_address

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.05, 1.0
"""Seconds before a request is repeated by `Upstream.query`."""
_RETRIES = 3
MOST_ANSWER = 256 * 2**20
"""Bytes of an answer to one of the proxy's own requests."""
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


def segmented_body(*segments: bytes | memoryview) -> bytes | Segments:
    """Make a request body of segments; a short one is joined.

    The ids of a long history are hundreds of kilobytes of digits, which would be copied for every call to join them with the messages.
    """
    return segments if sum(map(len, segments)) > _SEGMENTED_FROM else b"".join(segments)


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
        self._base = URL(self.url)
        self._connections: Connections | None = None
        self._closed = False
        self._awaited = 0
        self._warned = -math.inf

    async def open(self) -> None:
        """Open the pool, in the running event loop."""
        self._closed = False
        self._connections = Connections(self._base)

    async def close(self) -> None:
        """Close the pool."""
        self._closed = True
        if self._connections is not None:
            await self._connections.close()

    @property
    def under_way(self) -> int:
        """Number of requests of `send` that have started and not ended. The proxy's own requests (`get`, `post`) do not count."""
        return self._awaited + (len(self._connections.answering) if self._connections is not None else 0)

    async def send(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: Body = None, counted: bool = True
    ) -> Answer:
        """Send a request and return when the head of the answer has arrived; the caller must read the answer to its end, or close it.

        `path` is sent unchanged, with its percent-encoding and query. `counted` is whether it counts as under way.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection without an answer.
        """
        if self._connections is None:
            raise RuntimeError("Upstream.open() has not been called")
        if self._closed:
            raise EngineError("the engine was removed", private=self.url, reached=False)
        sent = headers or {}
        if self._authorization:
            sent = CIMultiDict(sent)
            sent.popall("Authorization", None)
            sent["Authorization"] = self._authorization
        self._awaited += counted
        try:
            answer = await self._connections.request(method, self._base.raw_path.rstrip("/") + path.partition("#")[0], sent, body)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as why:
            cause = why.os_error if isinstance(why, aiohttp.ClientConnectorError) else why
            raise self._unreachable(cause, str(cause or why)) from why
        except (aiohttp.ClientError, HttpProcessingError, TimeoutError) as why:
            raise EngineError("the engine gave no answer", private=f"{self.url}: {type(why).__name__}: {why}") from why
        finally:
            self._awaited -= counted
        if counted and answer.connection is not None:
            self._connections.answering.add(answer)
        return answer

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """Post JSON (bytes unchanged, anything else encoded) and read the complete answer.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection before the end of its answer.
        """
        return await self.query(path, body, headers, repeats=0)

    async def get(self, path: str) -> EngineResponse:
        """Send a GET request and read the complete answer.

        Raises:
            EngineError: the engine cannot be reached, or closed the connection before the end of its answer.
        """
        return await self.query(path, repeats=0)

    async def query(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, repeats: int = _RETRIES
    ) -> EngineResponse:
        """Send a request that is safe to repeat, because it samples nothing that is recorded, until it is answered.

        It is repeated up to `repeats` times. With a body it is sent as by `post`, without one as by `get`. A closed connection proves
        nothing about an engine: uvicorn closes the connection after each 500, and a request may be sent at that moment.

        Raises:
            EngineError: the engine cannot be reached, or closed every connection before the end of its answer.
        """
        method, data = ("GET", None) if body is None else ("POST", body if isinstance(body, bytes) else msgspec.json.encode(body))
        typed = None if body is None else {**(headers or {}), "Content-Type": "application/json"}
        pauses: Iterator[float] | None = None
        while True:
            try:
                answer = await self.send(method, path, headers=typed, body=data, counted=False)
                read = await answer.read(most=MOST_ANSWER)
                return EngineResponse(answer.status, read if answer.status == OK else error_text(read, answer), answer.headers)
            except (aiohttp.ClientError, TimeoutError) as why:
                failure = EngineError("the engine broke off its answer", private=f"{self.url}: {type(why).__name__}: {why}")
                failure.__cause__ = why
            except EngineError as why:
                failure = why
            pauses = pauses or islice(delays(FIRST_DELAY, LONGEST_DELAY, factor=5.0), repeats)
            pause = next(pauses, None)
            if pause is None or not failure.reached:
                raise failure
            log.debug("engine %s: the request to %s is sent again in %g s: %s", self.url, path, pause, failure)
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
        error = OutOfFilesError if short else EngineError
        return error("the engine cannot be reached", private=f"{self.url}: {described}", reached=False)


class Sidecar(Upstream):
    """A server that renders and parses for the engines. If it cannot be reached, the calls wait, and no engine counts as down."""

    async def query(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, repeats: int = _RETRIES
    ) -> EngineResponse:
        """See `Upstream.query`."""
        try:
            return await super().query(path, body, headers, repeats=repeats)
        except EngineError as why:
            if why.reached:
                raise
            raise EngineError("the render sidecar cannot be reached", private=why.private, status=HTTPStatus.SERVICE_UNAVAILABLE) from why


def error_text(body: bytes, answer: Answer) -> bytes:
    """Return an engine's error for a client, without the engine's address."""
    return without_address(body.decode(errors="surrogateescape"), answer.url).encode(errors="surrogateescape")
