"""Helpers for the tests of the Anthropic dialect: parse requests, encode chat replies."""

import json
from typing import Any

from multidict import CIMultiDict

from tokencache.core.messages import digest
from tokencache.dialects.anthropic.reply import AnthropicReplyEncoder
from tokencache.dialects.anthropic.routes import AnthropicDialect
from tokencache.dialects.base import DialectRequest, ParsedRequest, ServedModel
from tokencache.dialects.chat.vocabulary import read_message

HANDLE = "0123456789abcdef" * 2
OTHER = "f" * 32


async def nothing(_names: Any) -> Any:
    raise AssertionError("Messages keep no documents")


def asked(body: Any = b"", path: str = "/v1/messages", method: str = "POST", served: tuple[ServedModel, ...] = ()) -> DialectRequest:
    async def models() -> list[ServedModel]:
        return list(served)

    return DialectRequest(
        method=method,
        path=path,
        query={},
        headers=CIMultiDict({"anthropic-version": "2023-06-01"}),
        body=body if isinstance(body, bytes) else json.dumps(body).encode(),
        handle=HANDLE,
        served=models,
        documents=nothing,
        forget=nothing,
    )


async def read(body: Any = b"", **more: Any) -> ParsedRequest:
    return await AnthropicDialect().parse(asked(body, **more))


async def chat_of(**members: Any) -> dict[str, Any]:
    """The chat request of a Messages request."""
    return json.loads((await read({"model": "m", "max_tokens": 9, **members})).body)


def digests(messages: list[dict[str, Any]]) -> list[bytes]:
    return [digest(read_message(message)) for message in messages]


def chunk(delta: dict[str, Any] | None = None, **choice: Any) -> bytes:
    """A chunk as vLLM 0.32 sends it when it was asked for ids."""
    said = {"index": 0, "delta": delta or {}, "logprobs": {"content": []}, "finish_reason": None, "token_ids": [7], **choice}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "engine", "choices": [said]}).encode()


def call(index: int, arguments: str | None = None, **first: Any) -> dict[str, Any]:
    """A delta of a call: `id` and `name` in its first one."""
    function = {k: v for k, v in {"name": first.pop("name", None), "arguments": arguments}.items() if v is not None}
    return {"content": None, "tool_calls": [{"index": index, **first, "function": function}]}


def usage(prompt: int = 12, completion: int = 5, **details: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return json.dumps({"choices": [], "usage": {**counts, "prompt_tokens_details": details or None}}).encode()


def completion(message: dict[str, Any], finish: str = "stop", stop: Any = None, **details: int) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop, "token_ids": [1], "logprobs": {"content": []}}
    counts = {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": details or None}
    return json.dumps({"id": "chatcmpl-1", "model": "engine", "choices": [choice], "usage": counts, "prompt_token_ids": [1]}).encode()


def streamed(chunks: list[bytes], *, done: bool = True) -> bytes:
    """All that a encoder says of a stream."""
    encoder = AnthropicReplyEncoder("claude-x", HANDLE)
    out = b"".join(encoder.chunk(b"data: " + data + b"\n\n", data, 12) for data in chunks)
    return out + (encoder.end() if done else b"")


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream; their names are those of their types."""
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
