"""The HTTP client towards the engine: one pool for everything, without a limit of its own.

No total timeout: an agent's turn takes as long as it takes, and a proxy must not be the first to give up. Connections
that lie idle are dropped before vLLM's server drops them (uvicorn: 5 s), else a call could meet a closed one.
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
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from tokencache.errors import EngineError
from tokencache.net import keep_alive

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 4.0
READ_BUFFER = 256 * 1024
_LARGE = 2**20
_REMIND_SECONDS = 60.0


class EngineResponse(NamedTuple):
    """A whole answer: status, body."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Decode the body; `None` if it is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (ValueError, RecursionError):
            return None


class _Request(aiohttp.ClientRequest):
    """A request with the headers that it was given, and none that aiohttp would add.

    It can be told so with each request (`skip_auto_headers`), and then takes twice as long to make one (3.14; 10 µs).
    """

    _skip_auto_headers = CIMultiDict[None]((name, None) for name in ("Accept", "Accept-Encoding", "Content-Type", "User-Agent"))

    def update_auto_headers(self, skip_auto_headers: Iterable[str] | None) -> None:
        """Add none."""


class Upstream:
    """An engine's base URL (scheme, host, port, and perhaps a path in front of `/v1`) and a pool of connections to it.

    `key` takes the place of what the harness sends as `Authorization`; so do a user and a password in the URL, which `url` is without.
    """

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._authorization = f"Bearer {key}" if key else ""
        if (given := URL(self.url)).user is not None:
            self.url = str(given.with_user(None)).rstrip("/")  # it is shown in logs and answers
            basic = base64.b64encode(f"{given.user}:{given.password or ''}".encode()).decode()
            self._authorization = self._authorization or f"Basic {basic}"
        self._session: aiohttp.ClientSession | None = None
        self._awaited = 0
        self._answering: weakref.WeakSet[aiohttp.ClientResponse] = weakref.WeakSet()
        self._said_short = -math.inf

    async def open(self) -> None:
        """Open the pool, in the running event loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket),
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
        if self._session is not None:
            await self._session.close()

    @property
    def under_way(self) -> int:
        """How many requests of `send` have begun and not ended; those of `get` and `post`, which are our own, do not count."""
        return self._awaited + sum(not answer.closed for answer in self._answering)

    async def send(self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: Any = None) -> aiohttp.ClientResponse:
        """Send a request and return as soon as the answer's head is there; the caller releases or closes it.

        `path` is taken as it is, percent-encoding and query included.

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
        if self._session.closed:
            raise EngineError(f"the engine at {self.url} was removed", reached=False)
        url = URL(self.url + path, encoded=True)
        sent = CIMultiDict(headers or {})
        if self._authorization:
            sent.popall("Authorization", None)
            sent["Authorization"] = self._authorization
        if isinstance(body, bytes) and len(body) > _LARGE:
            body = io.BytesIO(body)  # written in pieces, so that other calls get their turn
        try:
            return await self._session.request(method, url, headers=sent, data=body, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as why:
            said = why.os_error if isinstance(why, aiohttp.ClientConnectorError) else why
            self._look_whether_short(said)
            raise EngineError(f"the engine at {self.url} cannot be reached: {said or why}", reached=False) from why
        except (aiohttp.ClientError, TimeoutError) as why:
            raise EngineError(f"the engine at {self.url} gave no answer: {_said(why)}") from why

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """Post JSON (bytes as they are, anything else encoded) and read the whole answer.

        Raises:
            EngineError: the engine cannot be reached or broke off.
        """
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self._whole(await self._send("POST", path, {**(headers or {}), "Content-Type": "application/json"}, data))

    async def get(self, path: str) -> EngineResponse:
        """Get and read the whole answer.

        Raises:
            EngineError: the engine cannot be reached or broke off.
        """
        return await self._whole(await self._send("GET", path, None, None))

    async def connect(self) -> None:
        """Open a connection and close it, without a request: only that somebody listens is asked.

        Raises:
            EngineError: the engine cannot be reached.
        """
        url = URL(self.url)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(url.host, url.port)
        except (OSError, TimeoutError) as why:
            self._look_whether_short(why)
            raise EngineError(f"the engine at {self.url} cannot be reached: {why or 'no connection in time'}", reached=False) from why
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _look_whether_short(self, why: BaseException) -> None:
        """Say, once a minute, that it is not the engine that is at fault."""
        if isinstance(why, OSError) and why.errno in {errno.EMFILE, errno.ENFILE} and time.monotonic() - self._said_short > _REMIND_SECONDS:
            self._said_short = time.monotonic()
            log.error("OUT OF FILE DESCRIPTORS: no connection to the engine at %s can be made; raise the limit of open files", self.url)

    async def _whole(self, response: aiohttp.ClientResponse) -> EngineResponse:
        try:
            async with response:
                return EngineResponse(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as why:
            raise EngineError(f"the engine at {self.url} broke off its answer: {_said(why)}") from why


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    keep_alive(made)
    return made


def _said(why: Exception) -> str:
    """What an error says, without the URL that was asked for: its query may hold a harness's own key."""
    return f"{type(why).__name__}: {why.message if isinstance(why, aiohttp.ClientResponseError) else why}"
