"""Nothing that a harness sends may crash the proxy, wedge a session, or lose a recorded turn."""

import asyncio
import contextlib
import json
from urllib.parse import urlsplit

import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, echo, proxied, results, user
from tests.proxy.raw import read_message
from tests.support.pairwise import each, some
from tests.support.waiting import PATIENCE
from tokencache.testing import SimulatedEngine

ASK = {"model": "sim", "messages": [user("EPISODE:demo")], "tools": TOOLS}


async def send(rig, raw, session="s", **headers):
    sent = {HEADER: session, "Content-Type": "application/json", **headers}
    async with rig.http.post(rig.url + CHAT, data=raw, headers=sent) as answer:
        text = await answer.text()
        assert "Internal error in tokencache" not in text
        return answer.status, json.loads(text) if text.startswith("{") else text


async def unharmed(rig):
    """The session goes on from the turn that was recorded before; every call is closed."""
    message = await rig.say("s", ASK["messages"], tools=TOOLS)
    await rig.say("s", [*ASK["messages"], echo(message), *results(message)], tools=TOOLS)
    assert (await rig.turns())[-1]["match"] == "continue"
    assert not (await rig.info())["open_calls"]
    await rig.check()


NO_JSON = {
    "empty": b"",
    "cut off": b'{"messages": [{"role": "us',
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "no messages": b"{}",
    "two values": b"{} {}",
    "not UTF-8": b'{"messages": [], "\xff": 1}',
    "binary": bytes(range(256)),
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"messages":[' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"]}",
    "surrogate in a name": b'{"messages": [{"role":"user","content":"x"}], "\\ud800": 1}',
}
WRONG = {
    "messages": [None, 5, "x", {}, [None], ["x"], [[]], [5]],
    "tools": [5, "x", {}, True],
    "model": [5, [], {}, True],
    "stream": ["yes", 2, [], {}],
    "n": ["two", 1.5, [], {}, True],
    "logprobs": ["yes", 5, []],
    "return_token_ids": ["yes", 5, []],
    "include_reasoning": ["no", 2, {}],
    "kv_transfer_params": [5, "x", [], {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": []}, {"prompt_token_ids": 5}],
    "chat_template_kwargs": [5, "x", []],
    "reasoning_effort": [5, [], {}],
    "documents": [5, "x", {}],
    "continue_final_message": ["x", 5],
    "add_generation_prompt": ["x", 5],
    "echo": ["x", 5],
    "truncate_prompt_tokens": ["x", [], 1.5],
}
ODD_MESSAGES = [
    [{}],
    [{"content": "no role"}],
    [{"role": 5, "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"a": 1}}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": ["x"]}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    [{"role": "alien", "content": "x"}],
    [{"role": "assistant", "content": None, "tool_calls": 5}],
    [{"role": "assistant", "tool_calls": [5]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
    [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"a": 1}}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": None}}]}],
    [{"role": "assistant", "function_call": {"name": "f", "arguments": "oops"}}],
    [{"role": "assistant", "content": "x", "reasoning": 5}],
    [{"role": "tool", "tool_call_id": 5, "content": "x"}],
    [{"role": "user", "name": [], "content": "x"}],
    [],
]


@pytest.mark.parametrize("name", NO_JSON)
async def test_a_body_that_is_no_request(rig, name):
    status, said = await send(rig, NO_JSON[name])
    assert status == 400
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert (said["error"]["type"], said["error"]["code"]) == ("invalid_request_error", 400)
    await unharmed(rig)


@pytest.mark.parametrize("member", WRONG)
async def test_a_member_of_a_wrong_type(rig, member):
    for value in WRONG[member]:
        before = len(rig.engine.requests)
        status, said = await send(rig, json.dumps({**ASK, member: value}))
        assert status == 400, (member, value)
        assert said["error"]["code"] == 400
        assert said["error"]["type"] == "invalid_request_error"
        assert (said["error"]["param"] or "").startswith(member)
        assert len(rig.engine.requests) == before  # never sent to the engine
    await unharmed(rig)


@pytest.mark.parametrize("messages", some(ODD_MESSAGES, 8), ids=lambda messages: json.dumps(messages)[:60])
async def test_a_history_that_cannot_be_read_is_the_engines_to_judge(rig, messages):
    for history in (messages, [user("EPISODE:demo"), *messages, user("x")]):
        body = {**ASK, "messages": history}
        status, said = await send(rig, json.dumps(body))
        async with rig.http.post(rig.up + CHAT, json=body) as answer:
            assert status == answer.status
            if status != 200:
                assert said in (text := await answer.text(), json.loads(text) if text.startswith("{") else None)
        if status == 200:
            assert (await rig.turns())[-1]["match"] in {"plain", "root"}
    await unharmed(rig)


async def test_an_oversized_body():
    async with proxied(SimulatedEngine(episodes=EPISODES), max_body=20_000) as rig:
        status, said = await send(rig, json.dumps({**ASK, "x": "x" * 30_000}))
        assert (status, said["error"]["code"], said["error"]["type"]) == (413, 413, "invalid_request_error")
        await unharmed(rig)


@contextlib.asynccontextmanager
async def connected(rig, path, length, *, waits):
    """A connection on which the head of a request was sent, and nothing of its body."""
    parts = urlsplit(rig.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    lines = [f"POST {path} HTTP/1.1", "Host: h", "Content-Type: application/json", f"Content-Length: {length}"]
    lines += ["Expect: 100-continue"] if waits else []
    writer.write("\r\n".join((*lines, "", "")).encode())
    try:
        async with asyncio.timeout(PATIENCE):
            yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1beta/models/sim:generateContent"])
@pytest.mark.parametrize("waits", [False, True])
async def test_an_oversized_body_is_refused_before_it_arrives(path, waits):
    async with (
        proxied(SimulatedEngine(episodes=EPISODES), max_body=20_000) as rig,
        connected(rig, f"/s/s{path}", 20_001, waits=waits) as (reader, writer),
    ):
        answer = await read_message(reader, answers="POST")
        assert " 413 " in answer.line
        error = json.loads(answer.body)
        assert ("type" in error, "status" in error["error"]) == ("messages" in path, "v1beta" in path), "it has the form of its dialect"
        assert answer.of("connection") == (["close"] if waits else [])
        if not waits:
            writer.write(b" " * 20_001 + b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
            assert " 200 " in (await read_message(reader, answers="GET")).line


@pytest.mark.parametrize("relayed", [False, True])
async def test_a_client_that_waits_is_told_to_send_its_body(relayed):
    """A request without a session is passed on as it arrives, whatever its size."""
    raw = json.dumps(ASK).encode()
    path, most = (CHAT, 10) if relayed else (f"/s/s{CHAT}", 20_000)
    async with (
        proxied(SimulatedEngine(episodes=EPISODES), max_body=most) as rig,
        connected(rig, path, len(raw), waits=True) as (reader, writer),
    ):
        assert " 100 " in (await read_message(reader, answers="POST")).line
        writer.write(raw)
        answer = await read_message(reader, answers="POST")
        assert (answer.line.split(" ")[1], answer.of("connection")) == ("200", []), answer.body


ODD_MEMBERS = [
    b'"temperature": NaN', b'"temperature": 1e999', b'"seed": 123456789012345678901234567890', b'"stop": "\\ud800"', b'"x": Infinity',
    b'"x": "\\udfff"', b'"logit_bias": {"5": -Infinity}', b'"x": ' + b"[" * 400 + b"]" * 400, b'"user": "\\u0000"',
    b'"tools": [{"type":"function","function":{"name":"f","description":"\\ud800"}}]', b'"x": "\xff"', b'"stop": ["\xff"]',
    b'"tools": [' + b'{"a":' * 600 + b"1" + b"}" * 600 + b"]", b'"chat_template_kwargs": {"a": ' + b"[" * 700 + b"]" * 700 + b"}",
    b'"documents": [' + b"[" * 700 + b"]" * 700 + b"]", b'"chat_template": "\\ud800"', b'"chat_template_kwargs": {"a": "\\ud800"}',
    b'"metadata": {"a": 1, "a": 2}', b'"messages": [], "messages": [{"role":"user","content":"EPISODE:demo"}]',
    b'"kv_transfer_params": {"other": NaN}', b'"reasoning_effort": "\\ud800"',
]  # fmt: skip


@pytest.mark.parametrize(("stream", "member"), each([False, True], ODD_MEMBERS), ids=lambda value: repr(value)[:40])
async def test_unreasonable_values_that_json_can_write(rig, member, stream):
    body = b'{"messages": [{"role":"user","content":"EPISODE:demo"}], "stream": %s, %s}' % (b"true" if stream else b"false", member)
    async with rig.http.post(rig.up + CHAT, data=body, headers={"Content-Type": "application/json"}) as answer:
        direct = answer.status
    sent = {HEADER: "s", "Content-Type": "application/json"}
    async with rig.http.post(rig.url + CHAT, data=body, headers=sent) as answer:
        text = await answer.text()
        assert answer.status in {direct, 400}, text
        assert "Internal error in tokencache" not in text
    if answer.status == 200:
        assert (await rig.info())["turns"] == 1
        await rig.turns()
    await unharmed(rig)


async def test_the_wrong_content_type_is_the_engines_to_judge(rig):
    raw = json.dumps(ASK).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        async with rig.http.post(rig.up + CHAT, data=raw, headers={"Content-Type": kind}) as answer:
            direct = answer.status, await answer.json()
        assert await send(rig, raw, **{"Content-Type": kind}) == direct
    await unharmed(rig)
