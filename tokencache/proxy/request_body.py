"""Reads the body of a request, and refuses a body that would slow down other calls too much.

A body is refused with an error message if it

- arrives too slowly (408): below `MIN_RATE` bytes per second after `GRACE_SECONDS`. It would keep memory and a socket endlessly. Only time
  spent waiting for the client counts, not time that an engine takes to read;
- is compressed in a way that `compressed_body` does not read (415), or damaged (400);
- has too many values (413): all calls wait while one body is parsed. The number of values determines the time, not the number of bytes: a
  million messages take longer to parse than the longest history that fits a model;
- is larger than `--max-body` (413), compressed or decompressed.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError

from tokencache.errors import HarnessError
from tokencache.proxy.compressed_body import coding_of, decompressed

GRACE_SECONDS, MIN_RATE = 60.0, 500
"""Seconds for which a client may send nothing, and bytes per second that it must send on average after that."""
MOST_OBJECTS, MOST_VALUES = 100_000, 1_000_000
"""Limits for JSON objects, and for values in lists and objects. A turn of an agent with one tool call has about eight objects."""
_SMALL = 3 * MOST_OBJECTS
"""Bytes. A shorter body cannot contain that many objects: each takes two bytes, and a comma separates it from the next."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or the rest of the body if a string has no end, so that the search never restarts within a string."""
_BETWEEN_PAUSES = 2000
"""Number of strings that are skipped before other calls may run."""
_TOO_SLOW, _TOO_LARGE = 408, 413


KEPT = web.RequestKey("kept", bytes)
"""The body of a request that was read. It replaces the body on the connection, which can be read only once."""


async def body_of(request: web.Request) -> bytes:
    """Read the whole body of a request, and decompress it.

    Raises:
        HarnessError: the body is refused.
        HTTPRequestEntityTooLarge: the body is longer than `--max-body`.
    """
    if KEPT in request:
        return request[KEPT]
    coding = coding_of(request)
    try:
        body = await _whole(request)
    except (web.RequestPayloadError, ClientPayloadError) as why:
        raise HarnessError(f"the request's body broke off: {type(why).__name__}") from None
    if coding and body:
        body = await decompressed(body, coding, request.client_max_size)
    await check_values(body)
    request[KEPT] = body
    return body


async def _whole(request: web.Request) -> bytes:
    """Read a body; `request.read()` would copy it twice."""
    content, most = request.content, request.client_max_size
    if content.is_eof():
        body = content.read_nowait()  # usually one chunk, and no copy
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
    """Yield a body as it arrives.

    Raises:
        HarnessError: the body arrives too slowly.
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
    return GRACE_SECONDS + received / MIN_RATE


def _slow(received: int) -> HarnessError:
    return HarnessError(f"the request's body arrives too slowly: {received} bytes so far", status=_TOO_SLOW)


async def check_values(body: bytes) -> None:
    """Refuse JSON with too many values. The values of a large body are counted in pieces, so that other calls may run in between.

    Raises:
        HarnessError: the body has too many values.
    """
    if len(body) < _SMALL:
        return
    if body.count(b"{") <= MOST_OBJECTS and (len(body) <= MOST_VALUES or body.count(b",") + body.count(b"[") <= MOST_VALUES):
        return
    objects = values = at = 0
    for place, text in enumerate(_STRING.finditer(body)):  # brackets and commas within a string do not count
        objects += body.count(b"{", at, text.start())
        values += body.count(b",", at, text.start()) + body.count(b"[", at, text.start())
        at = text.end()
        if objects > MOST_OBJECTS or values > MOST_VALUES:
            break
        if place % _BETWEEN_PAUSES == 0:
            await asyncio.sleep(0)
    objects += body.count(b"{", at)
    values += body.count(b",", at) + body.count(b"[", at)
    if objects > MOST_OBJECTS or values > MOST_VALUES:
        raise HarnessError(f"the request has more than {MOST_OBJECTS} objects, or {MOST_VALUES} values, in its JSON", status=_TOO_LARGE)
