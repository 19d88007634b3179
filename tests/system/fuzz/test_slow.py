"""Slow senders: a slow head or body holds a connection for a bounded time, and other clients do not wait for it."""

import asyncio
import io
from urllib.parse import urlsplit

import pytest

from tests.proxy.kit import proxied
from tests.proxy.raw import read_message
from tests.support.waiting import PATIENCE
from tests.system.fuzz.kit import ASK, Strict, answers, request
from tokencache.proxy import request_body
from tokencache.server import http_guard


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    monkeypatch.setattr(http_guard, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(request_body, "PIECE_SECONDS", 0.3)


async def connected(url):
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def dribble(url, raw, *, every=0.01):
    """Sends a byte at a time until the server closes the connection; returns its answer."""
    reader, writer = await connected(url)
    received = asyncio.create_task(reader.read())
    try:
        async with asyncio.timeout(PATIENCE):
            for byte in raw:
                if received.done() or writer.is_closing():
                    break
                writer.write(bytes([byte]))
                await asyncio.wait([received], timeout=every)
            return await received
    except ConnectionError:
        return b""
    finally:
        received.cancel()
        writer.close()
        await asyncio.gather(received, writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X-A: b\r\n" * 10_000, b"\r\n" * 100_000, b"GET /" + b"a" * 60_000],
    ids=["headers", "lines", "path"],
)
async def test_a_slow_head(target, raw):
    assert await dribble(target.url, raw) == b""
    await target.unharmed()


async def test_a_slow_head_after_a_normal_request(target):
    """On a connection that was used normally before."""
    received = await dribble(target.url, request(ASK) + b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 10_000, every=0)
    assert received == b"" or answers(received)[0][0] == 200
    await target.unharmed("attack")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/tokenize"])
async def test_a_slow_body(target, path):
    reader, writer = await connected(target.url)
    writer.write(request(b"", b"Content-Length: 100000", path=path, length=False))
    received = asyncio.create_task(read_message(reader, answers="POST"))
    try:
        async with asyncio.timeout(PATIENCE):
            while not received.done():
                writer.write(b" ")
                await asyncio.wait([received], timeout=0.01)
            answer = await received
    finally:
        received.cancel()
        writer.close()
        await asyncio.gather(received, writer.wait_closed(), return_exceptions=True)
    assert (" 408 " in answer.line, b"too slowly" in answer.body) == (True, True)
    await target.unharmed("attack")


async def test_a_slow_relayed_body():
    """It is given up on both sides: no engine keeps half a request for it."""
    engine = Strict()
    async with engine.serve() as up, proxied(upstream=up) as rig:
        reader, writer = await connected(rig.url)
        writer.write(request(b"[", b"Content-Length: 100000", path="/t/x", session=None, length=False))
        async with asyncio.timeout(PATIENCE):
            answer = await read_message(reader, answers="POST")
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    assert " 502 " in answer.line
    assert not engine.asked()


async def test_idle_connections_stay_open(target):
    """Clients keep connections in a pool: one stays usable when another's head has timed out."""
    reader, writer = await connected(target.url)
    assert await dribble(target.url, b"GET /" + b"a" * 60_000) == b""
    writer.write(request(ASK, b"Connection: close"))
    async with asyncio.timeout(PATIENCE):
        (answer,) = answers(await reader.read())
    assert answer[0] == 200
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_hundred_slow_connections(target):
    """Meanwhile the well-behaved session continues."""
    held = [await connected(target.url) for _ in range(100)]
    for n, (_, writer) in enumerate(held):
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHo" if n % 2 else request(b"{", b"Content-Length: 9", session=f"x{n}", length=False)
        )
    await target.unharmed()
    async with asyncio.timeout(PATIENCE):
        received = await asyncio.gather(*(read_message(reader, answers="POST") for reader, _ in held), return_exceptions=True)
    assert all(isinstance(one, asyncio.IncompleteReadError | ConnectionError) for one in received[1::2])
    assert all(" 408 " in one.line for one in received[::2])
    for _, writer in held:
        writer.close()
    for n in range(0, 100, 2):
        info = await target.rig.store.session(f"x{n}")
        assert ([one.kind for one in info.incidents], info.turns) == (["client-gone"], 0), "nothing began"


async def test_an_engine_that_reads_slowly_does_not_time_out_the_sender(target):
    """Only waiting for the sender counts: a complete body is never too slow."""
    async with target.rig.http.post(target.url + "/t/x", data=io.BytesIO(b"x" * 2_000_000)) as answer:
        assert answer.status in {404, 405}
