"""A protocol in front of aiohttp's own: whatever arrives, in whatever pieces, comes out once and in order.

The connection is in memory, so that the test decides what a piece is; for sockets see `tests/proxy/test_cut_streams.py`.
"""

import asyncio
import itertools
import ssl
from types import SimpleNamespace

import aiohttp
import pytest
import trustme
import uvloop
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.waiting import PATIENCE
from tokencache.engine.stream_protocol import StreamProtocol

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
PLAIN = b"data: plain"


class Transport(asyncio.Transport):
    """Passes what the test gives it to its protocol."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol = protocol
        protocol.connection_made(self)

    def set_protocol(self, protocol):
        self.protocol = protocol

    def get_protocol(self):
        return self.protocol

    def close(self):
        """Stay open: a protocol that closes it has received something that is not HTTP."""

    def is_closing(self):
        return False

    def pause_reading(self):
        """Continue: the test decides what arrives."""

    def resume_reading(self):
        """Continue."""


async def opened(head):
    """A connection that has just received the head of an answer, and that answer."""
    protocol = ResponseHandler(asyncio.get_running_loop())
    transport = Transport(protocol)
    protocol.set_response_params(read_until_eof=True, auto_decompress=False)
    protocol.data_received(head)
    _, content = await protocol.read()
    return transport, SimpleNamespace(content=content, connection=SimpleNamespace(transport=transport, protocol=protocol))


def framed(payload, size="%x"):
    return (size % len(payload)).encode() + b"\r\n" + payload + b"\r\n"


async def following(stream):
    """The next bytes of a stream, as `Stream` reads them."""
    if (arrival := stream.arrival()) is not None:
        await arrival
    return await stream.next()


async def came(pieces, head=CHUNKED, protocol=StreamProtocol):
    """What comes out if these pieces arrive one after the other: everything in order, and the events that were settled."""
    transport, answer = await opened(head)
    everything, settled = [], []

    def settle(event):
        if not event.startswith(PLAIN):
            return False
        settled.append(event)
        everything.append(event)
        return True

    async def read():
        with protocol(answer, settle) as stream:
            while data := await following(stream):
                everything.append(data)

    reader = asyncio.create_task(read())
    for piece, waits in pieces:
        for _ in range(4 if waits else 0):
            await asyncio.sleep(0)
        transport.protocol.data_received(piece)
    transport.protocol.connection_lost(None)
    for _ in range(100):  # only the loop is waited for
        await asyncio.sleep(0)
    assert reader.done()
    await reader
    return b"".join(everything), settled


EVENT = st.sampled_from([b"data: plain {}\n\n", b"data: other\n\n", b": ping\n\n"])
UNUSUAL = st.lists(
    st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n\n\r\n", b"data: plain", b"x", b"10\r\ndata: plain {}\n\n\r\n", b"3\r\n", b"0\r\n\r\n"]),
    min_size=1,
    max_size=6,
).map(b"".join)
CHUNK = st.one_of(EVENT, st.lists(EVENT, min_size=2, max_size=3).map(b"".join), UNUSUAL)
SIZE = st.sampled_from(["%x", "%X", "0%x", "%x;a=b"])


def cut(raw, ends, waits):
    """Cut bytes at these places; `waits` says before which pieces the reader waits."""
    places = sorted({0, len(raw), *(end % (len(raw) + 1) for end in ends)})
    return [(raw[a:b], waits[i % len(waits)]) for i, (a, b) in enumerate(itertools.pairwise(places))]


@given(
    chunks=st.lists(st.tuples(CHUNK, SIZE), max_size=12),
    ends=st.lists(st.integers(0, 400), max_size=20),
    whole=st.booleans(),
    waits=st.lists(st.booleans(), min_size=1, max_size=5),
)
@example(chunks=[(b"x\n\n\r\n10\r\ndata: plain {}\n\n\r\n", "%x")], ends=[9, 31], whole=False, waits=[True])
@example(
    chunks=[(b"data: other\n\n", "%x"), (b"data: plain {}\n\n\r\n".ljust(0x110, b"x"), "%x")], ends=[18, 19, 41], whole=False, waits=[True]
)
@example(chunks=[(b"data: other\n\n", "%x"), (b"data: plain {}\n\n", "%x")], ends=[], whole=True, waits=[True])
@example(chunks=[(b"data: other\n\n", "%x"), (b"data: plain {}\n\n", "0%x")], ends=[], whole=True, waits=[True])
def test_everything_arrives_once_and_in_order(chunks, ends, whole, waits):
    frames = [*(framed(payload, size) for payload, size in chunks), LAST]
    if whole:
        ends = [len(b"".join(frames[:n])) for n in range(len(frames))]
    out, settled = asyncio.run(came(cut(b"".join(frames), ends, waits)))
    assert out == b"".join(payload for payload, _ in chunks)
    assert all(event in [payload for payload, _ in chunks] for event in settled)


@given(
    payloads=st.lists(UNUSUAL, max_size=6),
    ends=st.lists(st.integers(0, 400), max_size=20),
    waits=st.lists(st.booleans(), min_size=1, max_size=5),
    counted=st.booleans(),
)
def test_a_body_without_chunks_is_left_alone(payloads, ends, waits, counted):
    """In such a body, what looks like an HTTP chunk is content."""
    body = b"".join(payloads)
    head = HEAD + (b"Content-Length: %d\r\n\r\n" % len(body) if counted else b"\r\n")
    out, settled = asyncio.run(came(cut(body, ends, waits), head))
    assert (out, settled) == (body, [])


class Careless(StreamProtocol):
    """Assumes that the parser is between two chunks."""

    def arrival(self):
        self._after_event, self._tail = True, b"\n\n\r\n"
        return super().arrival()


def test_the_checker_finds_a_protocol_that_does_not_know_where_the_parser_is():
    inner = framed(b"data: plain {}\n\n")
    outer = framed(b"x" + inner + b"data: end\n\n")
    at = outer.index(inner)
    pieces = [(outer[:at], True), (inner, True), (outer[at + len(inner) :], True), (LAST, True)]
    whole = b"x" + inner + b"data: end\n\n"
    assert asyncio.run(came(pieces)) == (whole, [])
    with pytest.raises(aiohttp.ClientPayloadError):  # it took a part of a chunk for a chunk, which the parser then misses
        asyncio.run(came(pieces, protocol=Careless))


async def test_a_settled_event_wakes_no_task():
    plain = [b"data: plain %d\n\n" % n for n in range(5)]
    out, settled = await came([(framed(payload), True) for payload in [b"data: first\n\n", *plain, b"data: [DONE]\n\n"]] + [(LAST, True)])
    assert settled == plain
    assert out == b"data: first\n\n" + b"".join(plain) + b"data: [DONE]\n\n"


async def test_an_error_while_settling_is_raised_and_the_event_is_not_lost():
    transport, answer = await opened(CHUNKED)

    def settle(event):
        raise ZeroDivisionError(event)

    with StreamProtocol(answer, settle) as stream:
        transport.protocol.data_received(framed(b"data: first\n\n"))
        assert await following(stream) == b"data: first\n\n"
        waiting = asyncio.create_task(following(stream))
        await asyncio.sleep(0)
        transport.protocol.data_received(framed(b"data: plain\n\n"))
        with pytest.raises(ZeroDivisionError):
            await waiting
        assert await following(stream) == b"data: plain\n\n"


async def test_without_a_waiting_task_nothing_is_settled():
    transport, answer = await opened(CHUNKED)
    with StreamProtocol(answer, lambda _: pytest.fail("no task waits")) as stream:
        transport.protocol.data_received(framed(b"data: first\n\n"))
        await following(stream)
        waiting = asyncio.create_task(following(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        transport.protocol.data_received(framed(b"data: plain\n\n"))
        await asyncio.gather(waiting, return_exceptions=True)
        assert await following(stream) == b"data: plain\n\n"


async def test_a_broken_connection_is_raised():
    transport, answer = await opened(CHUNKED)
    with StreamProtocol(answer, lambda _: True) as stream:
        transport.protocol.data_received(framed(b"data: first\n\n"))
        await following(stream)
        waiting = asyncio.create_task(following(stream))
        await asyncio.sleep(0)
        transport.protocol.connection_lost(ConnectionResetError("gone"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await asyncio.wait_for(waiting, PATIENCE)


@pytest.mark.parametrize("whole", [False, True], ids=["within an event", "between events"])
async def test_bytes_that_are_not_http_are_an_error(whole):
    """aiohttp closes such a connection, and its reader would wait for ever."""

    async def garbled(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        writer.write(framed(b"data: first\n\n" if whole else b"data: fi"))
        await garbles.wait()
        writer.write(b"no size\r\n")
        await reader.read()
        writer.close()

    async def read():
        with StreamProtocol(answer, lambda _: True) as stream:
            while await following(stream):
                garbles.set()

    garbles = asyncio.Event()
    server = await asyncio.start_server(garbled, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, asyncio.timeout(PATIENCE), aiohttp.ClientSession() as http, http.get(url) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await read()


@pytest.mark.parametrize("end", [framed(b"data: [DONE]\n\n") + LAST, b""], ids=["the stream ends", "the reader stops"])
async def test_the_connection_has_its_own_protocol_again(end):
    """At the end of the stream at once: the pool may give the connection to another call before this one continues."""
    transport, answer = await opened(CHUNKED)
    own = transport.protocol
    with StreamProtocol(answer, lambda _: True):
        assert transport.protocol is not own
        transport.protocol.data_received(framed(b"data: first\n\n") + end)
        if end:
            assert transport.protocol is own
            transport.set_protocol(other := asyncio.Protocol())
    assert transport.protocol is (other if end else own)


async def test_a_connection_that_serves_another_call_is_left_alone():
    """If more arrives than the reader takes, the end of the stream is found while it is read, and the protocol is not called."""
    transport, answer = await opened(CHUNKED)
    large = b"data: " + b"x" * (1 << 20) + b"\n\n"
    with StreamProtocol(answer, lambda _: True) as stream:
        transport.protocol.data_received(framed(large) + LAST)
        assert not answer.content.is_eof()
        read = b""
        while data := await following(stream):
            read += data
        assert read == large
        transport.set_protocol(other := asyncio.Protocol())
    assert transport.protocol is other


async def test_the_connection_of_a_complete_answer_is_left_alone():
    transport, answer = await opened(CHUNKED)
    transport.protocol.data_received(framed(b"data: all\n\n") + LAST)
    own, answer.connection = transport.protocol, None
    with StreamProtocol(answer, lambda _: True) as stream:
        assert transport.protocol is own
        assert [await following(stream), await following(stream)] == [b"data: all\n\n", b""]


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_real_connections(loop, secured):
    """One event after the other on a connection of each kind, and again on the same connection."""
    authority = trustme.CA()
    server_side, client_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    authority.configure_trust(client_side)
    plain = [b"data: plain %d\n\n" % n for n in range(200)]

    async def stream(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for event in [b"data: first\n\n", *plain]:
            await response.write(event)
            await asked.get()
        await response.write_eof(b"data: [DONE]\n\n")
        peers.add(request.transport.get_extra_info("peername"))
        return response

    async def follow(http):
        got, settled = [], []

        def settle(event):
            asked.put_nowait(None)
            settled.append(event)
            got.append(event)
            return True

        async with http.get(url) as answer:
            with StreamProtocol(answer, settle) as stream:
                while data := await following(stream):
                    got.append(data)
                    asked.put_nowait(None)
        assert b"".join(got) == b"data: first\n\n" + b"".join(plain) + b"data: [DONE]\n\n"
        assert len(settled) >= len(plain) - 1  # the first may have come with the head

    async def main():
        nonlocal url
        app = web.Application()
        app.router.add_get("/", stream)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_side if secured else None).start()
        url = f"{'https' if secured else 'http'}://127.0.0.1:{runner.addresses[0][1]}/"
        try:
            async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_side)) as http:
                await follow(http)
                while not asked.empty():
                    asked.get_nowait()
                await follow(http)
        finally:
            await runner.cleanup()
        assert len(peers) == 1

    asked, peers, url = asyncio.Queue(), set(), ""
    loop(main())
