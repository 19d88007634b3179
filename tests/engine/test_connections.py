"""Requests on kept connections: what arrives belongs to its request, and a connection is used again only if that is certain."""

import asyncio
import contextlib
import ssl

import aiohttp
import pytest
import trustme
from aiohttp import web
from yarl import URL

from tests.engine.listening import listening
from tests.support.waiting import PATIENCE, until
from tokencache.engine import connections
from tokencache.engine.connections import Connections
from tokencache.pauses import LARGE


@contextlib.asynccontextmanager
async def raw_server(serve):
    """Serve each connection with a coroutine (reader, writer, number of the connection); yields the connections to it."""
    numbers = []

    async def accept(reader, writer):
        numbers.append(len(numbers) + 1)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer, numbers[-1])
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    made = Connections(URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    async with server, asyncio.timeout(PATIENCE):
        try:
            yield made
        finally:
            await made.close()


def answer_of(words, *more):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b" % (len(words), b"".join(more), words)


async def get(made, target="/"):
    return await (await made.request("GET", target, {}, None)).read()


async def test_an_answer_that_nobody_asked_for_is_not_that_of_the_next_request():
    """It comes with the first answer, or while the connection is idle."""
    stale = asyncio.Event()

    async def serve(reader, writer, number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_of(b"answer %d" % number) + (answer_of(b"stale") if number == 1 else b""))
        if number == 2:
            await stale.wait()
            writer.write(answer_of(b"stale"))
        await reader.read()

    async with raw_server(serve) as made:
        assert [await get(made), await get(made)] == [b"answer 1", b"answer 2"]
        stale.set()
        await until(lambda: len(made._idle[-1]))  # the stale answer has arrived
        assert await get(made) == b"answer 3"


async def test_an_answer_that_has_arrived_is_read_without_a_pause():
    """A client that leaves in one would take with it what the engine has sampled."""

    async def serve(reader, writer, _number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_of(b"x" * (LARGE + 1)))
        await reader.read()

    async with raw_server(serve) as made:
        answer = await made.request("GET", "/", {}, None)
        await until(answer.content.is_eof)
        with pytest.raises(StopIteration) as read:
            answer.read().send(None)
        assert len(read.value.value) == LARGE + 1


async def test_a_connection_is_not_used_again_while_its_answer_is_read_or_after_it_was_closed():
    async def serve(reader, writer, number):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer_of(b"x" * 2**22) if number == 1 else answer_of(b"answer %d" % number))

    async with raw_server(serve) as made:
        long = await made.request("GET", "/", {}, None)
        assert await get(made) == b"answer 2"
        long.close()
        with pytest.raises(aiohttp.ClientConnectionError):
            await long.read()
        assert await get(made) == b"answer 2"


async def test_the_head_of_a_continue_is_not_the_answer():
    async def serve(reader, writer, _):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + answer_of(b"yes"))

    async with raw_server(serve) as made:
        assert await get(made) == b"yes"


async def test_the_answer_to_a_head_request_has_no_body():
    async def serve(reader, writer, _):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")

    async with raw_server(serve) as made:
        for _ in range(2):
            answer = await made.request("HEAD", "/", {}, None)
            assert (await answer.read(), answer.headers["Content-Length"]) == (b"", "9")


@pytest.mark.parametrize(("method", "times"), [("GET", 2), ("POST", 1)])
async def test_only_a_safe_request_is_repeated_when_its_connection_breaks(method, times):
    asked = []

    async def serve(reader, _, number):
        await reader.readuntil(b"\r\n\r\n")
        asked.append(number)

    async with raw_server(serve) as made:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await made.request(method, "/", {}, None)
    assert len(asked) == times


@pytest.mark.parametrize("headers", [{"A": "b\r\nC: d"}, {"A\r\nC": "d"}], ids=["value", "name"])
async def test_a_header_cannot_end_the_head(headers):
    async with raw_server(lambda *_: asyncio.sleep(0)) as made:
        with pytest.raises(ValueError, match="eader"):
            await made.request("GET", "/", headers, None)


async def parts(*pieces, fails=False):
    for piece in pieces:
        yield piece
    if fails:
        raise ZeroDivisionError


@pytest.mark.parametrize("length", [{}, {"Content-Length": "6"}], ids=["chunks", "length"])
async def test_a_body_whose_parts_still_arrive(length):
    received = []

    async def receive(request):
        received.append((request.headers.get("Content-Length"), await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/", receive)
    async with listening(app) as url:
        made = Connections(URL(url))
        for _ in range(2):
            await (await made.request("POST", "/", length, parts(b"abc", b"def"))).read()
        with pytest.raises(aiohttp.ClientConnectionError):
            await made.request("POST", "/", length, parts(b"abc", fails=True))
        await made.close()
    assert received == [(length.get("Content-Length"), b"abcdef")] * 2


async def test_an_answer_before_the_end_of_the_body_ends_the_connection():
    never, ended = asyncio.Event(), asyncio.Event()

    async def endless():
        try:
            yield b"abc"
            await never.wait()
        finally:
            ended.set()

    async def serve(reader, writer, number):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer_of(b"answer %d" % number))

    async with raw_server(serve) as made:
        answer = await made.request("POST", "/", {}, endless())
        assert await answer.read() == b"answer 1"
        await ended.wait()
        assert await get(made) == b"answer 2"


async def test_an_idle_connection_is_closed(monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.01)
    closed = asyncio.Event()

    async def serve(reader, writer, number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer_of(b"answer %d" % number))
        await reader.read()
        closed.set()

    async with raw_server(serve) as made:
        assert await get(made) == b"answer 1"
        await closed.wait()


async def test_a_cancelled_request_ends_its_connection():
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader, writer, number):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        closed.set()

    async with raw_server(serve) as made:
        waiting = asyncio.create_task(get(made))
        await asked.wait()
        waiting.cancel()
        await closed.wait()


async def test_tls(monkeypatch):
    authority, server_side = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_side)

    async def serve(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer_of(await reader.readexactly(2**17 + 1)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_side)
    url = URL(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    unknown = Connections(url)
    with pytest.raises(aiohttp.ClientConnectorError):
        await unknown.request("GET", "/", {}, None)
    await unknown.close()
    client_side = ssl.create_default_context()
    authority.configure_trust(client_side)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", client_side)
    made = Connections(url)
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            answer = await made.request("POST", "/", {}, (b"a", b"x" * 2**17))
            assert await answer.read() == b"a" + b"x" * 2**17
        await made.close()
    server.close()
