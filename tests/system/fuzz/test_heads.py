"""Heads: untrusted text in paths, names, keys and headers never appears in another header, path or answer."""

import json

import pytest

from tests.proxy.kit import HEADER, proxied, user
from tests.support.pairwise import each
from tests.system.fuzz.kit import ASK, DIALECTS, GEMINI, Strict, answers, ask, request, send

CLOSE = b"Connection: close"
INJECTED = "x-injected"
CRLF = ["\r\nX-Injected: y\r\n\r\n", "\nX-Injected: y", "\rX-Injected: y", "\u010d\u010aX-Injected: y", "\x00", "\x0b\x0c"]
PERCENT = [
    "%0d%0aX-Injected:%20y",
    "%0aX-Injected:y",
    "%00",
    "%e5%98%8a%e5%98%8dX-Injected:y",
    "%ff",
    "%zz",
    "%",
    "%2f..%2f..%2f",
    "%2e%2e/",
    "../",
]


def get(path, *headers):
    return b"\r\n".join([b"GET " + path.encode() + b" HTTP/1.1", b"Host: h", *headers, CLOSE, b"", b""])


def clean(received):
    """Exactly one answer, whose head contains no injected text; no internal error."""
    (answer,) = answers(received)
    assert INJECTED not in {name.lower() for name in answer[1]}
    assert answer[0] < 500, answer
    assert b"Internal error in tokencache" not in answer[2]
    return answer


PLACES = ["/s/%s/v1/models", "/s/a/%s", "/s/a/h/%s/v1/models", "/%s", "/tokencache/v1/sessions/%s", "/v1/models?key=tcs-%s"]


@pytest.mark.parametrize(("place", "text"), each(PLACES, PERCENT))
async def test_percent_encoded_lines_in_a_path(target, place, text):
    clean(await send(target.url, get(place.replace("%s", text)), half_close=False))
    await target.unharmed()


@pytest.mark.parametrize(
    "place",
    [
        "/s/a/../../x",
        "/s/a/%2e%2E/x",
        "/s/a/t/..%2f..%2f../x",
        "/../x",
        "/t/..\\..\\x",
        "/s/a/t/%5c..%5c..%5c..",
        "/a\\b/../../x",
        "/a%2fb/../../x",
    ],
)
async def test_a_path_that_climbs_is_harmless(place):
    engine = Strict()
    async with engine.serve() as up, proxied(upstream=f"{up}/behind") as rig:
        (answer,) = answers(await send(rig.url, get(place), half_close=False))
    assert (answer[0], b"climbs above" in answer[2]) == (400, True)
    assert all(path.startswith("/behind/") for _, path, _ in engine.seen)


async def test_a_path_through_a_session_reaches_no_route_of_ours():
    """`/s/a/../../tokencache/…` is not the trainer's route, and an encoded slash makes no route."""
    async with proxied(admin_key="the trainer's own key") as rig:
        for path in (
            "/s/a/../../tokencache/v1/sessions",
            "/tokencache%2fv1/sessions",
            "//tokencache/v1/sessions",
            "/x/../tokencache/v1/sessions",
        ):
            (answer,) = answers(await send(rig.url, get(path), half_close=False))
            assert answer[0] in {400, 401, 404}
            assert b'"sessions"' not in answer[2]


ODD_KEYS = [b"tck-\xff\xfe", b"tck-" + b"a" * 10_000, b"tcs-\xff", b"tcs-a\tb", b"tcs-", b"tck-", "tck-ü".encode(), b"tck-a b"]


@pytest.mark.parametrize(("name", "key"), each([b"Authorization: Bearer ", b"x-api-key: ", b"x-goog-api-key: "], ODD_KEYS))
async def test_invalid_keys(target, key, name):
    answer = clean(await send(target.url, request(ASK, name + key, CLOSE, session=None), half_close=False))
    assert answer[0] in {400, 401, 404}
    await target.unharmed()


@pytest.mark.parametrize("name", [b"\xff", b"a b", b"a/b", b"", b"-a", b"a" * 300, "ü".encode(), b"{}", b"a,b", b"*", b"a\tb"])
async def test_invalid_session_names(target, name):
    answer = clean(await send(target.url, request(ASK, f"{HEADER}: ".encode() + name, CLOSE, session=None), half_close=False))
    assert (answer[0], b"session name" in answer[2]) == (400, True)
    await target.unharmed()


