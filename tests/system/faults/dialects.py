"""Writes a harness's requests and reads its answers in three dialects: chat completions, Messages, Responses.

A stream counts as received whole only if it ended as its dialect requires: `[DONE]` after a finish reason, `message_stop`,
`response.completed`. Anything else is a failed call, as it is for the SDKs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_PARAMETERS = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["cmd"],
}
_TOOL, _WHAT = "bash", "Run a command"
Item = dict[str, Any]


@dataclass
class ReceivedReply:
    """A reply as its harness has it: text, calls (id, name, arguments as JSON text), and the form that it has in the history."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    echo: list[Item] = field(default_factory=list)


class Chat:
    """OpenAI's chat completions."""

    name, path = "chat", "/v1/chat/completions"

    def user(self, text: str) -> list[Item]:
        return [{"role": "user", "content": text}]

    def results(self, received: ReceivedReply, text: str) -> list[Item]:
        return [{"role": "tool", "tool_call_id": call[0], "content": text} for call in received.calls]

    def body(self, history: list[Item], *, stream: bool) -> Item:
        tool = {"type": "function", "function": {"name": _TOOL, "description": _WHAT, "parameters": _PARAMETERS}}
        return {"model": "sim", "messages": history, "tools": [tool], "stream": stream}

    def whole(self, answer: Item) -> ReceivedReply:
        message = answer["choices"][0]["message"]
        calls = [[c["id"], c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()]
        return self._received(message.get("content") or "", calls)

    def streamed(self, events: list[str]) -> ReceivedReply | None:
        text, calls, finished = "", [], False
        for event in events:
            if event == "[DONE]":
                return self._received(text, calls) if finished else None
            chunk = json.loads(event)
            if "error" in chunk:
                return None
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                finished = finished or bool(choice.get("finish_reason"))
                for part in choice["delta"].get("tool_calls") or ():
                    answer = part.get("function") or {}
                    if part["index"] == len(calls):
                        calls.append([part["id"], answer.get("name") or "", ""])
                    calls[part["index"]][2] += answer.get("arguments") or ""
        return None

    def _received(self, text: str, calls: list[list[str]]) -> ReceivedReply:
        message: Item = {"role": "assistant", "content": text.strip()}
        if calls:
            message["tool_calls"] = [{"id": c[0], "type": "function", "function": {"name": c[1], "arguments": c[2]}} for c in calls]
        return ReceivedReply(text, calls, [message])


class Messages:
    """Anthropic's Messages."""

    name, path = "messages", "/v1/messages"

    def user(self, text: str) -> list[Item]:
        return [{"role": "user", "content": [{"type": "text", "text": text}]}]

    def results(self, received: ReceivedReply, text: str) -> list[Item]:
        return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call[0], "content": text} for call in received.calls]}]

    def body(self, history: list[Item], *, stream: bool) -> Item:
        tool = {"name": _TOOL, "description": _WHAT, "input_schema": _PARAMETERS}
        return {"model": "sim", "max_tokens": 4096, "messages": history, "tools": [tool], "stream": stream}

    def whole(self, answer: Item) -> ReceivedReply:
        blocks = answer["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [[block["id"], block["name"], json.dumps(block["input"])] for block in blocks if block["type"] == "tool_use"]
        return ReceivedReply(text, calls, [{"role": "assistant", "content": blocks or [{"type": "text", "text": ""}]}])

    def streamed(self, events: list[str]) -> ReceivedReply | None:
        blocks: list[Item] = []
        for event in map(json.loads, events):
            match event["type"]:
                case "error":
                    return None
                case "content_block_start":
                    blocks.append({**event["content_block"], "partial": ""})
                case "content_block_delta":
                    self._grow(blocks[event["index"]], event["delta"])
                case "message_stop":
                    return self.whole({"content": [self._closed(block) for block in blocks]})
        return None

    @staticmethod
    def _grow(block: Item, delta: Item) -> None:
        match delta["type"]:
            case "input_json_delta":
                block["partial"] += delta["partial_json"]
            case kind:
                name = kind.removesuffix("_delta")
                block[name] = block.get(name, "") + delta[name]

    @staticmethod
    def _closed(block: Item) -> Item:
        partial = block.pop("partial")
        return block | {"input": json.loads(partial)} if partial else block


class Responses:
    """OpenAI's Responses; the history is sent back as items."""

    name, path = "responses", "/v1/responses"

    def user(self, text: str) -> list[Item]:
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]

    def results(self, received: ReceivedReply, text: str) -> list[Item]:
        return [{"type": "function_call_output", "call_id": call[0], "output": text} for call in received.calls]

    def body(self, history: list[Item], *, stream: bool) -> Item:
        tool = {"type": "function", "name": _TOOL, "description": _WHAT, "parameters": _PARAMETERS, "strict": False}
        return {"model": "sim", "input": history, "tools": [tool], "stream": stream, "store": False}

    def whole(self, answer: Item) -> ReceivedReply | None:
        if answer["status"] != "completed":
            return None
        items = answer["output"]
        text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
        calls = [[item["call_id"], item["name"], item["arguments"]] for item in items if item["type"] == "function_call"]
        return ReceivedReply(text, calls, items)

    def streamed(self, events: list[str]) -> ReceivedReply | None:
        last = json.loads(events[-1]) if events else {}
        return self.whole(last["response"]) if last.get("type") == "response.completed" else None


DIALECTS = (Chat(), Messages(), Responses())
