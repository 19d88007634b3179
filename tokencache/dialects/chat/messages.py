"""Chat messages: one raw entry of `messages` (OpenAI chat completions, as vLLM 0.32 reads it) → canonical.

A conversation is sent whole with every call, so nearly every entry has been seen before: what was read is remembered
by the hash of its raw bytes, and a known entry costs one short hash.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from tokencache.core.messages import Message, ToolCall, canonical_json, digest, exact_digest_of_json

Raw = msgspec.Raw

_MEMBERS = msgspec.json.Decoder(dict[str, Raw])
_CALLS = msgspec.json.Decoder(list[dict[str, Raw]] | None)
_ENCODER = msgspec.json.Encoder()
_NULL, _NO_ARGUMENTS = Raw(b"null"), Raw(b'"{}"')
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


class UnreadableError(ValueError):
    """An entry is no message that we understand: its call is relayed and recorded, but not matched."""


class ReadMessage(msgspec.Struct, frozen=True):
    """An entry as read.

    `message` keeps the text of an assistant's entries only: of all others the digests are enough. `digest` is equal for all writings
    of one reply, `exact` for what no template can tell apart (`core.messages`). `malformed` says that an engine may refuse the
    arguments of a call (`with_stand_ins`).
    """

    message: Message
    digest: bytes
    exact: bytes
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
    own, written = digest(message), exact_digest_of_json(entry)
    if message.role == "assistant":
        malformed = any(not _is_json(call["function"].get("arguments")) for call in entry.get("tool_calls") or ())
        return ReadMessage(message, own, written, malformed)
    return ReadMessage(Message(message.role, answers=message.answers, media=b"1" if message.media else b""), own, written)


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


def _calls(entry: dict[str, Any]) -> tuple[ToolCall, ...]:
    listed = entry.get("tool_calls") or ()
    if not isinstance(listed, list | tuple):
        raise UnreadableError("tool_calls is no list")
    single = entry.get("function_call")
    return tuple(_call(item) for item in [*listed, *([{"function": single}] if single else ())])


def _call(item: Any) -> ToolCall:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnreadableError("a tool call names no function")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(_text(item.get("id"), "id") or "", function["name"], arguments or "")


def _text(value: Any, what: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UnreadableError(f"{what} is no text")
    return value


def _is_json(arguments: Any) -> bool:
    """Whether arguments are a text that the engine can read as JSON.

    vLLM reads it with Python's `json`, which also takes NaN, Infinity and numbers that no double can hold.
    """
    if not isinstance(arguments, str):
        return False
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        try:
            json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    return True


def with_reasoning(raw: bytes) -> bytes:
    """Write `reasoning_content` as `reasoning`: chat completions take both, `/tokenize` only the latter (vLLM 0.32).

    All other members keep their bytes, and an entry that cannot be read is returned as it is.
    """
    if b'"reasoning_content"' not in raw and b"\\u" not in raw:
        return raw
    try:
        members = _MEMBERS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return raw
    inner = members.pop("reasoning_content", None)
    if inner is None:
        return raw
    if bytes(members.get("reasoning", _NULL)) == b"null":
        members["reasoning"] = inner  # which may be null, too
    return _ENCODER.encode(members)


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
    """Replace tool-call arguments that an engine may refuse: an object or a list by its text, all else that is no JSON text by `{}`.

    An engine may refuse the whole history for them, and so every later turn (vLLM before 0.32 where the text is no JSON, 0.32
    where it is an object or `null`). vLLM 0.32 itself renders `{}` where the text is no JSON. Arguments that it can read keep
    their bytes, and so do all other members: what is rendered is what the engine renders of the harness's own bytes.
    """
    members = _MEMBERS.decode(raw)
    calls = _CALLS.decode(members.get("tool_calls", _NULL)) or []
    for call in calls:
        function = _MEMBERS.decode(call["function"])
        function["arguments"] = _safe(function.get("arguments", _NULL))
        call["function"] = Raw(_ENCODER.encode(function))
    return _ENCODER.encode({**members, "tool_calls": Raw(_ENCODER.encode(calls))}) if calls else raw


def _safe(arguments: Raw) -> Raw:
    """Return raw arguments that an engine takes."""
    given = bytes(arguments)
    if given[:1] in {b"{", b"["}:
        return Raw(_ENCODER.encode(given.decode()))
    return arguments if _is_json(msgspec.json.decode(given)) else _NO_ARGUMENTS