@pytest.mark.parametrize(
    "two",
    [
        [b"X-Tokencache-Session: attack", b"X-Tokencache-Session: oracle"],
        [b"x-tokencache-session: oracle", b"X-TOKENCACHE-SESSION: attack"],
        [b"Authorization: Bearer tcs-attack", b"authorization: Bearer tcs-oracle"],
        [b"x-api-key: tcs-attack", b"X-Api-Key: tcs-oracle"],
    ],
)
async def test_two_sessions_in_one_request(target, two):
    answer = clean(await send(target.url, request(ASK, *two, CLOSE, session=None), half_close=False))
    assert (answer[0], b"different values" in answer[2]) == (400, True)
    await target.unharmed("attack")


@pytest.mark.parametrize(("dialect", "text"), each([*DIALECTS], CRLF))
async def test_line_breaks_in_names_within_a_body(target, dialect, text):
    """Model names and handles appear in bodies and in the engine's request, never in a head."""
    path = DIALECTS[dialect]
    model = f"sim{text}"
    body = {
        "chat": {"model": model, "messages": [user("EPISODE:talk")], "user": model},
        "messages": {"model": model, "max_tokens": 9, "messages": [user("EPISODE:talk")], "metadata": {"user_id": model}},
        "responses": {"model": model, "input": "EPISODE:talk", "previous_response_id": f"resp_{text}", "prompt_cache_key": model},
        "gemini": {"contents": [{"role": "user", "parts": [{"text": "x", "thoughtSignature": model}]}]},
        "completions": {"model": model, "prompt": "EPISODE:talk", "user": model},
    }[dialect]
    for stream in (False, True):
        if dialect == "gemini":
            sent = request(json.dumps(body).encode(), CLOSE, path=GEMINI if not stream else GEMINI.replace(":g", ":streamG") + "?alt=sse")
        else:
            sent = request(json.dumps({**body, "stream": stream}).encode(), CLOSE, path=path)
        clean(await send(target.url, sent, half_close=False))
    await target.unharmed("attack")


async def test_which_headers_are_forwarded_to_the_engine():
    """To the engine: its own Host; no connection headers; the session's name if it is configured; the rest unchanged."""
    heads = []

    class Listening(Strict):
        async def _client(self, reader, writer):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

    sent = [
        b"X-Forwarded-For: 1.2.3.4", b"X-Forwarded-Host: evil", b"Forwarded: for=1.2.3.4", b"X-Real-IP: 1.2.3.4", b"Via: 1.1 x",
        b"Connection: keep-alive, X-Hop, close", b"X-Hop: 1", b"Keep-Alive: timeout=5", b"TE: trailers", b"Proxy-Authorization: Basic x",
        b"Proxy-Connection: keep-alive", b"Upgrade: websocket", b"X-Request-Id: mine",
    ]  # fmt: skip
    async with Listening().serve() as up, proxied(upstream=up) as rig:
        await send(rig.url, request(ASK, *sent, session="r-1"), half_close=False)
        await send(rig.url, request(ASK, *sent, session=None, path="/t/x"), half_close=False)
        host = up.removeprefix("http://").encode()
    for path, named in ((b"/v1/chat/completions", b"r-1"), (b"/t/x", None)):
        lines = next(head for head in heads if head.startswith(b"POST " + path) and b"1.2.3.4" in head).split(b"\r\n")[1:-2]
        found = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        assert found[b"host"] == host
        assert {b"x-forwarded-for", b"x-forwarded-host", b"forwarded", b"x-real-ip", b"via"} <= set(found)
        assert not {b"x-hop", b"keep-alive", b"te", b"proxy-authorization", b"proxy-connection", b"upgrade", b"x-tokencache-session"} & set(
            found
        )
        assert found.get(b"x-session-id") == named


async def test_unusual_routes_in_a_row(target):
    for raw in (
        b"OPTIONS * HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"TRACE /s/attack/v1/models HTTP/1.1\r\nHost: h\r\nCookie: a=b\r\nConnection: close\r\n\r\n",
        b"GET http://evil.example HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"GET http://evil.example?x=1 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"GET http://evil.example/s/attack/v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        get("/s/attack?x=/v1/models"), get("/s//v1/models"), get("/s/"), get("/s/a@evil:1"),
        get("//evil.example/x"), get('/[::1]/<>"{}|^`?[]={}'),
        get("/s/attack/v1/realtime", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
        get("/s/attack/v1/models", b"Expect: banana"),
        request(ASK, b"Expect: 100-continue", CLOSE),
    ):  # fmt: skip
        received = await send(target.url, raw, half_close=False)
        status = int(received.split(b" ", 2)[1])
        assert status < 500
        assert status != 101
    await target.unharmed("attack")


@pytest.mark.whole
async def test_a_thousand_requests_in_a_row_without_waiting(target):
    received = await ask(target.url, request(ASK, session="attack") * 200, request(ASK, CLOSE, session="attack"))
    assert [answer[0] for answer in received] == [200] * 201
    await target.unharmed("attack")
