"""Reads the body of a request, and refuses a body that would slow down other calls too much.

A body is refused with an error message if it

- arrives too slowly (408): each `PIECE` of it, or its end, must arrive within `PIECE_SECONDS`. It would keep memory and a socket endlessly.
  Only time spent waiting for the client counts, not time that an engine takes to read;
- would hold more memory than requests may (503, `request_memory`);
- is compressed in a way that `compressed_body` does not read (415), or damaged (400);
- has too many values (413): all calls wait while one body is parsed. The number of values determines the time, not the number of bytes: a
  million messages take longer to parse than the longest history that fits a model;
- is larger than `--max-body` (413), compressed or decompressed. One that announces its length is refused before any of it is read.

A client that waits for `100 Continue` (`Expect`) gets it when its body is read. If it is answered before, its connection is closed: nobody
knows whether it will send the body.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from http import HTTPStatus

from aiohttp import HttpVersion11, web
from aiohttp.client_exceptions import ClientPayloadError

from tokencache.errors import BodyTooLargeError, HarnessError, MemoryFullError, SlowBodyError
from tokencache.pauses import LARGE, pause
from tokencache.proxy.compressed_body import coding_of, decompressed
from tokencache.proxy.fetched_media import FetchedMedia
from tokencache.proxy.sessions import SessionRequest, SettingsCache
from tokencache.request_memory import Holding, holding_of
from tokencache.store.clock import RECORD_CLOCK

PIECE_SECONDS = 60.0
PIECE = 960 * 1024
"""Bytes that must arrive within `PIECE_SECONDS` unless the body ends: 16 KiB per second, which a phone's connection manages. A client that
stops is found within that time, however much it has sent."""
LATE_SECONDS = 1.0
"""If a timer of a head or a body fires so late, this process was busy, or stopped: it first reads what arrived meanwhile."""
_LARGE = 2**20
"""Bytes of a body from which on its owner is checked before it is read."""
MOST_OBJECTS, MOST_VALUES = 100_000, 1_000_000
"""Limits for JSON objects, and for values in lists and objects. A turn of an agent with one tool call has about eight objects."""
_SMALL = min(LARGE, 3 * MOST_OBJECTS, MOST_VALUES)
"""Bytes. A body of at most this length has neither too many objects, which take two bytes and a comma each, nor too many values. It is read
without pauses."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or the rest of the body if a string has no end, so that the search never restarts within a string."""
_BETWEEN_PAUSES = 2000
"""Number of strings that are skipped before other calls may run."""


DECOMPRESSED = web.RequestKey("decompressed", bool)
"""The body that a request holds is not compressed, whatever its `Content-Encoding` says."""
_WAITS = web.RequestKey("waits", bool)
"""The client of a request waits for `100 Continue`, and has not been sent it."""


class RequestBodies:
    """Reads the bodies of sessions' requests; `media` fetches the images that they name by URL, `None` if none are fetched."""

    def __init__(self, settings: SettingsCache, media: FetchedMedia | None) -> None:
        self._settings, self._media = settings, media

    async def read(self, asked: SessionRequest) -> bytes:
        """Read the body, decompressed, so that the engine receives it like that.

        Before a large one, check whose it is: another tenant's share must not hold it.

        Raises:
            SettingsChangedError: the session has other settings; nothing was read.
            HarnessError, BodyTooLargeError, MemoryFullError: see `body_of`.
        """
        request = asked.request
        if not asked.settings.tenant and not request.content.is_eof() and (request.content_length or _LARGE) >= _LARGE:
            await self._settings.check(asked.session, asked.settings)
        body = await body_of(request, asked.holding)
        asked.headers.popall("Content-Encoding", None)
        return body

    async def with_media(self, asked: SessionRequest, body: bytes) -> bytes:
        """Write the images that a chat request names by URL into it, if they are fetched.

        Raises:
            HarnessError: an image cannot be fetched, or the request would be larger than `--max-body`.
            MemoryFullError: requests hold as much memory as they may.
        """
        if self._media is None:
            return body
        return await self._media.written_in(asked.session, body, asked.holding, most=asked.request.client_max_size)

    async def without_addresses(self, asked: SessionRequest, body: bytes | None) -> bytes | None:
        """Return the body of a request that is relayed, as `with_media`, if images are fetched; unchanged if it is not JSON.

        Raises:
            HarnessError: as `with_media`, or it has an address elsewhere.
        """
        if self._media is None or asked.request.method != "POST":
            return body
        body = await self.read(asked) if body is None else body
        if body.lstrip()[:1] not in {b"{", b"["}:
            return body
        self._media.refuse_elsewhere(body)
        return await self.with_media(asked, body) if body.lstrip()[:1] == b"{" else body


