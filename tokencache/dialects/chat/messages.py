"""Chat messages: one raw entry of `messages` (OpenAI chat completions, as vLLM 0.32 reads it) → canonical.

A conversation is sent whole with every call, so nearly every entry has been seen before: what was read is remembered
by the hash of its raw bytes, and a known entry costs one short hash.
"""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from tokencache.core.canonical import Call, Message, canonical_json, digest

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


class UnreadableError(ValueError):
    """An entry is no message that we understand: its call is relayed and recorded, but not matched."""


class ReadMessage(msgspec.Struct, frozen=True):
    """An entry as read.

    `message` keeps the text of an assistant's entries only: of all others the digest is enough. `malformed` says that
    the arguments of a call are not the JSON text of an object.
    """

    message: Message
    digest: bytes
    malformed: bool = False


class MessageReader:
    """Reads raw entries, remembering the last `size` distinct ones."""

    def __init__(self, size: int = 200_000) -> None:
        self._size = size
        self._known: OrderedDict[bytes, ReadMessage] = OrderedDict()  # a dict looks ever longer for its first entry when those go
        # xxh3 is no cryptographic hash: an unknown seed keeps others from choosing entries that collide.
        self._seed = secrets.randbits(64)

    def read(self, raw: bytes) -> ReadMessage:
        """Read one entry.

        Raises:
            UnreadableError: it is no message that we understand.
        """
        key = xxhash.xxh3_128_digest(raw, self._seed)
        known = self._known.pop(key, None)
        if known is None:
            entry = msgspec.json.decode(raw)
            known = _slim(read_message(entry), entry)
            if len(self._known) >= self._size:
                self._known.popitem(last=False)
        self._known[key] = known
        return known


def _slim(message: Message, entry: dict[str, Any]) -> ReadMessage:
    own = digest(message)
    if message.role == "assistant":
        return ReadMessage(message, own, any(not _is_object(call["function"].get("arguments")) for call in entry.get("tool_calls") or ()))
    return ReadMessage(Message(message.role, answers=message.answers, media=b"1" if message.media else b""), own)


def read_message(entry: Any) -> Message:
    """Read one decoded entry.

    Raises:
        UnreadableError: it is no message that we understand.
    """
    if not isinstance(entry, dict):
        raise UnreadableError("a message is no object")
    role = entry.get("role")
    if not isinstance(role, str):
        raise UnreadableError("a message has no role")
    role = "system" if role == "developer" else role
    content, media = _content(entry.get("content"))
    return Message(
        role=role,
        content=content,
        reasoning=_text(entry.get("reasoning") or entry.get("reasoning_content"), "reasoning"),
        calls=_calls(entry),
        answers=_text(entry.get("tool_call_id"), "tool_call_id"),
        name=_text(entry.get("name"), "name") if role not in {"tool", "assistant"} else None,
        media=media,
        parts=isinstance(entry.get("content"), list),
    )


def _content(content: Any) -> tuple[str | None, bytes]:
    if content is None or isinstance(content, str):
        return content, b""
    if not isinstance(content, list):
        raise UnreadableError("content is neither text nor a list of parts")
    texts, media = [], []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise UnreadableError("a content part is no object")
        kind = part.get("type")
        member = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if member is not None and isinstance(part.get(member), str):
            texts.append(part[member])
        else:
            media.append({key: value for key, value in part.items() if key != "cache_control"})
    return ("\n".join(texts) if texts else None), (canonical_json(media) if media else b"")


def _calls(entry: dict[str, Any]) -> tuple[Call, ...]:
    listed = entry.get("tool_calls") or ()
    if not isinstance(listed, list | tuple):
        raise UnreadableError("tool_calls is no list")
    single = entry.get("function_call")
    return tuple(_call(item) for item in [*listed, *([{"function": single}] if single else ())])


def _call(item: Any) -> Call:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnreadableError("a tool call names no function")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return Call(_text(item.get("id"), "id") or "", function["name"], arguments or "")


def _text(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UnreadableError(f"{what} is no text")
    return value


def _is_object(arguments: Any) -> bool:
    """Whether arguments are what the API wants: the JSON text of an object."""
    try:
        return isinstance(arguments, str) and isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def with_reasoning(raw: bytes) -> bytes:
    """Write `reasoning_content` as `reasoning`: chat completions take both, `/tokenize` only the latter (vLLM 0.32)."""
    if b'"reasoning_content"' not in raw:
        return raw
    entry = msgspec.json.decode(raw)
    inner = entry.pop("reasoning_content", None)
    if inner is not None and entry.get("reasoning") is None:
        entry["reasoning"] = inner
    return msgspec.json.encode(entry)


def as_reminders(entries: Sequence[bytes]) -> list[bytes]:
    """Say system messages behind the first entry as the user's, marked as reminders: for templates that take none there.

    vLLM's own converter moves them to the front of the system prompt instead (Messages, 0.32), so that every new one changes
    the whole prompt; Claude Code itself writes them this way to models that it knows by name.
    """
    return [entries[0], *map(_as_reminder, entries[1:])]


def _as_reminder(raw: bytes) -> bytes:
    if b"system" not in raw and b"developer" not in raw:
        return raw
    entry = msgspec.json.decode(raw)
    if entry.get("role") not in {"system", "developer"}:
        return raw
    text = _content(entry.get("content"))[0] or ""
    return msgspec.json.encode({"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"})


def with_stand_ins(raw: bytes) -> bytes:
    """Write tool-call arguments that are no JSON text of an object as one: objects as their text, all else as `{}`.

    An engine may refuse the whole history for them, and so every later turn (vLLM before 0.32 where the text is no
    JSON, 0.32 where it is an object or `null`); where the exact ids are sent, or the call is only part of a history to
    be rendered, their text no longer matters.
    """
    entry = msgspec.json.decode(raw)
    for call in entry.get("tool_calls") or ():
        arguments = call["function"].get("arguments")
        if isinstance(arguments, dict):
            call["function"]["arguments"] = msgspec.json.encode(arguments).decode()
        elif not _is_object(arguments):
            call["function"]["arguments"] = "{}"
    return msgspec.json.encode(entry)
