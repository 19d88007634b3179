"""Forwards a request to an engine byte for byte, and returns its answer, with streaming and back-pressure in both directions.

This serves all requests without a session, and the engine's routes that the proxy does not serve itself. Only headers that belong to a
single connection are removed.
"""

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.engine.pool import Pool
from tokencache.engine.upstream import Upstream
from tokencache.errors import EngineError
from tokencache.net import end_to_end_headers
from tokencache.proxy.request_body import KEPT, arriving
from tokencache.proxy.response import open_response

_FIRST_HOP = frozenset({"host", "expect"})


async def relay_to(
    pool: Pool,
    session: str | None,
    request: web.Request,
    path: str,
    *,
    headers: CIMultiDict[str] | None = None,
    body: bytes | None = None,
) -> web.StreamResponse:
    """Relay a request to the first of a session's engines that accepts a connection; without a session the engines take turns.

    Args:
        pool: the engines.
        session: the session's name; `None` without a session.
        request: the request.
        path: path and query at the engine.
        headers: headers to send instead of the request's own.
        body: body to send instead of the request's own, for example because it was read already.

    Raises:
        EngineError: no engine can be reached, or one failed after the request was sent. Nothing was sent to the client.
    """
    *others, last = pool.order(session)
    for engine in others:
        try:
            return await _relay(request, engine.upstream, path, headers, body)
        except EngineError as why:
            if why.reached:
                raise
            pool.mark_down(engine, why)
    return await _relay(request, last.upstream, path, headers, body)


async def _relay(
    request: web.Request, upstream: Upstream, path: str, headers: CIMultiDict[str] | None, body: bytes | None
) -> web.StreamResponse:
    sent = end_to_end_headers(request.headers, drop=_FIRST_HOP) if headers is None else headers
    if body is None and KEPT in request:
        body = request[KEPT]
    streamed = arriving(request) if body is None and request.body_exists else None
    answer = await upstream.send(request.method, path, headers=sent, body=streamed if body is None else body)
    metrics.RELAYED.labels(str(answer.status)).inc()
    return await _pass_back(request, answer)


async def _pass_back(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Return an answer as it arrives; if it breaks off, close the client's connection too."""
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
