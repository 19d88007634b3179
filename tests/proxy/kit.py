"""What the proxy's tests share: an engine with a proxy before it, on real sockets, and ways to talk to both.

`proxied` starts everything and stops it. `Tiny` is an upstream that keeps the very bytes it was sent and answers with
the very bytes it is told, for what the simulated engine is too tidy for; `exchange` sends and reads raw HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tokencache.config import Settings
from tokencache.core import invariants
from tokencache.proxy.server import serving
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

CHAT = "/v1/chat/completions"
HEADER = "X-Tokencache-Session"
THOUGHT = "<think>\nI look first — naïve café ☕.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "bash",  "arguments": {"timeout": 10.0, "cmd": "ls  -la\\n"}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "cat ü.txt"}}\n</tool_call>'
EPISODES = {
    "demo": [f"{THOUGHT}  Let me look.\n{CALL}", f"{THOUGHT}{CALLS}", f"{THOUGHT}All done ☕, nothing more.  ", "<think>\nok\n</think>\n\nYes."],
    "talk": [f"{THOUGHT}One, two, three, four, five, six, seven — naïve.", f"{THOUGHT}Second.", f"{THOUGHT}Third.", f"{THOUGHT}Fourth."],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}, "timeout": {"type": "number"}}, "required": ["cmd"]},
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def echo(message: dict[str, Any]) -> dict[str, Any]:
    """A served message as the usual harness sends it back: trimmed, without reasoning, arguments written anew."""
    said: dict[str, Any] = {"role": "assistant", "content": (message.get("content") or "").strip()}
    if message.get("tool_calls"):
        said["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": rewritten(call["function"]["arguments"])}} for call in message["tool_calls"]
        ]
    return said


def rewritten(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


def results(message: dict[str, Any], text: str = "a.txt\n") -> list[dict[str, Any]]:
    """What follows a reply: results of its calls, or the user's next words."""
    calls = message.get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls] or [user("go on")]


