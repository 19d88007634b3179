"""Connections that wait for their client: they end, and when files are short they make room, the longest idle first."""

import asyncio
import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from tests.proxy.kit import CHAT, EPISODES, HEADER, proxied, user
from tests.proxy.raw import read_message
from tests.support.waiting import PATIENCE, until
from tokencache.proxy import request_body
from tokencache.server import http_guard, listener
from tokencache.testing import SimulatedEngine

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"
BODY = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\n{HEADER}: s\r\nContent-Length: 100000\r\n\r\n{{".encode()
ASK = json.dumps({"model": "sim", "messages": [user("EPISODE:talk")]}).encode()
CALL = (
    f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n{HEADER}: s\r\nContent-Length: {len(ASK)}\r\n\r\n".encode() + ASK
)


class Client:
    """A connection; what its client has sent, and whether the server has closed it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.received = b""

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self):
        async with asyncio.timeout(PATIENCE):
            return await read_message(self.reader, answers="GET")

    async def closed(self):
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                self.received = await self.reader.read()
        return True

    def is_closed(self):
        return self.reader.at_eof() or self.reader.exception() is not None


@contextlib.asynccontextmanager
async def clients(rig):
    """Open connections, which are closed in the end."""
    opened = []

    async def connect(sent=b""):
        parts = urlsplit(rig.url)
        client = Client(*await asyncio.open_connection(parts.hostname, parts.port))
        opened.append(client)
        if sent:
            await client.send(sent)
        return client

    yield connect
    for client in opened:
        client.writer.close()
    await asyncio.gather(*(client.writer.wait_closed() for client in opened), return_exceptions=True)


@pytest.mark.parametrize("used", [0, 1, 2])
async def test_an_idle_connection_is_closed(monkeypatch, used):
    monkeypatch.setattr(http_guard, "IDLE_SECONDS", 0.2)
    async with proxied() as rig, clients(rig) as connect:
        client = await connect()
        for _ in range(used):
            await client.send(HEALTH)
            assert "200" in (await client.answer()).line
        assert await client.closed()
        assert client.received == b""


async def test_a_request_that_arrived_in_time_is_answered_by_a_busy_process(monkeypatch):
    """A process that was busy with one connection closed others on their unread requests."""
    async with proxied() as rig, clients(rig) as connect:
        waiting = [await connect(HEALTH) for _ in range(3)]
        for client in waiting:
            await client.answer()
        stop(monkeypatch, 100, lambda: [client.writer.write(HEALTH) for client in waiting])
        for client in waiting:
            assert "200" in (await client.answer()).line
        stop(monkeypatch, 200)
        assert all([await client.closed() for client in waiting])


@pytest.mark.parametrize("sent", [20, len(CALL) - 1], ids=["head", "body"])
async def test_a_request_that_arrived_in_time_is_read_by_a_process_that_was_stopped(monkeypatch, sent):
    """After a minute's stop the time for a head or a body is over before the process reads what is left of it."""
    async with proxied() as rig, clients(rig) as connect:
        client = await connect(CALL[:sent])
        await until(lambda: rig.proxy.request_memory.total)
        stop(monkeypatch, 100, lambda: client.writer.write(CALL[sent:]))
        assert "200" in (await client.answer()).line


def stop(monkeypatch, seconds, arrives=lambda: None):
    """Let it be so many seconds later. What arrives meanwhile is read after the timers that are due then have run."""
    loop, running = asyncio.get_running_loop(), time.monotonic

    def go_on():
        monkeypatch.setattr(loop, "time", lambda: running() + seconds)
        loop.call_soon(arrives)  # in the next round, before the timers

    loop.call_soon(go_on)


@pytest.mark.usefixtures("_few_files")
async def test_a_request_that_is_not_read_yet_is_not_closed_to_make_room(monkeypatch):
    monkeypatch.setattr(http_guard, "IDLE_SECONDS", 10 * PATIENCE)
    async with proxied() as rig, clients(rig) as connect:
        waiting = [await connect(HEALTH) for _ in range(CAPACITY)]
        for client in waiting:
            await client.answer()
        parts = urlsplit(rig.url)
        with socket.socket() as another, busy_loop(2 * http_guard.WAITING_SECONDS) as begin:

            def connect_first():
                another.connect((parts.hostname, parts.port))
                for client in waiting[:-1]:
                    client.writer.write(HEALTH)

            begin(connect_first)
            for client in waiting[:-1]:
                assert "200" in (await client.answer()).line
            assert await waiting[-1].closed()


@contextlib.contextmanager
def busy_loop(seconds):
    """Give a function that does something, and then blocks the loop while this handles a socket, as a large request does."""
    loop, (waking, waker) = asyncio.get_running_loop(), socket.socketpair()

    def begin(first):
        def block():
            loop.remove_reader(waking)
            first()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                pass

        loop.add_reader(waking, block)
        waker.send(b".")

    with waking, waker:
        yield begin


async def test_a_stream_over_http_1_0_ends_with_its_connection(monkeypatch):
    """It has no length and no chunks, so a client that would keep the connection sees its end in no other way."""
    monkeypatch.setattr(http_guard, "IDLE_SECONDS", 10 * PATIENCE)
    body = ASK.replace(b"{", b'{"stream": true, ', 1)
    head = f"POST /s/s{CHAT} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with proxied() as rig, clients(rig) as connect:
        client = await connect(head.encode() + body)
        assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")
        kept = await connect(HEALTH.replace(b"1.1", b"1.0\r\nConnection: keep-alive"))
        for _ in range(2):
            assert "200" in (await kept.answer()).line
            await kept.send(HEALTH)


async def test_a_call_is_never_idle(monkeypatch):
    """However long the engine takes: idle connections end meanwhile."""
    monkeypatch.setattr(http_guard, "IDLE_SECONDS", 0.1)
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def answer(request):
        if "Hello" not in await request.text():
            return web.Response(status=404)  # the probe
        begun.set()
        await goes_on.wait()
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with proxied(upstream=f"http://127.0.0.1:{runner.addresses[0][1]}") as rig, clients(rig) as connect:
        client = await connect(CALL.replace(b"EPISODE:talk", b"Hello       "))
        await begun.wait()
        for _ in range(3):
            assert await (await connect()).closed()
        goes_on.set()
        assert "200" in (await client.answer()).line
    await runner.cleanup()


async def test_a_head_that_began_after_idling_has_its_own_time(monkeypatch):
    monkeypatch.setattr(http_guard, "IDLE_SECONDS", 0.5)
    async with proxied() as rig, clients(rig) as connect:
        client = await connect(HEALTH[:20])
        assert await (await connect()).closed()  # as old
        await client.send(HEALTH[20:])
        assert "200" in (await client.answer()).line
        assert await client.closed()


async def test_a_huge_head_ends(monkeypatch):
    monkeypatch.setattr(http_guard, "HEAD_BYTES", 10_000)
    async with proxied() as rig, clients(rig) as connect:
        client = await connect(HEALTH[:-2])
        with contextlib.suppress(ConnectionError):
            while not client.is_closed():
                await client.send(b"X-A: %s\r\n" % (b"b" * 1000))
                await asyncio.sleep(0)
        assert await client.closed()


async def test_all_incomplete_heads_together_have_a_limit():
    async with proxied(max_body=1, request_memory=4000) as rig, clients(rig) as connect:
        half = HEALTH[:-2] + b"X-A: %s\r\n" % (b"b" * 900)
        held = [await connect(half), await connect(half)]
        await until(lambda: rig.proxy.request_memory.total == 2 * len(half))
        assert await (await connect(half)).closed()
        await held[0].send(b"\r\n")
        assert "200" in (await held[0].answer()).line
        held[1].writer.close()
        await until(lambda: not rig.proxy.request_memory.total)


async def unread(connect):
    """A client that asks for much and reads nothing."""
    client = await connect()
    for _ in range(64):
        client.writer.write(b"GET /tokencache/ui/ HTTP/1.1\r\nHost: h\r\n\r\n" * 20)
    return client


UPGRADE = (
    f"GET /v1/responses HTTP/1.1\r\nHost: h\r\n{HEADER}: s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()
WAITING = {
    "an idle WebSocket": UPGRADE,
    "half a message": UPGRADE + b"\x81\xfe\x4e\x00half",
    "nothing was sent": b"",
    "one request": HEALTH,
    "half a head": HEALTH[:20],
    "half a body": BODY,
    "half a relayed body": BODY.replace(f"{HEADER}: s\r\n".encode(), b""),
}
CAPACITY = 12


@pytest.fixture
def _few_files(monkeypatch):
    monkeypatch.setattr(listener, "stream_capacity", lambda: CAPACITY)
    monkeypatch.setattr(http_guard, "WAITING_SECONDS", 0.05)


@pytest.mark.usefixtures("_few_files")
@pytest.mark.parametrize("sent", WAITING.values(), ids=WAITING)
async def test_connections_that_wait_keep_no_one_out(sent, caplog):
    async with proxied() as rig, clients(rig) as connect:
        for _ in range(3 * CAPACITY):
            await connect(sent)
        assert "200" in (await (await connect(HEALTH)).answer()).line
        assert await rig.say("s", [user("EPISODE:talk")])
    assert caplog.text.count("FILES ARE SHORT") == 1


@pytest.mark.usefixtures("_few_files")
@pytest.mark.parametrize("at_once", [1, listener.AT_ONCE])
async def test_no_connection_is_closed_while_all_fit(monkeypatch, caplog, at_once):
    """New ones were counted twice as they began, and the last one that fits closed others."""
    monkeypatch.setattr(listener, "AT_ONCE", at_once)
    monkeypatch.setattr(http_guard, "WAITING_SECONDS", 0)
    async with proxied() as rig, clients(rig) as connect:
        first = [await connect(HEALTH) for _ in range(CAPACITY // 2)]
        for client in first:
            await client.answer()
        for client in await asyncio.gather(*[connect(HEALTH) for _ in range(CAPACITY - len(first))]):
            assert "200" in (await client.answer()).line
        for client in first:
            await client.send(HEALTH)
            assert "200" in (await client.answer()).line
    assert "FILES ARE SHORT" not in caplog.text


@pytest.mark.usefixtures("_few_files")
async def test_clients_that_read_nothing_keep_no_one_out(monkeypatch):
    monkeypatch.setattr(http_guard, "UNREAD_SECONDS", 0.05)
    async with proxied() as rig, clients(rig) as connect:
        for _ in range(CAPACITY):
            await unread(connect)
        assert "200" in (await (await connect(HEALTH)).answer()).line


@pytest.mark.usefixtures("_few_files")
async def test_the_longest_idle_goes_first_and_no_call_does(monkeypatch):
    monkeypatch.setattr(listener, "AT_ONCE", 1)
    monkeypatch.setattr(http_guard, "WAITING_SECONDS", 0)  # so that the idle ones count at once, as the head does, which has waited longer
    goes_on = asyncio.Event()

    async with proxied(SimulatedEngine(episodes=EPISODES, seed=7)) as rig, clients(rig) as connect:
        send = rig.proxy.upstream.send

        async def slow_send(*asked, **options):
            await goes_on.wait()
            return await send(*asked, **options)

        await rig.say("s", [user("EPISODE:talk")])
        monkeypatch.setattr(rig.proxy.upstream, "send", slow_send)
        calls = [await connect(CALL) for _ in range(4)]
        head, body = await connect(HEALTH[:20]), await connect(BODY)
        idle = [await connect(HEALTH) for _ in range(4)]
        for client in (idle[2], idle[0], idle[1], idle[3]):
            await client.answer()
        for client in idle:
            await client.send(HEALTH)
            await client.answer()
        order = []
        while len(order) < len(idle):
            await (await connect(HEALTH)).answer()
            order += [client for client in [*idle, head, body] if client.is_closed() and client not in order]
        assert order[: len(idle)] == idle
        assert not any(client.is_closed() for client in calls)
        goes_on.set()
        for client in calls:
            assert "200" in (await client.answer()).line


async def test_a_body_that_stops_ends_however_much_was_sent(monkeypatch):
    monkeypatch.setattr(request_body, "PIECE_SECONDS", 0.3)
    async with proxied() as rig, clients(rig) as connect:
        client = await connect(BODY.replace(b"100000", b"9000000") + b" " * 8_000_000)
        assert " 408 " in (await client.answer()).line
