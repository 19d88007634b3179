"""An engine's stream as the network cuts it: the harness sees the same, the turns have the engine's tokens.

Between the proxy and the engine stands a middleman that cuts anew what the engine says.
"""

import asyncio
import contextlib

import pytest

from tests.proxy.kit import CHAT, TOOLS, echo, proxied, results, user
from tests.proxy.raw import read_message
from tests.support.leading import lead_to
from tests.support.pairwise import some
from tests.support.waiting import PATIENCE

STREAM = b"text/event-stream"
LAST = b"0\r\n\r\n"


def as_it_comes(said):
    return [said]


def byte_by_byte(said):
    return [said[at : at + 1] for at in range(len(said))]


def in_pieces_of_37(said):
    return [said[at : at + 37] for at in range(0, len(said), 37)]


def within_the_blank_line(said):
    """What is a whole event is not a whole chunk, and what follows begins with the chunk's end."""
    return [piece for piece in (said[:-3], said[-3:]) if piece]


class Middleman:
    """Passes on what the proxy says as it is, and what the engine says in pieces; or in one, where it waits for the stream's end."""

    def __init__(self, cut, *, waits=False):
        self.cut, self.waits = cut, waits
        self.engine = ""

    async def client(self, reader, writer):
        host, port = self.engine.removeprefix("http://").split(":")
        engine_reader, engine_writer = await asyncio.open_connection(host, port)
        with contextlib.suppress(ConnectionError):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.hear(reader, engine_writer))
                tasks.create_task(self.say(engine_reader, writer))

    async def hear(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def say(self, reader, writer):
        while data := await reader.read(1 << 16):
            while self.waits and STREAM in data and not data.endswith(LAST):
                data += await reader.read(1 << 16)
            for piece in self.cut(data):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # so that it leaves by itself
        writer.close()


@contextlib.asynccontextmanager
async def recut(middleman, **settings):
    server = await asyncio.start_server(middleman.client, "127.0.0.1", 0)
    async with server, proxied(**settings) as rig:
        middleman.engine = rig.up
        await lead_to(rig.proxy.upstream, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield rig


async def episode(rig, session):
    """Three turns of a session; what the harness was told."""
    messages, told = [user("EPISODE:demo")], []
    for _ in range(3):
        said = await rig.say(session, messages, tools=TOOLS, stream=True)
        told.append((said["content"], said["reasoning"], [call["function"] for call in said["tool_calls"]]))
        messages += [echo(said), *results(said)]
    return told


@pytest.mark.parametrize(
    ("cut", "waits"),
    [
        pytest.param(cut, waits, id=f"{cut.__name__}-{'at its end' if waits else 'at once'}", marks=marks)
        for cut in (as_it_comes, byte_by_byte, in_pieces_of_37, within_the_blank_line)
        for waits, marks in ((False, ()), (True, () if cut is in_pieces_of_37 else pytest.mark.whole))
    ],
)
async def test_however_a_stream_is_cut_it_is_the_same_stream(cut, waits):
    async with proxied() as straight:
        wanted = await episode(straight, "s")
    async with recut(Middleman(cut, waits=waits)) as rig:
        assert await episode(rig, "s") == wanted
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        await rig.check()


@pytest.mark.parametrize("cut", some([in_pieces_of_37, as_it_comes], 1))
async def test_connections_that_serve_one_stream_after_the_other(cut):
    """Twelve sessions whose streams end and begin at any time, on connections that the pool gives from one to the next."""
    async with recut(Middleman(cut)) as rig:
        await asyncio.gather(*(episode(rig, f"s{n}") for n in range(12)))
        for n in range(12):
            assert len((await rig.exported(f"s{n}"))["sequences"]) == 1
            await rig.check(f"s{n}")


async def test_a_slow_harness_slows_the_engine():
    """An endless reply that nobody reads: what is taken from the engine is bounded by buffers, not by time."""
    written, stuck = 0, asyncio.Event()
    piece = '"choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null,"token_ids":[7]}]}\n\n' % ("x" * 20_000)
    event = ('data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"sim",' + piece).encode()
    chunk = b"%x\r\n%b\r\n" % (len(event), event)

    async def endless(reader, writer):
        nonlocal written
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not (await read_message(reader)).line.startswith(f"POST {CHAT}"):
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            while not stuck.is_set():
                writer.write(chunk)
                try:
                    await asyncio.wait_for(writer.drain(), 1)
                except TimeoutError:
                    stuck.set()
                written += len(chunk)
                assert written < 1 << 28
        writer.close()

    async with recut(Middleman(as_it_comes)) as rig:
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        await lead_to(rig.proxy.upstream, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        host, port = rig.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, port, limit=1024)
        body = b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on for ever"}]}'
        head = b"POST /s/slow%s HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (CHAT.encode(), len(body)) + body)
        await asyncio.wait_for(stuck.wait(), PATIENCE)
        assert 1 << 20 < written < 48 << 20  # the kernel's socket buffers, both hops
        writer.transport.abort()
        server.close()
        await server.wait_closed()
