"""What the proxy's tests share: an engine with a proxy before it, on real sockets, and ways to talk to both.

`proxied` starts everything and stops it; `Rig` calls engine and proxy, and compares exports with the engine's ground-truth log.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.proxy.probed import probed_once
from tests.support import invariants
from tokencache import metrics
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

CHAT = "/v1/chat/completions"
HEADER = "X-Tokencache-Session"
THOUGHT = "<think>\nI look first — naïve café ☕.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "bash",  "arguments": {"timeout": 10.0, "cmd": "ls  -la\\n"}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "cat ü.txt"}}\n</tool_call>'
EPISODES = {
    "demo": [
        f"{THOUGHT}  Let me look.\n{CALL}",
        f"{THOUGHT}{CALLS}",
        f"{THOUGHT}All done ☕, nothing more.  ",
        "<think>\nok\n</think>\n\nYes.",
    ],
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
            {**call, "function": {**call["function"], "arguments": rewritten(call["function"]["arguments"])}}
            for call in message["tool_calls"]
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


def calls_held(why: str) -> float:
    """How often a call of this process has waited for an engine: all proxies in it share the figure."""
    return metrics.REGISTRY.get_sample_value("tokencache_held_total", {"why": why}) or 0.0


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

    async def post(
        self, session: str | None = "s", path: str = CHAT, *, url: str | None = None, named: str = "", **body: Any
    ) -> tuple[int, Any]:
        """Status and decoded body of a call: JSON, or the list of a stream's chunks; `named` becomes the request's id."""
        headers = ({HEADER: session} if session else {}) | ({"X-Request-Id": named} if named else {})
        sent = body if path != CHAT else {"model": "sim", **body}
        headers["Content-Type"] = "application/json"
        async with self.http.post((url or self.url) + path, data=io.BytesIO(json.dumps(sent).encode()), headers=headers) as answer:
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

    async def readiness(self) -> Any:
        """What `/readyz` says, whether it is ready or not."""
        async with self.http.get(self.url + "/readyz") as answer:
            found = await answer.json()
            assert answer.status == (200 if found["ready"] else 503)
            return found

    async def info(self, session: str = "s") -> Any:
        return await self.get(f"/tokencache/v1/sessions/{session}")

    async def turns(self, session: str = "s") -> list[dict[str, Any]]:
        return (await self.get(f"/tokencache/v1/sessions/{session}/turns"))["turns"]

    async def exported(self, session: str = "s") -> Any:
        return await self.get(f"/tokencache/v1/sessions/{session}/trajectories")

    def ground_truth(self, session: str = "s") -> list[Any]:
        return [entry for entry in self.engine.ground_truth if entry.session == session]

    async def check(self, session: str = "s", *, aborted: int = 0) -> Any:
        """Compares a session's export with the engine's ground-truth log; returns the export.

        `aborted` is the number of entries of the log that were cut short: the turns record the beginning of those.
        """
        exported = await self.exported(session)
        known = await self.store.turns(session)
        tokens = await self.store.tokens(session, [turn.id for turn in known])
        ground_truth = [entry for entry in self.ground_truth(session) if entry.completion_ids or entry.finish_reason != "abort"]
        assert not invariants.audit(known, tokens, session=session)
        assert not invariants.engine_agrees(
            known, tokens, [(b.prompt_ids, b.completion_ids, b.logprobs) for b in ground_truth], session=session
        )
        whole = Counter((tuple(b.prompt_ids), tuple(b.completion_ids), tuple(b.logprobs)) for b in ground_truth if not b.aborted)
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
async def proxied(
    engine: SimulatedEngine | None = None, store: Any = None, *, upstream: str | None = None, of_its_own_kind: bool = False, **settings: Any
):
    """Serve an engine and the proxy before it; `upstream` puts the proxy before something else.

    `of_its_own_kind`: the engine is unlike others that were made alike, because the test has changed the simulator.

    `engine_kind` is the setting `engine`.
    """
    if "engine_kind" in settings:
        settings["engine"] = settings.pop("engine_kind")
    engine = engine or SimulatedEngine(episodes=EPISODES, seed=7)
    store = store or MemoryStore()
    settings.setdefault("hold", 0)  # what fails is to be seen at once
    async with contextlib.AsyncExitStack() as opened:
        up = await opened.enter_async_context(engine.serve())
        http = await opened.enter_async_context(aiohttp.ClientSession())
        if upstream is None and not of_its_own_kind:
            opened.enter_context(probed_once(engine, up, settings))
        running = serving(Settings(upstream=upstream or up, port=0, **settings), store)
        url, proxy = await opened.enter_async_context(running)
        if upstream is None:
            await proxy.engine.model()  # the probe's own calls are over before a test reads the ground-truth log
        yield Rig(url, up, engine, proxy, store, http)
