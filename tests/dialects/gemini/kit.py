"""Helpers for the tests of the Gemini dialect: parse requests, collect replies as clients do."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tokencache.core.messages import Message, digest
from tokencache.dialects.base import DialectRequest, ParsedRequest, ServedModel
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.dialects.gemini.routes import GeminiDialect

HANDLE = "0123456789abcdef" * 2
GENERATE = "/v1beta/models/m:generateContent"
STREAM = "/v1beta/models/m:streamGenerateContent"


def asked(body: Any = b"", path: str = GENERATE, method: str = "POST", query: dict[str, str] | None = None) -> DialectRequest:
    async def served() -> list[ServedModel]:
        return [ServedModel("m", 4096), ServedModel("Qwen/Qwen3-8B")]

    async def nothing(names: Sequence[str]) -> list[bytes | None]:
        return [None for _ in names]

    async def not_there(_: str) -> bool:
        return False

    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return DialectRequest(
        method=method, path=path, query=query or {}, headers={}, body=raw, handle=HANDLE, served=served, documents=nothing, forget=not_there
    )


def read(body: Any = b"", path: str = GENERATE, method: str = "POST", query: dict[str, str] | None = None) -> ParsedRequest:
    return asyncio.run(GeminiDialect().parse(asked(body, path, method, query)))


def chat_of(contents: list[Any], **more: Any) -> dict[str, Any]:
    """The chat request that a conversation becomes."""
    return json.loads(read({"contents": contents, **more}).body)


def digests(messages: list[Any]) -> list[bytes]:
    return [digest(read_message(message)) for message in messages]


def served(reply: dict[str, Any]) -> Message:
    """The message of a whole chat reply, as the proxy records it."""
    return read_message({key: value for key, value in reply["choices"][0]["message"].items() if value is not None})


def completion(message: dict[str, Any], finish: str = "stop", **usage: Any) -> dict[str, Any]:
    """A whole chat completion, with what the engine is asked for on top."""
    choice = {"index": 0, "message": {"role": "assistant", "content": None, "reasoning": None, **message}, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "served",
        "choices": [choice | {"logprobs": {"content": []}, "token_ids": [1, 2]}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16, **usage},
        "prompt_token_ids": [1, 2, 3],
    }


def chunks(*deltas: dict[str, Any], finish: str = "stop", **usage: Any) -> list[dict[str, Any]]:
    """The same as a stream: role, deltas, finish, usage."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "served"}
    said = [{"role": "assistant", "content": ""}, *deltas]
    listed = [
        head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": [1]}]} for delta in said
    ]
    listed.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": None, "token_ids": [2]}]})
    listed.append(head | {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16, **usage}})
    return listed


def merged(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts with texts of one kind joined, as harnesses keep them (Gemini CLI 0.61); an empty text says nothing."""
    kept: list[dict[str, Any]] = []
    for part in parts:
        if kept and "text" in part and "text" in kept[-1] and part.get("thought") == kept[-1].get("thought"):
            kept[-1] = {**part, **kept[-1], "text": kept[-1]["text"] + part["text"]}
        elif part.get("text") != "" or "thoughtSignature" in part:
            kept.append(dict(part))
    return kept
