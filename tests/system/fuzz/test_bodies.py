"""Bodies: compressed, enormous, nested, malformed. Each is answered or refused with the dialect's error, and leaves no state."""

import asyncio
import gzip
import itertools
import json
import zlib

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.kit import HEADER, proxied, user
from tests.support.pairwise import each, some
from tests.system.fuzz.kit import ASK, DIALECTS, answers, request, send
from tokencache.proxy.request_body import MOST_OBJECTS, MOST_VALUES, check_values

CLOSE = b"Connection: close"
MILLION = 1_000_000
BOMB = gzip.compress(b" " * (2**26 + 1))


def shape(dialect, *, entries=b"", more=b""):
    """A request in a dialect around raw JSON: entries of its history, or further members."""
    first = {
        "chat": b'"model":"sim","messages":[%s]',
        "messages": b'"model":"sim","max_tokens":9,"messages":[%s]',
        "responses": b'"model":"sim","input":[%s]',
        "gemini": b'"contents":[%s]',
        "completions": b'"model":"sim","prompt":[%s]',
    }[dialect] % (entries or USERS[dialect])
    return b"{" + first + (b"," + more if more else b"") + b"}"


USERS = {
    "chat": b'{"role":"user","content":"x"}',
    "messages": b'{"role":"user","content":"x"}',
    "responses": b'{"role":"user","content":"x"}',
    "gemini": b'{"role":"user","parts":[{"text":"x"}]}',
    "completions": b'"x"',
}


async def post(target, dialect, body, *headers):
    """The one answer to a body: no internal error, and JSON if it is an error (an engine's own 500 is the engine's)."""
    (answer,) = answers(await send(target.url, request(body, *headers, CLOSE, path=DIALECTS[dialect]), half_close=False))
    assert b"Internal error in tokencache" not in answer[2]
    if 400 <= answer[0] < 500:
        json.loads(answer[2])
    return answer


REFUSED = {
    "br": (415, b"", ASK),
    "gzip, gzip": (415, b"", gzip.compress(gzip.compress(ASK))),
    "gzip": (400, b"decompressed", ASK),
    "x-gzip": (413, b"too large", BOMB),
    "deflate": (400, b"decompressed", zlib.compress(ASK)[:-9]),
    "zstd": (400, b"decompressed", gzip.compress(ASK)),
}


@pytest.mark.parametrize(("dialect", "coding"), each([*DIALECTS], [*REFUSED]))
async def test_compressed_requests_that_cannot_be_read_are_refused_with_a_reason(target, dialect, coding):
    status, reason, body = REFUSED[coding]
    answer = await post(target, dialect, body, f"Content-Encoding: {coding}".encode())
    assert (answer[0], (reason or b"gzip, deflate or zstd") in answer[2]) == (status, True)
    assert await target.rig.store.session("attack") is None
    await target.unharmed()


async def test_a_compressed_request_outside_a_session_is_relayed_unchanged():
    kept = []

    async def engine(request):
        kept.append((request.headers.get("Content-Encoding"), await request.read()))
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine)
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with proxied(upstream=f"http://127.0.0.1:{runner.addresses[0][1]}") as rig:
            await send(rig.url, request(BOMB, b"Content-Encoding: gzip", CLOSE, session=None, path="/t/x"), half_close=False)
    finally:
        await runner.cleanup()
    assert ("gzip", BOMB) in kept


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_engine_that_compresses_without_being_asked(dialect, caplog):
    """Its answer cannot be read, so the session reports that something is missing. No crash, no unlimited memory."""

    async def engine(request):
        await request.read()
        return web.Response(body=BOMB, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with (
            proxied(upstream=f"http://127.0.0.1:{runner.addresses[0][1]}") as rig,
            aiohttp.ClientSession(auto_decompress=False) as http,
        ):
            async with http.post(rig.url + DIALECTS[dialect], data=shape(dialect), headers={HEADER: "s"}) as answer:
                assert len(await answer.read()) < 2**20
            assert not (await rig.info())["complete"]
            assert not (await rig.info())["open_calls"]
    finally:
        await runner.cleanup()
    assert ": internal error" not in caplog.text


@pytest.mark.parametrize("dialect", some(["chat", "messages", "responses", "gemini"], 1))
async def test_a_million_messages(target, dialect):
    answer = await post(target, dialect, shape(dialect, entries=b",".join([USERS[dialect]] * MILLION)))
    assert (answer[0], str(MOST_OBJECTS).encode() in answer[2]) == (413, True)
    assert await target.rig.store.session("attack") is None
    await target.unharmed()


MANY = {
    "members": lambda: b",".join(b'"m%d":1' % n for n in range(MILLION + 1)),
    "lists": lambda: b'"x":[' + b",".join([b"[]"] * MILLION) + b"]",
    "numbers": lambda: b'"stop":[' + b",".join([b"1"] * (MILLION + 2)) + b"]",
    "tools": lambda: b'"tools":[' + b",".join([b'{"type":"function","function":{"name":"f"}}'] * MILLION) + b"]",
}


@pytest.mark.whole
@pytest.mark.parametrize("what", MANY)
async def test_a_million_of_anything(target, what):
    answer = await post(target, "chat", shape("chat", more=MANY[what]()))
    assert (answer[0], str(MOST_VALUES).encode() in answer[2]) == (413, True)
    await target.unharmed()


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (b'{"a":"' + b"{[,".replace(b'"', b"") * MILLION + b'"}', False),
        (b'{"a":"' + rb"\"{\"," * MILLION + b'"}', False),
        (b'"' + rb"\"{" * MILLION, False),
        (b'"' + b"\\" * (2 * MILLION + 1), False),
        (b'"' + rb"\"" * MILLION + b"\\", False),
        (b"{  " * (MOST_OBJECTS + 1), True),
        (b'{"a":"}",' * (MOST_OBJECTS + 1), True),
        (b"[" * (MOST_VALUES + 1), True),
        (b"{ " * MOST_OBJECTS, False),
    ],
    ids=[
        "braces in a text",
        "quoted JSON in a text",
        "a text without an end",
        "half an escape",
        "both",
        "objects",
        "texts",
        "lists",
        "just",
    ],
)
async def test_only_structure_counts(body, refused):
    """Code and JSON in a message are one text, however long; and counting takes time linear in its length."""
    if not refused:
        await check_values(body)
        return
    with pytest.raises(Exception, match="objects"):
        await check_values(body)


