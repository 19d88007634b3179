"""Forwards a request to an engine byte for byte, and returns its answer, with streaming and back-pressure in both directions.

This serves all requests without a session, and the engine's routes that the proxy does not serve itself. Only headers that belong to a
single connection are removed.
"""

from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.engine.connections import Answer
from tokencache.engine.pool import Pool
from tokencache.engine.upstream import Upstream, error_text
from tokencache.errors import EngineError, UnexpectedAnswerError, is_error
from tokencache.net import end_to_end_headers
from tokencache.proxy.request_body import DECOMPRESSED, arriving, whole_body_of
from tokencache.proxy.response import open_response, whole_response
from tokencache.request_memory import holding_of

LIST_MODELS = ("GET", "/v1/models")
"""The request for the served models."""
_FIRST_HOP = frozenset({"host", "expect"})


async def relay_to(
    pool: Pool,
    session: str | None,
    request: web.Request,
    path: str,
    *,
    headers: CIMultiDict[str] | None = None,
    body: bytes | None = None,
    before_answer: Callable[[int], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Relay a request to the first of a session's engines that accepts a connection; without a session the engines take turns.

    If there are several models, the member `model` of the body decides, otherwise the first one serves the request.

    Args:
        pool: the engines.
        session: the session's name; `None` without a session.
        request: the request.
        path: path and query at the engine.
        headers: headers to send instead of the request's own.
        body: body to send instead of the request's own, for example because it was read already.
        before_answer: is given the answer's status before the client receives any of it. What it raises is raised here.

    Raises:
        HarnessError: no engine serves the model that the body names.
        EngineError: no engine can be reached, one failed after the request was sent, or, in a session, the answer is neither success nor
            error. Nothing was sent to the client.
    """
    model = ""
    if len(pool.groups) > 1:
        if session is None and (request.method, path.partition("?")[0]) == LIST_MODELS:
            return await all_models(pool)
        model = _model_in(await whole_body_of(request) if body is None and request.body_exists else body or b"")
        await pool.check_model(model)
    engines = pool.order(session, model)
    for engine in engines:
        try:
            if session is not None and headers is not None and engine.driver.names_sessions:
                engine.driver.name_session(headers, session)
            answer = await _send(request, engine.upstream, path, headers, body)
            break
        except EngineError as why:
            if why.reached or engine is engines[-1]:
                raise
            pool.mark_down(engine, why)
    try:
        if session is not None and UnexpectedAnswerError.is_one(answer.status):
            raise UnexpectedAnswerError(answer.status)
        if before_answer is not None:
            await before_answer(answer.status)
        return await _pass_back(request, answer, whole=session is not None and is_error(answer.status))
    finally:
        answer.close()


async def all_models(pool: Pool) -> web.Response:
    """Answer `GET /v1/models` with the models of all groups."""
    listed = await pool.list_models()
    return web.Response(body=msgspec.json.encode({"object": "list", "data": [*listed.values()]}), content_type="application/json")


class _Body(msgspec.Struct):
    model: str = ""


def _model_in(body: bytes) -> str:
    """Return the model that a body names; `""` if it names none."""
    try:
        return msgspec.json.decode(body, type=_Body).model
    except (ValueError, RecursionError):
        return ""


async def _send(request: web.Request, upstream: Upstream, path: str, headers: CIMultiDict[str] | None, body: bytes | None) -> Answer:
    sent = end_to_end_headers(request.headers, drop=_FIRST_HOP) if headers is None else headers
    if body is None and request.body_exists:
        body = holding_of(request).body
        if DECOMPRESSED in request:
            sent.popall("Content-Encoding", None)
    streamed = arriving(request) if body is None and request.body_exists else None
    answer = await upstream.send(request.method, path, headers=sent, body=streamed if body is None else body)
    metrics.RELAYED.labels(str(answer.status)).inc()
    return answer


async def _pass_back(request: web.Request, answer: Answer, *, whole: bool) -> web.StreamResponse:
    """Return an answer as it arrives, or as a `whole` error without the engine's address. If it breaks off, close the connection too."""
    response = open_response(answer)
    try:
        if whole:
            return whole_response(answer, error_text(await answer.read(partial(holding_of(request).take, "reply")), answer))
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
    except (aiohttp.ClientError, ConnectionResetError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response
