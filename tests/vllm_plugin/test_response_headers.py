"""Headers that code deep in the server adds to a response, through an ASGI application."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from tokencache_vllm.response_headers import MEDIA_HEADER, PLUGIN_HEADER, ResponseHeaders, report_media

ITEMS = {"image": [SimpleNamespace(offset=146, length=4), SimpleNamespace(offset=210, length=30)], "video": []}


async def headers(serve, kind="http"):
    """The headers of the response to a request that `serve` prepares in a task of its own, as vLLM may."""
    sent = []

    async def application(_scope, _receive, send):
        await asyncio.create_task(serve())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message):
        sent.append(message)

    await ResponseHeaders(application)({"type": kind}, None, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


async def nothing():
    pass


async def test_the_places_are_a_header():
    async def serve():
        report_media(ITEMS)

    found = await headers(serve)
    assert json.loads(found.pop(MEDIA_HEADER)) == {"image": [[146, 4], [210, 30]]}
    assert found == {"content-type": "application/json", PLUGIN_HEADER: "images"}


@pytest.mark.parametrize("items", [{}, {"image": []}])
async def test_a_request_without_media_has_no_header(items):
    async def serve():
        report_media(items)

    assert await headers(serve) == await headers(nothing) == {"content-type": "application/json"}


async def test_requests_at_the_same_time_have_their_own():
    both = asyncio.Barrier(2)

    async def asked(offset):
        async def serve():
            await both.wait()
            report_media({"image": [SimpleNamespace(offset=offset, length=1)]})
            await both.wait()

        return json.loads((await headers(serve))[MEDIA_HEADER])["image"]

    assert await asyncio.gather(asked(1), asked(2)) == [[[1, 1]], [[2, 1]]]


async def test_a_value_that_clients_would_refuse_is_left_out():
    async def serve():
        report_media({"image": [SimpleNamespace(offset=at * 100_000, length=1000) for at in range(1000)]})

    assert MEDIA_HEADER not in await headers(serve)


async def test_other_protocols_pass():
    async def serve():
        report_media(ITEMS)

    assert MEDIA_HEADER not in await headers(serve, "websocket")
