"""A segmented body arrives as one body, whatever the segments."""

import pytest
from aiohttp import web

from tests.engine.listening import listening
from tokencache.engine.upstream import Upstream

LONG = b"1234567," * 200_000  # too long to be joined


@pytest.mark.parametrize(
    "segments",
    [(b"{}",), (b"{", b'"a":1', b"}"), (b"[", LONG, LONG, b"1]"), (memoryview(b"[1,2")[:2], b"", b"]")],
    ids=["one", "few", "long", "views"],
)
async def test_segments_arrive_in_order(segments):
    received = []

    async def receive(request):
        received.append((request.headers["Content-Length"], await request.read()))
        return web.Response()

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/", receive)
    async with listening(app) as url:
        upstream = Upstream(url)
        await upstream.open()
        try:
            for _ in range(2):  # the second on the same connection
                answer = await upstream.send("POST", "/", body=segments)
                assert answer.status == 200
                assert await answer.read() == b""
        finally:
            await upstream.close()
    whole = b"".join(segments)
    assert received == [(str(len(whole)), whole)] * 2
