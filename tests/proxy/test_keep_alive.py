"""Signs of life: what a harness hears while its call is planned, queued or prefilled, or the store is slow.

Whoever is slow here, engine or store, waits until a sign of life was heard.
"""

import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.kit import CHAT, HEADER, user
from tests.support.waiting import PATIENCE
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore

CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "prompt_token_ids": [1, 2, 3]},
    {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None, "token_ids": [4]}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [5]}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}},
]
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
ASKS = {
    "chat": (CHAT, {"model": "m", "messages": [user("hi")], "stream": True}, b": keep-alive"),
    "messages": ("/v1/messages", {"model": "m", "max_tokens": 9, "messages": [user("hi")], "stream": True}, b"event: ping"),
    "responses": ("/v1/responses", {"model": "m", "input": "hi", "stream": True}, b": "),
    "gemini": ("/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, b": "),
}


END = {"chat": b"[DONE]", "messages": b"message_stop", "responses": b"response.completed", "gemini": b"STOP"}
WHERE = ("begin", "plan", "head", "first", "commit")
"""Where it takes long: the store finds the past, the engine is asked what it is, it queues, it prefills, the store keeps the turn."""


class Slow(MemoryStore):
    """A store that takes its time at one operation."""

    def __init__(self, where, heard):
        super().__init__()
        self.where, self.heard = where, heard

    async def begin(self, *args, **more):
        if self.where == "begin":
            await self.heard.wait()
        return await super().begin(*args, **more)

    async def commit(self, *args, **more):
        if self.where == "commit":
            await self.heard.wait()
        return await super().commit(*args, **more)


@contextlib.asynccontextmanager
async def waiting(where):
    """A proxy before an engine: somewhere, nothing goes on until `heard` is set."""
    heard = asyncio.Event()

    async def answer(request):
        if not (await request.json()).get("stream"):  # the proxy's own probe: this engine is none to splice on
            if where == "plan":
                await heard.wait()
            return web.Response(status=404)
        if where == "head":
            await heard.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if where == "first":
            await heard.wait()
        for chunk in CHUNKS:
            await response.write(b"data: " + json.dumps(HEAD | chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with (
        serving(Settings(upstream=f"http://127.0.0.1:{port}", port=0, keep_alive=0.01), Slow(where, heard)) as (url, _),
        aiohttp.ClientSession(url, headers={HEADER: "s"}) as http,
    ):
        yield http, heard
    await runner.cleanup()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dialect", ASKS)
async def test_silence_is_broken_in_the_dialects_own_way(dialect, where):
    path, body, sign = ASKS[dialect]
    async with waiting(where) as (http, heard):
        async with asyncio.timeout(PATIENCE), http.post(path, json=body) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            before = b""
            while sign not in (before.partition(b"Hi")[2] if where == "commit" else before):
                before += await answer.content.readany()
            heard.set()
            rest = await answer.read()
        assert b"Hi" in (before if where == "commit" else rest)
        assert END[dialect] in rest
        async with http.get("/tokencache/v1/sessions/s/turns") as said:
            (turn,) = (await said.json())["turns"]
        assert (turn["dialect"], turn["prompt_tokens"], turn["completion_tokens"]) == (dialect, 3, 2)
