"""Sends the simulated engine's responses: JSON, server-sent events and refusals, and carries out faults."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from tokencache.testing import wire
from tokencache.testing.completion import Completion
from tokencache.testing.errors import RefusalResponse
from tokencache.testing.faults import Fault, FaultKind

_FINISHES = b'"finish_reason":"'


async def stream_reply(http: web.Request, completion: Completion, fault: Fault | None) -> web.StreamResponse:
    """Send a completion as server-sent events, until a fault ends it."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **completion.headers})
    await response.prepare(http)
    sent = 0
    async for data in completion.stream():
        if fault is not None and fault.kind is FaultKind.STALL:
            if _FINISHES in data:
                await asyncio.Event().wait()
        elif fault is not None and fault.kind not in {FaultKind.TRUNCATED, FaultKind.ABORT} and sent >= fault.after:
            completion.abort()
            if fault.kind is FaultKind.CLOSE:
                _hang_up(http)
                return response
            if fault.kind is FaultKind.ERROR_EVENT:
                kind = "InternalServerError" if fault.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "BadRequestError"
                await response.write(_error_event(RefusalResponse(fault.body.decode(), kind=kind, status=fault.status)))
            break
        await response.write(data)
        sent += 1
    else:
        await response.write(wire.DONE)
    await response.write_eof()
    return response


async def stream_refusal(http: web.Request, refusal: RefusalResponse) -> web.StreamResponse:
    """Send a refusal as an event of a stream that has begun."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    await response.write(_error_event(refusal))
    await response.write_eof()
    return response


def _error_event(refusal: RefusalResponse) -> bytes:
    """Encode an error as the last event of a stream. vLLM's JSON has spaces here, and only here."""
    return b"data: " + json.dumps(refusal.body(), ensure_ascii=False).encode() + b"\n\n" + wire.DONE


async def fail_request(http: web.Request, fault: Fault) -> web.StreamResponse:
    """Fail before anything is generated."""
    match fault.kind:
        case FaultKind.HANG:
            await asyncio.Event().wait()
        case FaultKind.STATUS:
            return web.Response(status=fault.status, body=fault.body, content_type=fault.content_type)
        case FaultKind.TRUNCATED:
            return web.Response(body=b'{"count": 1', content_type="application/json")
        case _:
            _hang_up(http)
    return web.Response()


def _hang_up(http: web.Request) -> None:
    """Close the connection without a response."""
    if http.transport is not None:
        http.transport.abort()


@web.middleware
async def refuse(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Send refusals and unknown routes with the bodies that vLLM sends."""
    try:
        return await handler(request)
    except RefusalResponse as refusal:
        return json_response(refusal.body(), status=refusal.status, headers=refusal.headers)
    except web.HTTPException as error:
        return json_response({"detail": error.reason}, status=error.status)
    except ConnectionError:  # the client has left, as at Ctrl-C in the demo
        return web.Response()


async def empty_response(_: web.Request) -> web.Response:
    """Send an empty 200, as health checks do."""
    return web.Response()


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Make a response with a JSON body."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json", headers=headers)
