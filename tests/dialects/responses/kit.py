"""Helpers for the tests of the Responses dialect: parse requests, with documents stored in memory, and encode chat replies."""

import json
from collections.abc import Mapping
from typing import Any

from tokencache.core.messages import digest
from tokencache.dialects.base import DialectRequest, DirectReply, ModelCall, ParsedRequest, TokenCount
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.dialects.responses.routes import ResponsesDialect

DIALECT = ResponsesDialect()


class Session:
    """Asks the codec; keeps what it wants kept, and counts what that costs."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.calls = 0
        self.trips = 0
        self.written = 0

    @property
    def handle(self) -> str:
        """The handle of the last call."""
        return f"{self.calls:032x}"

    async def ask(self, body: Any = b"", path: str = "", method: str = "POST", query: Mapping[str, str] | None = None) -> ParsedRequest:
        self.calls += 1
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await DIALECT.parse(
            DialectRequest(
                method=method,
                path=f"/v1/responses{path}",
                query=query or {},
                headers={},
                body=raw,
                handle=self.handle,
                served=None,
                documents=self._documents,
                forget=self._forget,
            )
        )

    async def _documents(self, names):
        self.trips += 1
        return [self.kept.get(name) for name in names]

    async def _forget(self, name):
        return self.kept.pop(name, None) is not None

    async def spoken(self, **members: Any) -> ModelCall:
        meant = await self.ask({"model": "m", **members})
        assert isinstance(meant, ModelCall)
        return meant

    async def chat(self, **members: Any) -> dict[str, Any]:
        """The chat request that a request becomes."""
        return json.loads((await self.spoken(**members)).body)

    async def respond(self, reply: dict[str, Any], *, stream: bool = False, finish: str | None = None, **members: Any) -> dict[str, Any]:
        """The response to a request, if the engine says `reply`; what is to be kept is kept."""
        spoken = await self.spoken(**members, stream=stream)
        self.chat_request = json.loads(spoken.body)
        if stream:
            events = said(spoken.encoder, chunks(reply, finish))
            response = events[-1][1]["response"]
        else:
            response = json.loads(spoken.encoder.whole(completion(reply, finish)))
        documents = spoken.encoder.documents()
        self.written += sum(map(len, documents.values()))
        self.kept.update(documents)
        return response

    async def get(self, path: str, method: str = "GET", **query: str) -> Any:
        meant = await self.ask(path=path, method=method, query=query)
        assert isinstance(meant, DirectReply)
        return json.loads(meant.body)

    async def count(self, **members: Any) -> TokenCount:
        meant = await self.ask({"model": "m", **members}, path="/input_tokens")
        assert isinstance(meant, TokenCount)
        return meant


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


def call(name: str, arguments: str, place: int = 0) -> dict[str, Any]:
    return {"id": f"chatcmpl-tool-{place:016x}", "type": "function", "function": {"name": name, "arguments": arguments}}


def ending(reply: dict[str, Any], finish: str | None) -> str:
    return finish or ("tool_calls" if reply.get("tool_calls") else "stop")


def completion(reply: dict[str, Any], finish: str | None = None) -> bytes:
    """A whole chat completion, as vLLM 0.32 sends it when asked for ids."""
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **reply}, "logprobs": {"content": []}, "token_ids": [1, 2]}
    choice["finish_reason"] = ending(reply, finish)
    whole = {"id": "chatcmpl-1", "created": 1795252138, "model": "engine", "choices": [choice], "usage": USAGE, "prompt_token_ids": [1]}
    return json.dumps(whole).encode()


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": {"content": []}, "finish_reason": finish, "token_ids": [7]}
    return json.dumps({"id": "chatcmpl-1", "created": 1795252138, "model": "engine", "choices": [choice]}).encode()


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def chunks(reply: dict[str, Any], finish: str | None = None, size: int = 5) -> list[bytes]:
    """The chunks of a reply, in vLLM's order: reasoning, content, calls; with chunks that say nothing between."""
    sent = [chunk({"role": "assistant", "content": ""}), chunk({})]
    sent += [chunk({"reasoning": piece}) for piece in pieces(reply.get("reasoning") or "", size)]
    sent += [chunk({})]
    sent += [chunk({"content": piece}) for piece in pieces(reply.get("content") or "", size)]
    for i, item in enumerate(reply.get("tool_calls") or ()):
        first = {"id": item["id"], "type": "function", "index": i, "function": {"name": item["function"]["name"]}}
        sent += [chunk({"content": None, "tool_calls": [first]})]
        sent += [chunk({"tool_calls": [{"index": i, "function": {"arguments": p}}]}) for p in pieces(item["function"]["arguments"], size)]
    sent += [chunk({}, ending(reply, finish))]
    return [*sent, json.dumps({"id": "chatcmpl-1", "created": 1795252138, "model": "engine", "choices": [], "usage": USAGE}).encode()]


def said(encoder: Any, sent: list[bytes]) -> list[tuple[str, dict[str, Any]]]:
    """The events of a reply: their names and their data."""
    return events(b"".join(encoder.chunk(b"data: " + data + b"\n\n", data, 9) for data in sent) + encoder.end())


def events(text: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in text.decode().split("\n\n")[:-1]:
        kind, data = event.split("\n")
        assert kind.startswith("event: ")
        assert data.startswith("data: ")
        found.append((kind[7:], json.loads(data[6:])))
    assert all(kind == data["type"] for kind, data in found)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    return found


def digests(messages: list[dict[str, Any]]) -> list[bytes]:
    return [digest(read_message(message)) for message in messages]
