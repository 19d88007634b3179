"""Without a session the proxy is not there: the bytes of a direct call, both ways, as they come."""

import asyncio
import gzip
import os
from pathlib import Path

import pytest

from tests.proxy.kit import CHAT, proxied
from tests.proxy.raw import Tiny, exchange, read_message
from tests.support.leading import lead_to
from tests.support.pairwise import some
from tests.support.waiting import PATIENCE


def with_body(head: str, body: bytes) -> bytes:
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


JSON = "Content-Type: application/json\r\n"
BINARY = bytes(range(256)) * 300
SOCKET_BUFFERS = sum(int(Path(f"/proc/sys/net/ipv4/tcp_{way}mem").read_text().split()[2]) for way in "rw")
"""The bytes that the kernel holds for a connection at most."""

REQUESTS = {
    "get": b"GET /t/models HTTP/1.1\r\nHost: h\r\n\r\n",
    "query": b"GET /t/a%2Fb%20c/%7Ed?x=%26&y=a+b&z=%C3%BC&x=2&e= HTTP/1.1\r\nHost: h\r\nAccept: text/x, */*;q=0.1\r\n\r\n",
    "dots": b"GET /t/./a/../b//c/%2e%2e/d HTTP/1.1\r\nHost: h\r\n\r\n",
    "head": b"HEAD /t/models HTTP/1.1\r\nHost: h\r\n\r\n",
    "options": b"OPTIONS /t HTTP/1.1\r\nHost: h\r\nOrigin: http://x\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    "delete": b"DELETE /t/1 HTTP/1.1\r\nHost: h\r\n\r\n",
    "post without body": b"POST /t HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n",
    "json": f"POST /t HTTP/1.1\r\nHost: h\r\n{JSON}Content-Length: 14\r\n\r\n".encode() + b'{"b" :1,"a":2}',
    "no content-type": b"POST /t HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
    "binary": f"PUT /t HTTP/1.1\r\nHost: h\r\nContent-Type: image/png\r\nContent-Length: {len(BINARY)}\r\n\r\n".encode() + BINARY,
    "chunked": b"POST /t HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5;ext=1\r\ndefgh\r\n0\r\n\r\n",
    "gzip": with_body("POST /t HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip", gzip.compress(b'{"a": 1}', mtime=0)),
    "two of a header": b"GET /t HTTP/1.1\r\nHost: h\r\nX-Two: 1\r\nX-One: \xc3\xbc\r\nX-Two: 2\r\nCookie: a=1; b=2\r\nCookie: c=3\r\n\r\n",
    "agent": b"GET /t HTTP/1.1\r\nHost: h\r\nUser-Agent: litellm/1\r\nAccept-Encoding: gzip, deflate\r\nAuthorization: Bearer sk-1\r\n\r\n",
    "long header": b"GET /t HTTP/1.1\r\nHost: h\r\nX-Long: " + b"x" * 20000 + b"\r\n\r\n",
    "expect": b"POST /t HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nab",
    "own connection's headers": b"GET /t HTTP/1.1\r\nHost: h\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\nTE: trailers\r\nX-Id: 7\r\n\r\n",
}
ANSWERS = {
    "plain": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nServer: uvicorn\r\nContent-Type: text/plain; charset=latin-1\r\n\r\n\xff\x00",
    "no type, no server": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "odd reason": b"HTTP/1.1 418 I am a teapot\r\nContent-Length: 0\r\nX-A: 1\r\nX-A: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\r\n",
    "error": b'HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\nContent-Type: application/json\r\n\r\n{"detail":"Not Found"}',
    "redirect": b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /t2?x=%20\r\nContent-Length: 0\r\n\r\n",
    "nothing": b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n",
    "unchanged": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\n\r\n',
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    "until close": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: a/b\r\n\r\nabcdef",
    "gzip": with_body("HTTP/1.1 200 OK\r\nContent-Encoding: gzip", gzip.compress(b"hello", mtime=0)),
    "unavailable": b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\nContent-Length: 0\r\n\r\n",
}


@pytest.fixture
async def tiny():
    tiny = Tiny()
    async with tiny.serve() as up, proxied(upstream=up) as rig:
        yield tiny, up, rig


@pytest.mark.parametrize("name", some(REQUESTS, 8))
async def test_a_request_arrives_as_it_was_sent(tiny, name):
    upstream, up, rig = tiny
    direct, through = await exchange(up, REQUESTS[name]), await exchange(rig.url, REQUESTS[name])
    sent, seen = upstream.seen
    assert seen.line == sent.line
    hop = ("x-mine", "expect", "content-length") if name == "chunked" or not sent.body else ("x-mine", "expect")
    assert seen.plain(*hop) == sent.plain(*hop)
    assert seen.body == sent.body
    assert (through.line, through.plain(), through.body) == (direct.line, direct.plain(), direct.body)


