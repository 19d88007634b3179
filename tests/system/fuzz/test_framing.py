"""Request framing: if two servers disagree on where a request ends, an attacker can send requests in another's name (smuggling)."""

import pytest

from tests.proxy.kit import proxied
from tests.support.pairwise import some
from tests.system.fuzz.kit import ASK, Strict, answers, ask, chunked, request, send

CLOSE = b"Connection: close"
TE = b"Transfer-Encoding: chunked"
LENGTH = b"Content-Length: %d" % len(ASK)
SMUGGLED = b"GET /t/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"


def of(*headers, body=ASK, **more):
    return request(body, *headers, CLOSE, **{"path": "/t/x", "length": False, **more})


REFUSED = {
    "a length and chunks": of(LENGTH, TE, body=chunked()),
    "chunks and a length": of(TE, LENGTH, body=chunked()),
    "two codings": of(TE, b"Transfer-Encoding: identity", body=chunked()),
    "a coding after chunked": of(b"Transfer-Encoding: chunked, identity", body=chunked()),
    "a coding before chunked": of(b"Transfer-Encoding: gzip, chunked", body=chunked()),
    "an invalid coding": of(b"Transfer-Encoding: xchunked", body=chunked()),
    "a coding after a control character": of(b"Transfer-Encoding: \x0bchunked", body=chunked()),
    "a coding's name and a space": of(b"Transfer-Encoding : chunked", body=chunked()),
    "a coding of HTTP/1.0": of(TE, body=chunked(), line=b"POST /t/x HTTP/1.0"),
    "two lengths": of(LENGTH, b"Content-Length: 3"),
    "one length twice": of(LENGTH, LENGTH),
    "a list of lengths": of(b"Content-Length: %d, %d" % (len(ASK), len(ASK))),
    "a signed length": of(b"Content-Length: +%d" % len(ASK)),
    "a negative length": of(b"Content-Length: -1"),
    "a length in hexadecimal": of(b"Content-Length: 0x10"),
    "a length with an underscore": of(b"Content-Length: 1_0"),
    "an overflowing length": of(b"Content-Length: 99999999999999999999999"),
    "a chunk of negative size": of(TE, body=b"-1\r\n%s\r\n0\r\n\r\n" % ASK),
    "a chunk's size as 0x": of(TE, body=b"0x%x\r\n%s\r\n0\r\n\r\n" % (len(ASK), ASK)),
    "an overflowing chunk size": of(TE, body=b"f" * 20 + b"\r\nabc"),
    "chunks with bare LF": of(TE, body=b"%x\n%s\n0\n\n" % (len(ASK), ASK)),
    "a length among the trailers": of(TE, body=b"%x\r\n%s\r\n0\r\nContent-Length: 5\r\n\r\n" % (len(ASK), ASK)),
    "a head with bare LF": of(LENGTH).replace(b"\r\n", b"\n"),
    "a bare CR in a header": of(LENGTH, b"X-A: a\rContent-Length: 3"),
    "a folded header": of(LENGTH, b"X-A: a\r\n Content-Length: 3"),
    "a folded first header": of(LENGTH).replace(b"Host", b" X: y\r\nHost", 1),
    "NUL in a header": of(LENGTH, b"X-A: a\0b"),
    "a space in a header's name": of(LENGTH, b"X A: a"),
    "a header without a name": of(LENGTH, b": a"),
    "a name that is not ASCII": of(LENGTH, b"X-\xc3\xa4: a"),
    "no host": b"GET /t/x HTTP/1.1\r\n\r\n",
    "two hosts": of(LENGTH, b"Host: other"),
}
NO_HTTP = {
    "HTTP/0.9": b"GET /t/x\r\n\r\n",
    "HTTP/1.2": b"GET /t/x HTTP/1.2\r\nHost: h\r\n\r\n",
    "HTTP/2.0 in the syntax of 1.1": b"GET /t/x HTTP/2.0\r\nHost: h\r\n\r\n",
    "HTTP/9.9": b"GET /t/x HTTP/9.9\r\nHost: h\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100,
    "all bytes": bytes(range(256)),
    "a small method": b"get /t/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "an invalid method": b"FOO'BAR /t/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "no slash": b"GET t/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "another host in the path": b"GET @127.0.0.1:1/t/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "a port in the path": b"GET :1/t/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "a star": b"GET * HTTP/1.1\r\nHost: h\r\n\r\n",
    "an impossible port": b"GET http://a@b:99999/t/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "a space in the path": b"GET /t/a b HTTP/1.1\r\nHost: h\r\n\r\n",
    "a tab in the path": b"GET /t/a\tb HTTP/1.1\r\nHost: h\r\n\r\n",
    "a control character in the path": b"GET /t/a\x01b HTTP/1.1\r\nHost: h\r\n\r\n",
    "bytes in the path": b"GET /t/\xff\xfe HTTP/1.1\r\nHost: h\r\n\r\n",
    "a long path": b"GET /t/" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
    "a long header": request(ASK, b"X-A: " + b"a" * 200_000, path="/t/x"),
    "a long name": request(ASK, b"X" * 200_000 + b": a", path="/t/x"),
    "many headers": request(ASK, *[b"X-%d: a" % n for n in range(10_000)], path="/t/x"),
    "many trailers": of(TE, body=b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(ASK), ASK, b"X-A: 1\r\n" * 10_000)),
}
PASSED = {
    "chunks": (of(TE, body=chunked()), ASK),
    "a coding after a tab": (of(b"Transfer-Encoding:\tchunked", body=chunked()), ASK),
    "chunks with extensions": (of(TE, body=b'%x;a=b;c="d"\r\n%s\r\n0\r\n\r\n' % (len(ASK), ASK)), ASK),
    "trailers": (of(TE, b"Trailer: X-A", body=b"%x\r\n%s\r\n0\r\nX-A: 1\r\n\r\n" % (len(ASK), ASK)), ASK),
    "a length named as hop by hop": (request(ASK, b"Connection: close, Content-Length", path="/t/x"), ASK),
    "a coding named as hop by hop": (of(TE, b"Connection: Transfer-Encoding", body=chunked()), ASK),
    "a body that is a request": (of(b"Content-Length: %d" % len(SMUGGLED), body=SMUGGLED), SMUGGLED),
    "a GET with such a body": (of(b"Content-Length: %d" % len(SMUGGLED), body=SMUGGLED, line=b"GET /t/x HTTP/1.1"), SMUGGLED),
    "an upgrade with such a body": (of(b"Upgrade: foo", b"Content-Length: %d" % len(SMUGGLED), body=SMUGGLED), SMUGGLED),
    "an upgrade to HTTP/2": (of(b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQ", LENGTH), ASK),
}


async def both(raw, session):
    """What the proxy answers, and what reaches an engine after it that reads with another parser."""
    engine = Strict()
    async with engine.serve() as up, proxied(upstream=up) as rig:
        received = await send(rig.url, raw.replace(b"X-Tokencache-Session: attack\r\n", b"") if session is None else raw, half_close=False)
    assert not engine.wrong
    return received, engine.asked()


@pytest.mark.parametrize("session", ["attack", None])
@pytest.mark.parametrize("name", some(REFUSED, 12))
async def test_what_can_be_read_in_two_ways_is_refused(name, session):
    received, seen = await both(REFUSED[name], session)
    (answer,) = answers(received)
    assert (answer[0], answer[1]["content-type"].partition(";")[0]) == (400, "application/json")
    assert b'"error"' in answer[2]
    assert len([one for one in seen if one[2]]) == 0  # no request with a body reached the engine


@pytest.mark.parametrize("name", NO_HTTP)
async def test_what_is_not_http_is_refused(name):
    received, seen = await both(NO_HTTP[name], None)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b" 400 " in head.partition(b"\r\n")[0]
    assert not head.startswith(b"HTTP/1.1 200")
    assert len(body) < 1000  # the sent bytes are not returned
    assert not seen


@pytest.mark.parametrize("session", ["attack", None])
@pytest.mark.parametrize("name", PASSED)
async def test_a_relayed_request_ends_where_it_ended(name, session):
    raw, body = PASSED[name]
    received, seen = await both(raw, session)
    assert [one[0] for one in answers(received)] == [200]
    assert [one[1:] for one in seen] == [("/t/x", body)]


async def test_pipelined_requests_on_one_connection():
    """Each is answered in order, whatever the bodies before it contain."""
    row = [request(b"%d " % n + SMUGGLED, path=f"/t/{n}", session=f"s{n % 3}") for n in range(40)]
    engine = Strict()
    async with engine.serve() as up, proxied(upstream=up) as rig:
        received = await ask(rig.url, b"".join(row), request(b"", CLOSE, path="/t/last"))
    assert [one[0] for one in received] == [200] * 41
    assert [one[1:] for one in engine.asked()] == [(f"/t/{n}", b"%d " % n + SMUGGLED) for n in range(40)] + [("/t/last", b"")]
    assert not engine.wrong


@pytest.mark.parametrize("session", ["attack", None])
async def test_an_incomplete_body_never_arrives_as_a_complete_one(session):
    """The sender disconnects in the middle; its connection to the engine is never reused."""
    engine = Strict()
    async with engine.serve() as up, proxied(upstream=up) as rig:
        half = request(ASK, b"Content-Length: 500", path="/t/half", session=session, length=False)
        await send(rig.url, half)
        for n in range(3):
            (answer,) = await ask(rig.url, request(ASK, CLOSE, path=f"/t/{n}", session=session))
            assert answer[0] == 200
    assert [one[1] for one in engine.asked()] == ["/t/0", "/t/1", "/t/2"]


async def test_a_body_that_breaks_its_own_framing(target):
    for session in ("attack", None):
        head = request(b"", TE, session=session, length=False)
        received = await send(target.url, head, b'5\r\n{"mod\r\n', b"no size\r\n")
        assert b" 200 " not in received.partition(b"\r\n")[0]
    await target.unharmed("attack")
