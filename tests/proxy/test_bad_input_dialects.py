"""Bad input in every dialect: its own error or a recorded turn; never a crash, never a wrong splice, never a wedged session."""

import asyncio
import json

import pytest
from yarl import URL

from tests.proxy.kit import HEADER

M, R, G = "/v1/messages", "/v1/responses", "/v1beta/models/sim:generateContent"
FIRST = {
    M: {"model": "sim", "max_tokens": 50, "messages": [{"role": "user", "content": "EPISODE:talk"}]},
    R: {"model": "sim", "input": [{"role": "user", "content": "EPISODE:talk"}]},
    G: {"contents": [{"role": "user", "parts": [{"text": "EPISODE:talk"}]}]},
}
LIST = {M: "messages", R: "input", G: "contents"}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ENTRIES = {
    "unknown kind of content": {
        M: {"role": "user", "content": [{"type": "hologram", "data": "x"}]},
        R: {"type": "hologram_call", "id": "x"},
        G: {"role": "user", "parts": [{"hologram": {}}]},
    },
    "a result without its call": {
        M: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "nobody", "content": "x"}]},
        R: {"type": "function_call_output", "call_id": "nobody", "output": "x"},
        G: {"role": "user", "parts": [{"functionResponse": {"name": "nobody", "response": {"output": "x"}}}]},
    },
    "an image": {
        M: {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}]},
        R: {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}]},
        G: {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PNG}}]},
    },
    "one id twice": {
        M: {"role": "assistant", "content": [{"type": "tool_use", "id": "same", "name": "f", "input": {}}] * 2},
        R: {"type": "function_call", "call_id": "same", "name": "f", "arguments": "{}"},
        G: {"role": "model", "parts": [{"functionCall": {"id": "same", "name": "f", "args": {}}}] * 2},
    },
    "nothing": {M: None, R: None, G: None},
    "no role": {M: {"content": "x"}, R: {"content": "x"}, G: {"parts": 5}},
    "content of another type": {
        M: {"role": "user", "content": 7},
        R: {"role": "user", "content": 7},
        G: {"role": "user", "parts": "x"},
    },
    "a lone surrogate": {
        M: {"role": "user", "content": "\ud800"},
        R: {"role": "user", "content": "\ud800"},
        G: {"role": "user", "parts": [{"text": "\ud800"}]},
    },
}
DEEP = [b"[" * 50_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000]
NO_REQUEST = [b"", b"{", b"[]", b"null", b'"x"', b"{} {}", b'{"messages":', b"\xff", *DEEP]


def tools(path, count):
    named = [(f"tool_{n}", {"type": "object", "properties": {"a": {"type": "string"}}}) for n in range(count)]
    if path == M:
        return [{"name": name, "input_schema": schema} for name, schema in named]
    if path == R:
        return [{"type": "function", "name": name, "parameters": schema} for name, schema in named]
    return [{"functionDeclarations": [{"name": name, "parametersJsonSchema": schema} for name, schema in named]}]


def is_its_own(path, status, said):
    error = said["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path == M:
        assert said["type"] == "error"
        assert error["type"] == "invalid_request_error"
    elif path == R:
        assert {"type", "param", "code"} <= set(error)
    else:
        assert (error["code"], error["status"]) == (status, "INVALID_ARGUMENT")


async def send(rig, path, body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with rig.http.post(rig.url + path, data=raw, headers={HEADER: "s", "Content-Type": "application/json"}) as answer:
        text = await answer.text()
        assert "Internal error in tokencache" not in text
        return answer.status, json.loads(text)


async def unharmed(rig, path):
    assert (await send(rig, path, FIRST[path]))[0] == 200
    info = await rig.info()
    assert not info["open_calls"]
    assert info["complete"]
    await rig.check()


@pytest.mark.parametrize("path", FIRST)
@pytest.mark.parametrize("raw", NO_REQUEST, ids=lambda raw: raw[:12].decode(errors="replace"))
async def test_no_request(rig, path, raw):
    status, said = await send(rig, path, raw)
    assert status == 400
    is_its_own(path, status, said)
    await unharmed(rig, path)


@pytest.mark.parametrize("path", FIRST)
@pytest.mark.parametrize("entry", ENTRIES)
async def test_an_unusual_entry_in_the_history(rig, path, entry):
    listed = [*FIRST[path][LIST[path]], ENTRIES[entry][path], *FIRST[path][LIST[path]]]
    status, said = await send(rig, path, {**FIRST[path], LIST[path]: listed})
    if status == 200:
        assert (await rig.turns())[-1]["match"] in {"root", "plain"}
    else:
        assert status == 400
        is_its_own(path, status, said)
    await unharmed(rig, path)


@pytest.mark.parametrize("path", FIRST)
async def test_a_thousand_tools(rig, path):
    assert (await send(rig, path, {**FIRST[path], "tools": tools(path, 1000)}))[0] == 200
    assert (await rig.turns())[-1]["tools"] == 1000
    await unharmed(rig, path)


@pytest.mark.parametrize("path", FIRST)
async def test_half_a_request(rig, path):
    """The harness stops in the middle of its body and goes: nothing begins, nothing stays open."""
    host, port = rig.url.removeprefix("http://").split(":")
    for sent in (b"", b'{"model": "sim", "mess'):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: h\r\n{HEADER}: s\r\nContent-Length: 500\r\n\r\n".encode() + sent)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert await reader.read() == b""
    await unharmed(rig, path)


@pytest.mark.parametrize("path", ["/s/s/v1/responses", "/s/s/v1/responses/", "/s/s/v1%2Fresponses"])
async def test_what_is_no_handshake_of_a_websocket_is_answered_with_426(rig, path):
    """Codex uses HTTP at once after 426; after 405 it tries seven times."""
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "12",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with rig.http.get(URL(rig.url + path, encoded=True), headers=headers) as answer:
        said = await answer.json()
        assert (answer.status, answer.headers["Upgrade"]) == (426, "HTTP/1.1")
        assert "WebSocket" in said["error"]["message"]
    async with rig.http.get(URL(rig.url + path, encoded=True)) as answer:
        assert answer.status == 405
    async with rig.http.post(rig.url + "/s/s/v1/responses", json=FIRST[R]) as answer:
        assert answer.status == 200, "the session is as before"
