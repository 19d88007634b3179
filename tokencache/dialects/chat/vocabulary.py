"""Chat messages: one raw entry of `messages` (OpenAI chat completions, as vLLM 0.32 reads it) → canonical.

A conversation is sent whole with every call, so nearly every entry has been seen before: what was read is remembered
by the hash of its raw bytes, and a known entry costs one short hash.


Sampling policy: parameters that are used whatever the harness asks for.

A trainer wants its rollouts sampled at the temperature of its loss, and a harness brings a temperature of its own. A policy
pins parameters by name, for all sessions (the server's option) or for one (its registered key, which wins name by name).
They are written into the request before it is sent; what the harness had asked for is kept with the turn.

A pin is a value, not a limit: a harness that asks for less gets the pinned one, too. `max_tokens` stands for
`max_completion_tokens` as well, and the engine is told one of them.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from tokencache.core.messages import Message, ToolCall, canonical_json, digest, exact_digest_of_json
from tokencache.dialects.json_io import member, value_of

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


_NULL_JSON = b"null"
_LONG = "max_completion_tokens"
"""What OpenAI calls `max_tokens` on chat completions today; where a request has both, vLLM goes by this one (0.32)."""


class _Rule(NamedTuple):
    kinds: tuple[type, ...]
    holds: Callable[[Any], bool]
    words: str


_NUMBER, _WHOLE = (int, float), (int,)
_HOTTEST, _HARSHEST = 2, 2
_PENALTY = _Rule(_NUMBER, lambda v: -_HARSHEST <= v <= _HARSHEST, "a number from -2 to 2")
PINNED: Mapping[str, _Rule] = {
    "temperature": _Rule(_NUMBER, lambda v: 0 <= v <= _HOTTEST, "a number from 0 to 2"),
    "top_p": _Rule(_NUMBER, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "top_k": _Rule(_WHOLE, lambda v: v >= -1, "a whole number: how many, or 0 or -1 for all"),
    "min_p": _Rule(_NUMBER, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "max_tokens": _Rule(_WHOLE, lambda v: v >= 1, "a whole number from 1"),
    "seed": _Rule(_WHOLE, lambda v: -(2**63) <= v < 2**63, "a whole number of 64 bits"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _Rule(_NUMBER, lambda v: 0 < v < float("inf"), "a number above 0"),
}
"""What can be pinned, and which values vLLM 0.32 takes (`sampling_params.py`, `SamplingParams._verify_args`)."""


def check_policy(policy: Mapping[str, Any]) -> None:
    """Check a policy's names and values.

    Raises:
        ValueError: one of them is none; the message says which, and what there is.
    """
    for name, value in policy.items():
        rule = PINNED.get(name)
        if rule is None:
            raise ValueError(f"{name[:80]!r} cannot be pinned; what can is: {', '.join(PINNED)}")
        if not isinstance(value, rule.kinds) or isinstance(value, bool) or not rule.holds(value):
            raise ValueError(f"{name!r} must be {rule.words}, not {str(value)[:80]}")


def pin(fields: dict[str, Raw], policy: Mapping[str, Any]) -> dict[str, Any]:
    """Write the values of a policy into a request's members, in place.

    Returns:
        What the harness had asked for where that is another value: name → its value, `None` if it had asked for nothing.
    """
    replaced = {}
    for name, value in policy.items():
        asked = _asked(fields, name)
        if isinstance(asked, bool) or asked != value:
            replaced[name] = asked
        fields[name] = Raw(msgspec.json.encode(value))
    if "max_tokens" in policy:
        fields.pop(_LONG, None)
    return replaced


def _asked(fields: Mapping[str, Raw], name: str) -> Any:
    for spelling in (_LONG, name) if name == "max_tokens" else (name,):
        raw = fields.get(spelling)
        if raw is not None and bytes(raw) != _NULL_JSON:
            return value_of(raw)
    return None


def resolve_model(fields: dict[str, Raw], served: Callable[[str], str]) -> str:
    """Replace the model's name in a request's members with the served model that `served` returns for it; returns that model.

    Raises:
        HarnessError: the name is not a string.
    """
    named: str = member(fields, "model", (str,), "")
    model = served(named)
    if model != named:
        fields["model"] = Raw(msgspec.json.encode(model))
    return model