def events(text: str) -> list[str]:
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def assembled(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a client puts together from the chunks of one choice."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            for name, value in call["function"].items():
                message["tool_calls"][call["index"]]["function"][name] += value or ""
    return message


@dataclass
class Rig:
    """An engine, the proxy before it, and a client."""

    url: str
    up: str
    engine: SimulatedEngine
    proxy: Any
    store: Any
    http: aiohttp.ClientSession

    async def post(self, session: str | None = "s", path: str = CHAT, *, url: str | None = None, **body: Any) -> tuple[int, Any]:
        """Status and decoded body of a call: JSON, or the list of a stream's chunks."""
        headers = {HEADER: session} if session else {}
        sent = body if path != CHAT else {"model": "sim", **body}
        async with self.http.post((url or self.url) + path, json=sent, headers=headers) as answer:
            text = await answer.text()
        if answer.content_type == "text/event-stream":
            lines = events(text)
            assert lines[-1] == "[DONE]"
            return answer.status, [json.loads(line) for line in lines[:-1]]
        return answer.status, json.loads(text)

    async def say(self, session: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A call that must succeed; returns the message of its first choice."""
        status, said = await self.post(session, messages=messages, **more)
        assert status == 200, said
        return assembled(said) if more.get("stream") else said["choices"][0]["message"]

    async def get(self, path: str, **headers: str) -> Any:
        async with self.http.get(self.url + path, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def info(self, session: str = "s") -> Any:
        return await self.get(f"/tokencache/v1/sessions/{session}")

    async def turns(self, session: str = "s") -> list[dict[str, Any]]:
        return (await self.get(f"/tokencache/v1/sessions/{session}/turns"))["turns"]

    async def exported(self, session: str = "s") -> Any:
        return await self.get(f"/tokencache/v1/sessions/{session}/trajectories")

    def book(self, session: str = "s") -> list[Any]:
        return [entry for entry in self.engine.books if entry.session == session]

    async def check(self, session: str = "s", *, aborted: int = 0) -> Any:
        """Hold what is exported of a session against the engine's books; returns the export.

        `aborted` is how many entries of the books were cut short: of those a beginning is recorded.
        """
        exported = await self.exported(session)
        known = await self.store.turns(session)
        tokens = await self.store.tokens(session, [turn.id for turn in known])
        books = self.book(session)
        assert not invariants.audit(known, tokens, session=session)
        assert not invariants.engine_agrees(known, tokens, [(b.prompt_ids, b.completion_ids, b.logprobs) for b in books], session=session)
        whole = Counter((tuple(b.prompt_ids), tuple(b.completion_ids), tuple(b.logprobs)) for b in books if not b.aborted)
        cut = 0
        for sequence in exported["sequences"]:
            trained = 0
            for turn in sequence["turns"]:
                start, end = turn["completion"]
                said = tuple(sequence["token_ids"][start:end])
                trained += end - start
                assert sequence["loss_mask"][start:end] == [1] * (end - start)
                entry = (tuple(sequence["token_ids"][:start]), said, tuple(sequence["logprobs"][start:end]))
                if whole[entry]:
                    whole[entry] -= 1
                else:
                    assert "aborted" in turn["marks"] or "upstream-broke" in turn["marks"] or "engine-error" in turn["marks"], turn
                    cut += 1
            assert sum(sequence["loss_mask"]) == trained
        assert not +whole, "the engine said what no sequence trains"
        assert cut == aborted
        return exported


@contextlib.asynccontextmanager
async def proxied(engine: SimulatedEngine | None = None, store: Any = None, *, upstream: str | None = None, **settings: Any):
    """Serve an engine and the proxy before it; `upstream` puts the proxy before something else."""
    engine = engine or SimulatedEngine(episodes=EPISODES, seed=7)
    store = store or MemoryStore()
    async with engine.serve() as up, aiohttp.ClientSession() as http:
        async with serving(Settings(upstream=upstream or up, port=0, **settings), store) as (url, proxy):
            if upstream is None:
                await proxy.engine.model()  # the probe's own calls are over before a test looks at the books
            yield Rig(url, up, engine, proxy, store, http)


# raw HTTP


@dataclass
class Message:
    """A request or an answer as it stood on the wire."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def of(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def plain(self, *without: str) -> list[tuple[str, str]]:
        """Headers that are to arrive as they were: not those of one connection, nor the date."""
        gone = {"connection", "keep-alive", "transfer-encoding", "date", "host", "te", "trailer", "upgrade", *without}
        return sorted((key.lower(), value) for key, value in self.headers if key.lower() not in gone)


async def read_message(reader: asyncio.StreamReader, *, answers: str = "") -> Message:
    """Read one HTTP message; `answers` is the method that an answer answers."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = head[:-4].split("\r\n")
    message = Message(line, [(name, value.strip()) for name, _, value in (at.partition(":") for at in lines)])
    bare = answers == "HEAD" or re.search(r" (204|304) ", line)
    if message.of("transfer-encoding") == ["chunked"] and not bare:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            message.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
    elif message.of("content-length") and not bare:
        message.body = await reader.readexactly(int(message.of("content-length")[0]))
    elif answers and not bare:
        message.body = await reader.read()
    return message


async def exchange(url: str, request: bytes) -> Message:
    """Send the bytes of one request, read its answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(request)
        await writer.drain()
        return await read_message(reader, answers=request.split(b" ", 1)[0].decode())
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@dataclass
class Tiny:
    """An upstream that answers requests for `/t…` with `answer`'s bytes, and everything else (the probe) with 404."""

    answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    seen: list[Message] = field(default_factory=list)
    pieces: Any = None
    """If set: called with a StreamWriter, in place of `answer`."""

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await read_message(reader)
            if request.line.split(" ")[1].startswith("/t") and "/tokenize" not in request.line:
                self.seen.append(request)
                if self.pieces is not None:
                    await self.pieces(writer)
                else:
                    writer.write(self.answer)
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def serve(self):
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await server.wait_closed()
