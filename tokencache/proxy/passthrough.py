"""Relay: a request and its answer passed on byte for byte, with streaming and back-pressure both ways.

Used for everything outside a session and for every route that is not ours. Only what belongs to a single connection
(hop-by-hop headers, RFC 9110 §7.6.1) is not passed on.
"""

from collections.abc import Iterable

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.engine.pool import Pool
from tokencache.engine.upstream import Upstream
from tokencache.errors import EngineError
from tokencache.proxy.request_body import KEPT, arriving

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def forwarded(headers: Iterable[tuple[str, str]], connection: str, *, drop: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Copy headers without those of one connection (named by RFC 9110 or by `connection`) and those in `drop` (lower case)."""
    named = {name.strip().lower() for name in connection.split(",")}
    gone = _HOP_BY_HOP | named | drop
    return CIMultiDict([(name, value) for name, value in headers if name.lower() not in gone])


def request_headers(request: web.Request, *, drop: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """The headers of a request as they go on to the engine."""
    return forwarded(request.headers.items(), request.headers.get("Connection", ""), drop=drop | {"host", "expect"})


class _Relayed(web.StreamResponse):
    """An answer that leaves with the headers it came with, and no others."""

    given: frozenset[str] = frozenset()


def open_response(answer: aiohttp.ClientResponse, *, drop: frozenset[str] = frozenset()) -> web.StreamResponse:
    """Begin a response with the status, reason and headers of the engine's."""
    headers = forwarded(answer.headers.items(), answer.headers.get("Connection", ""), drop=drop)
    response = _Relayed(status=answer.status, reason=answer.reason, headers=headers)
    response.given = frozenset(name.lower() for name in headers)
    return response


class _RelayedWhole(_Relayed, web.Response):
    """The same with a whole body: head and body leave in one write, and wake the harness once."""


def whole_response(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    """Answer with the status, reason and headers of the engine's, and this body."""
    headers = forwarded(answer.headers.items(), answer.headers.get("Connection", ""), drop=frozenset({"content-length"}))
    response = _RelayedWhole(status=answer.status, reason=answer.reason, headers=headers, body=body)
    response.given = frozenset(name.lower() for name in headers)
    return response


async def keep_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Take back the headers that aiohttp gives to a relayed answer that came without them (on_response_prepare)."""
    if isinstance(response, _Relayed):
        for name in ("Content-Type", "Server"):
            if name.lower() not in response.given:
                response.headers.popall(name, None)


async def relay(
    request: web.Request, upstream: Upstream, path: str, *, headers: CIMultiDict[str] | None = None, body: bytes | None = None
) -> web.StreamResponse:
    """Pass a request on and its answer back; `body` if it was read already.

    Raises:
        EngineError: the engine cannot be reached; nothing was answered yet.
    """
    sent = request_headers(request) if headers is None else headers
    if body is None and KEPT in request:
        body = request[KEPT]
    streamed = arriving(request) if body is None and request.body_exists else None
    answer = await upstream.send(request.method, path, headers=sent, body=streamed if body is None else body)
    metrics.RELAYED.labels(str(answer.status)).inc()
    return await pass_on(request, answer)


async def relay_to(
    pool: Pool,
    session: str | None,
    request: web.Request,
    path: str,
    *,
    headers: CIMultiDict[str] | None = None,
    body: bytes | None = None,
) -> web.StreamResponse:
    """Relay to the first of a session's engines that can be connected to; without a session they take turns.

    Raises:
        EngineError: none can, or one failed where it may have been heard; nothing was answered yet.
    """
    *others, last = pool.order(session)
    for engine in others:
        try:
            return await relay(request, engine.upstream, path, headers=headers, body=body)
        except EngineError as why:
            if why.reached:
                raise
            pool.lost(engine, why)
    return await relay(request, last.upstream, path, headers=headers, body=body)


async def pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass an answer back as it comes; where it breaks off, break off too."""
    response = open_response(answer)
    try:
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except (aiohttp.ClientError, ConnectionResetError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    finally:
        answer.close()
    return response
