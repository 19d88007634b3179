"""Reads a reply of any dialect: its text, and the ids and handles that may come back.

The recorded reply and the replayed one are traversed alike. The resulting lists of ids have one length and one order, which maps each id of
the recording to one of the replay.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

IDENTITIES = ("id", "call_id", "signature", "encrypted_content", "thoughtSignature", "responseId")


@dataclass
class Reply:
    """A harness's reply. `events` counts the events of a stream."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call, the arguments as JSON text."""
    served: list[list[str]] = field(default_factory=list)
    events: int = 0

    def note(self, value: dict[str, Any], *members: str) -> None:
        """Adds the identities among the members of an object, each once."""
        for member in members or IDENTITIES:
            known = [member, value.get(member)]
            if known[1] and isinstance(known[1], str) and known not in self.served:
                self.served.append(known)

    @property
    def delivered_characters(self) -> int:
        """Characters of thinking and text."""
        return len(self.reasoning) + len(self.content)


def read_reply(dialect: str, body: str, *, stream: bool, reply: Reply | None = None) -> Reply:
    """Reads an answer, up to wherever it ends; `reply` is what was read of it before."""
    reply = reply or Reply()
    for value in _values(body) if stream else [json.loads(body)]:
        reply.events += 1
        for one in value if isinstance(value, list) else [value]:  # Gemini streams a list if no events were requested
            _READERS[dialect](reply, one)
    return reply


def _values(body: str) -> Iterator[Any]:
    """Reads the JSON of each complete event."""
    for event in body.replace("\r\n", "\n").split("\n\n")[:-1]:
        data = "\n".join(line.removeprefix("data:").removeprefix(" ") for line in event.split("\n") if line.startswith("data:"))
        if data and data != "[DONE]":
            yield json.loads(data)


def _chat(reply: Reply, value: dict[str, Any]) -> None:
    for choice in value.get("choices", ()):
        message = choice.get("message") or choice.get("delta") or {}
        reply.reasoning += message.get("reasoning") or ""
        reply.content += message.get("content") or ""
        for call in message.get("tool_calls") or ():
            if call.get("id"):
                reply.calls.append(["", ""])
                reply.note(call, "id")
            function = call.get("function") or {}
            reply.calls[-1][0] += function.get("name") or ""
            reply.calls[-1][1] += function.get("arguments") or ""


def _messages(reply: Reply, value: dict[str, Any]) -> None:
    if value.get("type") == "message":
        for block in value["content"]:
            _block(reply, block)
            if block["type"] == "tool_use":
                reply.calls[-1][1] = json.dumps(block["input"], ensure_ascii=False)
    elif "content_block" in value:
        _block(reply, value["content_block"])
    elif value.get("type") == "content_block_delta":
        delta = value["delta"]
        reply.reasoning += delta.get("thinking", "")
        reply.content += delta.get("text", "")
        if "partial_json" in delta:
            reply.calls[-1][1] += delta["partial_json"]
        reply.note(delta, "signature")


def _block(reply: Reply, block: dict[str, Any]) -> None:
    reply.reasoning += block.get("thinking", "")
    reply.content += block.get("text", "")
    if block["type"] == "tool_use":
        reply.calls.append([block["name"], ""])
        reply.note(block, "id")
    reply.note(block, "signature")


def _responses(reply: Reply, value: dict[str, Any]) -> None:
    kind = value.get("type", "")
    if value.get("object") == "response":
        reply.note(value, "id")
        for item in value["output"]:
            reply.note(item, "id", "call_id")
            _item(reply, item)
    elif kind == "response.created":
        reply.note(value["response"], "id")
    elif kind == "response.output_item.added":
        reply.note(value["item"], "id", "call_id")
        if value["item"]["type"] in {"function_call", "custom_tool_call"}:
            reply.calls.append([value["item"]["name"], ""])
    elif kind == "response.reasoning_text.delta":
        reply.reasoning += value["delta"]
    elif kind == "response.output_text.delta":
        reply.content += value["delta"]
    elif kind in {"response.function_call_arguments.delta", "response.custom_tool_call_input.delta"}:
        reply.calls[-1][1] += value["delta"]
    elif kind == "response.output_item.done":
        reply.note(value["item"], "encrypted_content")


def _item(reply: Reply, item: dict[str, Any]) -> None:
    texts = "".join(part.get("text", "") for part in item.get("content") or ())
    if item["type"] == "reasoning":
        reply.reasoning += texts
    elif item["type"] == "message":
        reply.content += texts
    else:
        reply.calls.append([item["name"], item.get("arguments") or item.get("input") or ""])
    reply.note(item, "encrypted_content")


def _gemini(reply: Reply, value: dict[str, Any]) -> None:
    reply.note(value, "responseId")
    for candidate in value.get("candidates", ()):
        for part in candidate.get("content", {}).get("parts", ()):
            if part.get("thought"):
                reply.reasoning += part.get("text", "")
            else:
                reply.content += part.get("text", "")
            if "functionCall" in part:
                reply.calls.append([part["functionCall"]["name"], json.dumps(part["functionCall"].get("args"), ensure_ascii=False)])
                reply.note(part["functionCall"], "id")
            reply.note(part, "thoughtSignature")


_READERS = {"chat": _chat, "messages": _messages, "responses": _responses, "gemini": _gemini}