async def body_of(request: web.Request, holding: Holding) -> bytes:
    """Read the whole body of a request of a harness, and decompress it; `holding` is what it holds.

    Raises:
        HarnessError: the body is refused.
        BodyTooLargeError: the body is longer than `--max-body`.
        MemoryFullError: requests hold as much memory as they may.
    """
    if holding.body is not None:
        return holding.body
    coding = coding_of(request) if "Content-Encoding" in request.headers else ""
    body = await _whole(request, holding)
    if coding or len(body) > _SMALL:
        holding.body = body = await plain(body, coding, request, holding)
    return body


async def plain(body: bytes, coding: str, request: web.Request, holding: Holding) -> bytes:
    """Decompress a body, `coding` is `coding_of` its request, and check its values.

    Raises:
        HarnessError, MemoryFullError: see `body_of`.
    """
    if coding and body:
        try:
            body = await decompressed(body, coding, request.client_max_size, take=partial(holding.take, "body"))
        except MemoryFullError:
            holding.give_all()
            raise
    await check_values(body)
    return body


async def whole_body_of(request: web.Request) -> bytes:
    """Read the whole body of a request, with any content; `request.read()` would wait endlessly, and copy it twice.

    Raises:
        HarnessError: the body arrives too slowly, or breaks off.
        BodyTooLargeError: the body is longer than `--max-body`.
        MemoryFullError: requests hold as much memory as they may.
    """
    holding = holding_of(request)
    return holding.body if holding.body is not None else await _whole(request, holding)


async def note_expectation(request: web.Request) -> None:
    """Note that a client waits before it sends its body (aiohttp's `expect_handler`).

    Raises:
        HTTPExpectationFailed: it expects something else.
    """
    expected = request.headers.get("Expect", "")
    if request.version == HttpVersion11:
        if expected.lower() != "100-continue":
            raise web.HTTPExpectationFailed(text=f"Unknown Expect: {expected}")
        request[_WAITS] = True


def waits_to_send(request: web.Request) -> bool:
    """Whether a client waits before it sends its body, so that nobody knows whether it will."""
    return "Expect" in request.headers and _WAITS in request and not request.content.is_eof()


async def _whole(request: web.Request, holding: Holding) -> bytes:
    content, most = request.content, request.client_max_size
    try:
        if content.is_eof():
            body = content.read_nowait()  # usually one chunk, and no copy
            holding.take("body", len(body))
        elif (request.content_length or 0) > most:
            raise BodyTooLargeError(most)
        else:
            chunks = []
            async with aclosing(arriving(request)) as coming:
                async for chunk in coming:
                    holding.take("body", len(chunk))
                    chunks.append(chunk)
                    if content.total_bytes > most:
                        break
            body = b"".join(chunks)
    except MemoryFullError:
        holding.give_all()  # before the answer is sent: other bodies, which arrive meanwhile, may then fit
        raise
    except (web.RequestPayloadError, ClientPayloadError) as why:
        raise HarnessError(f"the request's body broke off: {type(why).__name__}") from None
    if content.total_bytes > most:
        raise BodyTooLargeError(most)
    holding.body = body
    return body


async def arriving(request: web.Request) -> AsyncGenerator[bytes, None]:
    """Yield a body as it arrives.

    Raises:
        SlowBodyError: the body arrives too slowly.
    """
    loop, content, began = asyncio.get_running_loop(), request.content, RECORD_CLOCK.now()
    left, begun = PIECE_SECONDS, content.total_bytes
    if waits_to_send(request):
        del request[_WAITS]
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # no response has begun
    while True:
        asked = loop.time()
        try:
            async with asyncio.timeout(left):
                chunk = await content.readany()
        except TimeoutError:
            if loop.time() - asked - left > LATE_SECONDS:
                left = LATE_SECONDS
                continue
            raise SlowBodyError(f"the request's body arrives too slowly: {content.total_bytes} bytes so far", began=began) from None
        if not chunk:
            return
        left -= loop.time() - asked
        if content.total_bytes - begun >= PIECE:
            left, begun = PIECE_SECONDS, content.total_bytes
        yield chunk


async def check_values(body: bytes) -> None:
    """Refuse JSON with too many values. The values of a large body are counted in pieces, so that other calls may run in between.

    Raises:
        HarnessError: the body has too many values.
    """
    if len(body) <= _SMALL:
        return
    await pause()
    if body.count(b"{") <= MOST_OBJECTS and (len(body) <= MOST_VALUES or body.count(b",") + body.count(b"[") <= MOST_VALUES):
        await pause()
        return
    objects = values = at = 0
    for place, text in enumerate(_STRING.finditer(body)):  # brackets and commas within a string do not count
        objects += body.count(b"{", at, text.start())
        values += body.count(b",", at, text.start()) + body.count(b"[", at, text.start())
        at = text.end()
        if objects > MOST_OBJECTS or values > MOST_VALUES:
            break
        if place % _BETWEEN_PAUSES == 0:
            await pause()
    objects += body.count(b"{", at)
    values += body.count(b",", at) + body.count(b"[", at)
    if objects > MOST_OBJECTS or values > MOST_VALUES:
        raise HarnessError(
            f"the request has more than {MOST_OBJECTS} objects, or {MOST_VALUES} values, in its JSON",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