@pytest.mark.parametrize("query", ["key=REAL&monkey=tcx", "key=REAL&monkey=tcs-r2", "key=tcx", "a=b%20c&key=tc"])
async def test_only_the_proxys_own_keys_are_removed_from_a_query(tiny, query):
    upstream, _, rig = tiny
    await exchange(rig.url, f"GET /s/r1/t?{query} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    (seen,) = upstream.seen
    assert f"/t?{query} " in seen.line


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
async def test_an_answer_arrives_as_it_was_given(tiny, name, method):
    upstream, up, rig = tiny
    upstream.answer = ANSWERS[name]
    request = f"{method} /t HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode()
    direct, through = await exchange(up, request), await exchange(rig.url, request)
    assert (through.line, through.plain(), through.body) == (direct.line, direct.plain(), direct.body)


async def test_a_request_by_its_whole_url(tiny):
    upstream, _, rig = tiny
    assert (await exchange(rig.url, b"GET http://some.where:1/t/x%2Fy?a=%20b HTTP/1.1\r\nHost: h\r\n\r\n")).body == b"ok"
    assert upstream.seen[0].line == "GET /t/x%2Fy?a=%20b HTTP/1.1"


BODY = b'{"model": "sim", "temperature":0.50,"messages":[ {"role":"user","content":"EPISODE:demo \\u00fc"}]%s}'
TOOLS = b',"tools":[{"type":"function","function":{"name":"bash","parameters":{"type":"object","properties":{}}}}]'


@pytest.mark.parametrize(
    "more", [b"", TOOLS, b',"n":2', b',"logprobs":true,"return_token_ids":true', b',"temperature":-1', b',"model":"x"']
)
@pytest.mark.parametrize("stream", [b"", b',"stream":true'])
async def test_a_model_call_is_answered_as_if_direct(rig, more, stream):
    body = BODY % (more + stream)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\n{JSON}X-Request-Id: 1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    direct, through = await exchange(rig.up, head + body), await exchange(rig.url, head + body)
    assert (through.line, through.plain("content-length")) == (direct.line, direct.plain("content-length"))
    assert rig.engine.requests[-1] == rig.engine.requests[-2]
    assert ("kv_transfer_params" in rig.engine.requests[-1], rig.engine.headers[-1].get("X-Session-ID")) == (False, None)
    assert [line[:40] for line in through.body.split(b"\n\n")][:3] == [line[:40] for line in direct.body.split(b"\n\n")][:3]
    assert not [info async for info in rig.store.sessions()]


@pytest.mark.parametrize("path", ["/v1/nope", "/books", "/ping", "/version", "/v1/models", "/", "/tokencachex", "/sx"])
async def test_routes_that_are_not_ours_are_the_engines(rig, path):
    request = f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
    direct, through = await exchange(rig.up, request), await exchange(rig.url, request)
    assert (through.line, through.plain(), through.body) == (direct.line, direct.plain(), direct.body)


async def test_an_answer_is_forwarded_piece_by_piece(tiny):
    upstream, _, rig = tiny
    go = [asyncio.Event() for _ in range(3)]

    async def pieces(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i, event in enumerate(go):
            writer.write(b"6\r\nchunk%d\r\n" % i)
            await writer.drain()
            await event.wait()
        writer.write(b"0\r\n\r\n")

    upstream.pieces = pieces
    async with rig.http.get(rig.url + "/t") as answer:
        for i, event in enumerate(go):
            assert await answer.content.readexactly(6) == b"chunk%d" % i  # the next one is not even written yet
            event.set()
        assert await answer.content.read() == b""


async def test_an_upload_is_forwarded_piece_by_piece(tiny):
    upstream, _, rig = tiny
    got, more = asyncio.Event(), asyncio.Event()

    async def handler(reader, writer):
        await reader.readuntil(b"one")
        got.set()
        await reader.readuntil(b"two")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def body():
        yield b"one"
        await more.wait()
        yield b"two"

    upstream._client = handler
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    await lead_to(rig.proxy.upstream, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    call = asyncio.create_task(rig.http.post(rig.url + "/t", data=body()))
    await asyncio.wait_for(got.wait(), PATIENCE)
    more.set()
    async with await call as answer:
        assert answer.status == 200
    server.close()
    await server.wait_closed()


async def test_a_slow_reader_slows_the_engine(tiny):
    """An endless answer, nobody reads it: what is taken from the engine is bounded by buffers, not by time."""
    upstream, _, rig = tiny
    written, stuck, piece = 0, asyncio.Event(), os.urandom(1 << 16)

    async def pieces(writer):
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\n")
        while True:
            writer.write(piece)
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except TimeoutError:
                stuck.set()
                return
            written += len(piece)
            assert written < 1 << 28

    upstream.pieces = pieces
    host, port = rig.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, port, limit=1024)
    writer.write(b"GET /t HTTP/1.1\r\nHost: h\r\n\r\n")
    await asyncio.wait_for(stuck.wait(), PATIENCE)
    assert written < 2 * SOCKET_BUFFERS + (8 << 20)  # both hops, and what the proxy and the test hold
    writer.transport.abort()


@pytest.mark.parametrize("where", ["head", "body"])
async def test_a_broken_answer_is_broken_off(tiny, where):
    upstream, _, rig = tiny
    upstream.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc" if where == "body" else b""
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /t HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}")
    if where == "head":
        answer = await read_message(reader, answers="POST")
        assert answer.line.startswith("HTTP/1.1 502 ")
        assert b'"type":"upstream_error"' in answer.body
    else:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await read_message(reader, answers="POST")
    writer.close()


async def test_an_unreachable_engine_is_a_502(rig):
    await lead_to(rig.proxy.upstream, "http://127.0.0.1:9")
    status, said = await rig.post(None, messages=[])
    assert status == 502
    assert said["error"]["type"] == "upstream_error"
    assert said["error"]["code"] == 502
