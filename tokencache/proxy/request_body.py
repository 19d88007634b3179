"""Intake: a request's body, as far as it is taken in.

A body is refused, in words, that is

    too slow            slower than `PACE` bytes a second after `PATIENCE` seconds, or it would hold memory and a socket for ever (408);
                        only time spent waiting for the sender counts, never what an engine takes to read
    compressed          a few kilobytes can hold gigabytes, and no harness is known to send one to an engine that would take it (415)
    too many values     every call of every session waits while one body is read. Bytes cost little, values do: a million messages take
                        longer to read than the longest history that a model can take has (413)

and one that is larger than `--max-body` (413).
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError

from tokencache.errors import HarnessError

PATIENCE, PACE = 60.0, 500
"""Seconds that a sender may be silent at least; bytes that it has to send for each second more."""
MOST_OBJECTS, MOST_VALUES = 100_000, 1_000_000
"""JSON objects, and values in lists and objects. A turn of an agent with one tool call is about eight objects."""
_SMALL = 3 * MOST_OBJECTS
"""Bytes; a shorter body cannot have that many: an object is two, and something between it and the next."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A text, or the rest where one has no end: it must never be looked for again from its middle."""
_AT_ONCE = 2000
_TOO_SLOW, _TOO_LARGE, _UNSUPPORTED = 408, 413, 415


KEPT = web.RequestKey("kept", bytes)
"""The body of a request that was read before its session was known; it takes the place of what came over the connection."""


async def body_of(request: web.Request) -> bytes:
    """Read the whole body of a request that we read ourselves.

    Raises:
        HarnessError: it is refused.
        HTTPRequestEntityTooLarge: it is longer than `--max-body`.
    """
    if KEPT in request:
        return request[KEPT]
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in {"identity", ""}:
        raise HarnessError(f"the request's body is compressed ({coding[:40]}): send it as it is", status=_UNSUPPORTED)
    try:
        body = await _whole(request)
    except (web.RequestPayloadError, ClientPayloadError) as why:
        raise HarnessError(f"the request's body broke off: {type(why).__name__}") from None
    await check_values(body)
    return body


async def _whole(request: web.Request) -> bytes:
    """Not by `request.read()`: it copies a body twice."""
    content, most = request.content, request.client_max_size
    if content.is_eof():
        body = content.read_nowait()  # mostly one chunk, and no copy
    else:
        chunks = []
        async with aclosing(arriving(request)) as coming:
            async for chunk in coming:
                chunks.append(chunk)
                if content.total_bytes > most:
                    break
        body = b"".join(chunks)
    if content.total_bytes > most:
        raise web.HTTPRequestEntityTooLarge(most)
    return body


async def arriving(request: web.Request) -> AsyncGenerator[bytes, None]:
    """Give out a body as it comes, for who passes it on.

    Raises:
        HarnessError: it comes too slowly.
    """
    loop, content, waited = asyncio.get_running_loop(), request.content, 0.0
    while True:
        asked = loop.time()
        try:
            async with asyncio.timeout(_allowed(content.total_bytes) - waited):
                chunk = await content.readany()
        except TimeoutError:
            raise _slow(content.total_bytes) from None
        if not chunk:
            return
        waited += loop.time() - asked
        yield chunk


def _allowed(received: int) -> float:
    return PATIENCE + received / PACE


def _slow(received: int) -> HarnessError:
    return HarnessError(f"the request's body comes too slowly: {received} bytes until now", status=_TOO_SLOW)


async def check_values(body: bytes) -> None:
    """Refuse JSON of too many values. One that may have them is counted a piece at a time, so that others get their turn.

    Raises:
        HarnessError: it has.
    """
    if len(body) < _SMALL:
        return
    if body.count(b"{") <= MOST_OBJECTS and (len(body) <= MOST_VALUES or body.count(b",") + body.count(b"[") <= MOST_VALUES):
        return
    objects = values = at = 0
    for place, text in enumerate(_STRING.finditer(body)):  # what stands in a text is no structure
        objects += body.count(b"{", at, text.start())
        values += body.count(b",", at, text.start()) + body.count(b"[", at, text.start())
        at = text.end()
        if objects > MOST_OBJECTS or values > MOST_VALUES:
            break
        if place % _AT_ONCE == 0:
            await asyncio.sleep(0)
    objects += body.count(b"{", at)
    values += body.count(b",", at) + body.count(b"[", at)
    if objects > MOST_OBJECTS or values > MOST_VALUES:
        raise HarnessError(f"the request has more than {MOST_OBJECTS} objects, or {MOST_VALUES} values, in its JSON", status=_TOO_LARGE)