DEEP = {
    "lists": b"[" * MILLION + b"]" * MILLION,
    "objects": b'{"a":' * 60_000 + b"1" + b"}" * 60_000,
    "open": b"[" * 900_000,
    "open objects": b'{"a":' * 90_000,
}
NESTED = {
    "chat": [b'"tools":%s', b'"response_format":%s', b'"chat_template_kwargs":{"a":%s}', b'"metadata":%s',
    b'"messages":[{"role":"user","content":%s}]',

             b'"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":%s}}]}]',
             b'"kv_transfer_params":%s'],
    "messages": [b'"tools":[{"name":"f","input_schema":%s}]', b'"system":%s', b'"metadata":%s',
    b'"messages":[{"role":"user","content":%s}]',
                 b'"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":%s}]}]'],
    "responses": [b'"tools":[{"type":"function","name":"f","parameters":%s}]', b'"text":%s', b'"input":[{"role":"user","content":%s}]',
                  b'"input":[{"type":"function_call_output","call_id":"a","output":%s}]', b'"metadata":%s'],
    "gemini": [b'"tools":[{"functionDeclarations":[{"name":"f","parameters":%s}]}]', b'"generationConfig":{"responseSchema":%s}',
               b'"contents":[{"role":"model","parts":[{"functionCall":{"name":"f","args":%s}}]}]', b'"systemInstruction":%s'],
    "completions": [b'"prompt":%s', b'"logit_bias":%s', b'"stop":%s'],
}  # fmt: skip


def nested():
    """Each member of each dialect with each depth. A usual run has each member with one, and each dialect with all."""
    for dialect, members in NESTED.items():
        for (n, member), (at, deep) in itertools.product(enumerate(members), enumerate(DEEP)):
            usual = (at - n) % min(len(DEEP), len(members)) == 0
            yield pytest.param(dialect, member, deep, marks=() if usual else pytest.mark.whole)


@pytest.mark.parametrize(("dialect", "member", "deep"), list(nested()))
async def test_unlimited_nesting(target, dialect, member, deep):
    """A complete one and one that never ends, in every member that is parsed."""
    answer = await post(target, dialect, shape(dialect, more=member % DEEP[deep]))
    assert answer[0] in {400, 413}
    await target.unharmed("attack")


@pytest.mark.whole
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
async def test_nested_in_the_text_of_arguments(target, dialect):
    for text in ("[" * 200_000, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "[" + "1," * 250_000 + "1]", "9" * 5000, "NaN"):
        quoted = json.dumps(text).encode()
        entry = {
            "chat": b'{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":%s}}]}',
            "messages": b'{"role":"assistant","content":[{"type":"text","text":%s}]}',
            "responses": b'{"type":"function_call","call_id":"a","name":"f","arguments":%s}',
            "gemini": b'{"role":"model","parts":[{"text":%s}]}',
        }[dialect] % quoted
        await post(target, dialect, shape(dialect, entries=USERS[dialect] + b"," + entry + b"," + USERS[dialect]))
    await target.unharmed("attack")


async def test_others_are_served_while_the_largest_is_read(target):
    """Several large bodies at once, and the well-behaved session in between."""
    large = shape("chat", entries=b",".join(b'{"role":"user","content":"%d"}' % n for n in range(5000)))
    attack = asyncio.gather(*(post(target, "chat", large) for _ in range(4)))
    while not attack.done():
        await target.step()
        await asyncio.sleep(0)
    assert {answer[0] for answer in await attack} <= {200, 400}
    await target.unharmed("attack")


async def test_the_trainers_routes_handle_malformed_bodies_too(target):
    for body in (
        b"",
        b"[" * MILLION,
        b'{"session":"\xff"}',
        b'{"session":"\\ud800"}',
        b'{"session":5}',
        b'{"session":"a","budget":{"calls":1e400}}',
        b"NaN",
        BOMB,
    ):
        (answer,) = answers(await send(target.url, request(body, CLOSE, path="/tokencache/v1/keys", session=None), half_close=False))
        assert answer[0] == 400, body[:40]
    await target.rig.say("attack", [user("EPISODE:talk")])
    await target.unharmed("attack")
