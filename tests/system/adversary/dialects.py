"""Writes requests and reads answers in each of the four dialects, as a client of that dialect would.

Entries are kept in chat form. A dialect's entry is one chat message, and the other way round: what its codec would join to one
message (replies right behind each other, texts that vanish because they are empty) `presentable` keeps apart or leaves out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.system.adversary.engine import MODEL
from tests.system.adversary.observed import Entry
from tests.system.adversary.words import Message, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

DIALECTS = ("chat", "messages", "responses", "gemini")
FORMS = frozenset({"trimmed", "padded", "rewritten JSON", "silent"})
"""The harmless forms that every dialect can write."""
UNPARSED = "__unparsed_arguments"
BETWEEN: Message = {"role": "user", "content": "Go on."}


def presentable(dialect: str, entries: Sequence[Entry]) -> list[Entry]:
    """The entries in a form that this dialect can write as one message each."""
    if dialect == "chat":
        return list(entries)
    out: list[Entry] = []
    for entry in entries:
        silent = not text_of(entry.message) and not entry.message.get("tool_calls")
        if entry.is_reply and out and out[-1].is_reply:
            out.append(Entry(BETWEEN))
        writable = entry.is_reply and (dialect == "responses" or _thought(entry.message))
        if silent and not writable and entry.message["role"] in {"system", "assistant"}:
            continue
        if entry.message["role"] == "system" and out and dialect == "gemini":
            continue
        message = {**entry.message, "content": "-"} if silent and entry.message["role"] == "user" else entry.message
        kept = entry.handle if dialect != "messages" or _thought(message) else ""
        out.append(entry if message is entry.message and kept == entry.handle else replace(entry, message=message, handle=kept))
    return out


def write(
    dialect: str, entries: Sequence[Entry], tools: list[Message], kwargs: dict[str, Any], limits: dict[str, Any] | None = None
) -> bytes:
    """Write a request. `limits` are members that end a reply, by their names in chat; a dialect leaves out those that it does not know."""
    body = _WRITERS[dialect](entries, tools, kwargs)
    for name, value in (limits or {}).items():
        _LIMITERS[dialect](body, name, value)
    return json.dumps(body).encode()


def served(dialect: str, answer: bytes) -> tuple[Message, str]:
    """Read an answer: the message in chat, and the handle that came with it."""
    return _READERS[dialect](json.loads(answer))


def _thought(message: Message) -> str:
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _calls(message: Message) -> list[tuple[str, str, Any]]:
    """The calls of a reply: id, name, and the value of the arguments; a value that is not an object is wrapped."""
    out = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        try:
            value = json.loads(arguments) if arguments.strip() else {}
            json.dumps(value, allow_nan=False)
        except ValueError:
            value = None
        out.append((call["id"], call["function"]["name"], value if isinstance(value, dict) else {UNPARSED: arguments}))
    return out


def sayable(dialect: str, message: Message) -> bool:
    """Whether a dialect has a way to write this very reply: only chat and Responses can write arguments that are not an object."""
    return dialect in {"chat", "responses"} or not any(UNPARSED in value for _, _, value in _calls(message))


def shown(dialect: str, message: Message) -> Message:
    """What a client gets of a reply: Gemini does not show calls whose arguments are not an object (rule `calls-hidden`)."""
    if dialect != "gemini" or sayable(dialect, message):
        return message
    calls = [call for call, (_, _, value) in zip(message["tool_calls"], _calls(message), strict=True) if UNPARSED not in value]
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, **({"tool_calls": calls} if calls else {})}


def _chat_call(name: str, function: str, value: Any) -> Message:
    """A call in chat format, from arguments as a value."""
    wrapped = isinstance(value, dict) and list(value) == [UNPARSED]
    arguments = value[UNPARSED] if wrapped else value if isinstance(value, str) else json.dumps(value)
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def _reply(content: str, thought: str, calls: list[Message]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thought:
        message["reasoning"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _limit_chat(body: Message, name: str, value: Any) -> None:
    body[name] = value


def _limit_messages(body: Message, name: str, value: Any) -> None:
    if name == "thinking_token_budget":
        body["thinking"] = {"type": "enabled", "budget_tokens": value}
    elif name in {"max_tokens", "stop"}:
        body["stop_sequences" if name == "stop" else name] = value


def _limit_responses(body: Message, name: str, value: Any) -> None:
    if name in {"max_tokens", "stop", "stop_token_ids"}:
        body["max_output_tokens" if name == "max_tokens" else name] = value


def _limit_gemini(body: Message, name: str, value: Any) -> None:
    if name in {"max_tokens", "stop"}:
        body["generationConfig"]["stopSequences" if name == "stop" else "maxOutputTokens"] = value


# --- chat completions ------------------------------------------------------------------------------------------------------


def _write_chat(entries: Sequence[Entry], tools: list[Message], kwargs: dict[str, Any]) -> Message:
    body: Message = {"model": MODEL, "messages": [entry.message for entry in entries]}
    return body | ({"tools": tools} if tools else {}) | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _read_chat(answer: Message) -> tuple[Message, str]:
    message = answer["choices"][0]["message"]
    members = ("role", "content", "reasoning", "tool_calls")
    return {name: message[name] for name in members if message.get(name) is not None or name == "content"}, ""


# --- Anthropic Messages ----------------------------------------------------------------------------------------------------


def _write_messages(entries: Sequence[Entry], tools: list[Message], kwargs: dict[str, Any]) -> Message:
    del kwargs
    body: Message = {"model": MODEL, "max_tokens": 1000, "messages": []}
    for n, entry in enumerate(entries):
        message = entry.message
        if message["role"] == "system" and not n:
            body["system"] = text_of(message)
        elif message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            body["messages"].append({"role": "user", "content": [result]})
        elif message["role"] == "assistant":
            body["messages"].append({"role": "assistant", "content": _blocks(entry)})
        else:
            body["messages"].append({"role": message["role"], "content": message["content"]})
    if tools:
        of = [tool["function"] for tool in tools]
        body["tools"] = [{"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in of]
    return body


def _blocks(entry: Entry) -> list[Message]:
    blocks: list[Message] = []
    if thought := _thought(entry.message):
        blocks.append({"type": "thinking", "thinking": thought, "signature": entry.handle})
    if text := text_of(entry.message):
        blocks.append({"type": "text", "text": text})
    return blocks + [{"type": "tool_use", "id": name, "name": function, "input": value} for name, function, value in _calls(entry.message)]


def _read_messages(answer: Message) -> tuple[Message, str]:
    blocks = answer["content"]
    thinking = [block for block in blocks if block["type"] == "thinking"]
    calls = [_chat_call(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    thought = "".join(block["thinking"] for block in thinking)
    return _reply(text, thought, calls), thinking[0]["signature"] if thinking else ""


# --- OpenAI Responses ------------------------------------------------------------------------------------------------------


def _write_responses(entries: Sequence[Entry], tools: list[Message], kwargs: dict[str, Any]) -> Message:
    del kwargs
    body: Message = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"], "input": []}
    for n, entry in enumerate(entries):
        message = entry.message
        if message["role"] == "system" and not n:
            body["instructions"] = text_of(message)
        elif message["role"] == "tool":
            body["input"].append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": text_of(message)})
        elif message["role"] == "assistant":
            body["input"] += _items(entry)
        else:
            content = message["content"]
            parts = content if isinstance(content, str) else [{"type": "input_text", "text": part["text"]} for part in content]
            body["input"].append({"role": message["role"], "content": parts})
    if tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in tools]
    return body


def _items(entry: Entry) -> list[Message]:
    items: list[Message] = []

    def add(prefix: str, item: Message) -> None:
        items.append({"id": f"{prefix}_{entry.handle}_{len(items)}", **item} if entry.handle else item)

    message = entry.message
    if thought := _thought(message):
        sealed = {"encrypted_content": entry.handle} if entry.handle else {}
        add("rs", {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}], **sealed})
    text = text_of(message)
    if text or not (thought or message.get("tool_calls")):
        add("msg", {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
    for call in message.get("tool_calls") or ():
        add("fc", {"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _read_responses(answer: Message) -> tuple[Message, str]:
    items = answer["output"]
    texts = {kind: "".join(p["text"] for i in items if i["type"] == kind for p in i["content"]) for kind in ("message", "reasoning")}
    calls = [_chat_call(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return _reply(texts["message"], texts["reasoning"], calls), answer["id"].removeprefix("resp_")


# --- Gemini ----------------------------------------------------------------------------------------------------------------


def _write_gemini(entries: Sequence[Entry], tools: list[Message], kwargs: dict[str, Any]) -> Message:
    del kwargs
    body: Message = {"contents": [], "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    names: dict[str, str] = {}
    for entry in entries:
        message = entry.message
        texts = [{"text": part["text"]} for part in message["content"]] if isinstance(message.get("content"), list) else []
        texts = texts or [{"text": text_of(message)}]
        if message["role"] == "system":
            body["systemInstruction"] = {"parts": texts}
        elif message["role"] == "tool":
            name = message["tool_call_id"]
            response = {"id": name, "name": names.get(name, "bash"), "response": {"output": text_of(message)}}
            body["contents"].append({"role": "user", "parts": [{"functionResponse": response}]})
        elif message["role"] == "assistant":
            names |= {name: function for name, function, _ in _calls(message)}
            body["contents"].append({"role": "model", "parts": _parts(entry)})
        else:
            body["contents"].append({"role": "user", "parts": texts})
    if tools:
        body["tools"] = [{"functionDeclarations": [tool["function"] for tool in tools]}]
    return body


def _parts(entry: Entry) -> list[Message]:
    parts: list[Message] = []
    if thought := _thought(entry.message):
        parts.append({"text": thought, "thought": True})
    if text := text_of(entry.message):
        parts.append({"text": text})
    for name, function, value in _calls(entry.message):
        parts.append({"functionCall": {"id": name, "name": function, "args": value}})
    return [{**part, "thoughtSignature": entry.handle} for part in parts] if entry.handle else parts


def _read_gemini(answer: Message) -> tuple[Message, str]:
    parts = answer["candidates"][0]["content"]["parts"]
    texts = [
        "".join(part["text"] for part in parts if "text" in part and bool(part.get("thought")) == thought) for thought in (False, True)
    ]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    handle = next((part["thoughtSignature"] for part in parts if "thoughtSignature" in part), "")
    return _reply(texts[0], texts[1], [_chat_call(call["id"], call["name"], call["args"]) for call in calls]), handle


_WRITERS = {"chat": _write_chat, "messages": _write_messages, "responses": _write_responses, "gemini": _write_gemini}
_READERS = {"chat": _read_chat, "messages": _read_messages, "responses": _read_responses, "gemini": _read_gemini}
_LIMITERS = {"chat": _limit_chat, "messages": _limit_messages, "responses": _limit_responses, "gemini": _limit_gemini}
