"""Provides the engines that the demo runs on, with the ground truth of every call.

The simulated engine records its ground truth. A real engine does not, so calls to it go through a relay, which records the ids that the
engine received and sampled. Calls with and without the proxy use the relay. It is between proxy and engine, so its records do not depend
on the proxy. The header `X-Session-ID`, which the proxy sends too, names the session of a record.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tokencache.demo.figures import Generation
from tokencache.testing.engine import SimulatedEngine

_HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "content-encoding", "keep-alive"})
_MAX_BODY = 64 * 2**20
_MAX_TOKENS = 160
"""Limit for a real engine. This much of each reply is enough to see drift."""


class StageError(Exception):
    """The demo cannot run on this engine. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine to run on.

    Attributes:
        name: a description.
        url: base URL, without `/v1`.
        model: name of the model.
        ground_truth: returns the calls of a session, in order.
        spell: returns the bytes of each given id.
        body: members to add to each request that does not go through the proxy.
        sampling: members to add to all requests.
    """

    name: str
    url: str
    model: str
    ground_truth: Callable[[str], list[Generation]]
    spell: Callable[[Sequence[int]], Awaitable[list[bytes]]]
    body: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def simulated(replies: Mapping[str, Sequence[str]]) -> AsyncIterator[Stage]:
    """Serve a simulated engine with these replies."""
    engine = SimulatedEngine(episodes=replies, chunk_tokens=4)

    def ground_truth(session: str) -> list[Generation]:
        mine = (entry for entry in engine.ground_truth if entry.session == session)
        return [Generation(entry.prompt_ids, entry.completion_ids, entry.logprobs) for entry in mine]

    async def spell(ids: Sequence[int]) -> list[bytes]:
        return [engine.tokenizer.token_bytes(token) for token in ids]

    async with engine.serve() as url:
        yield Stage("a simulated engine (real tokenizer and chat template, scripted replies)", url, engine.model, ground_truth, spell)


@contextlib.asynccontextmanager
async def real(upstream: str, model: str, key: str | None) -> AsyncIterator[Stage]:
    """Start a recording relay in front of the engine at a base URL. `model` is empty for the first one that it serves.

    Raises:
        StageError: the engine cannot be reached, or does not serve the model.
    """
    relay = _RecordingRelay(upstream.rstrip("/").removesuffix("/v1"), key)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10), auto_decompress=False) as client:
        relay.client = client
        try:
            served = [entry["id"] for entry in (await relay.ask("GET", "/v1/models"))["data"]]
            name = model or served[0]
            if name not in served:
                raise StageError(f"{relay.url} serves {', '.join(served)}, not {name}")
        except (aiohttp.ClientError, OSError, KeyError, IndexError, TypeError, ValueError) as why:
            raise StageError(f"no model at {relay.url}: {type(why).__name__}: {why}") from why
        runner = web.AppRunner(relay.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield Stage(
                f"{name} at {relay.url}",
                f"http://127.0.0.1:{runner.addresses[0][1]}",
                name,
                lambda session: relay.records[session],
                lambda ids: relay.spell(name, ids),
                body={"return_token_ids": True, "logprobs": True},
                sampling={"max_tokens": _MAX_TOKENS, "temperature": 1.0},
            )
        finally:
            await runner.cleanup()


class _RecordingRelay:
    """Relays all requests to an engine, and records the ids in its chat completions."""

    client: aiohttp.ClientSession

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self.records: dict[str, list[Generation]] = defaultdict(list)
        self._auth = {"Authorization": f"Bearer {key}"} if key else {}
        self._spelt: dict[int, bytes] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._forward)
        return app

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        async with self.client.request(method, self.url + path, json=body, headers=self._auth) as answer:
            return json.loads(await answer.read())

    async def spell(self, model: str, ids: Sequence[int]) -> list[bytes]:
        """Let the engine decode each id by itself. Part of a character becomes U+FFFD."""
        for token in ids:
            if token not in self._spelt:
                said = await self.ask("POST", "/detokenize", {"model": model, "tokens": [token]})
                self._spelt[token] = str(said.get("prompt", f"[{token}]")).encode()
        return [self._spelt[token] for token in ids]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP} | self._auth
        async with self.client.request(request.method, self.url + request.raw_path, headers=headers, data=await request.read()) as answer:
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=passed)
            await response.prepare(request)
            seen = bytearray()
            async for data in answer.content.iter_any():
                seen += data
                await response.write(data)
            if request.path == "/v1/chat/completions" and answer.ok:
                self._record(request.headers.get("X-Session-ID", ""), bytes(seen), streamed=answer.content_type == "text/event-stream")
            await response.write_eof()
            return response

    def _record(self, session: str, raw: bytes, *, streamed: bool) -> None:
        lines = [line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:")] if streamed else [raw]
        recorded = Generation([], [], [])
        for chunk in (json.loads(line) for line in lines if line != b"[DONE]"):
            recorded.prompt.extend(chunk.get("prompt_token_ids") or [])
            for choice in chunk.get("choices") or []:
                recorded.completion.extend(choice.get("token_ids") or [])
                recorded.logprobs.extend(entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or [])
        self.records[session].append(recorded)
