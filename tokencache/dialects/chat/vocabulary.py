"""The messages and sampling parameters of chat completions, as vLLM 0.32 reads them.

Messages: each raw item of `messages` becomes a canonical message. Every call sends the whole conversation, so `MessageReader` remembers
parsed messages by the hash of their raw bytes: a known message costs one short hash. Other functions rewrite raw messages that an engine
or a template does not accept.

Sampling policy: a trainer wants rollouts sampled at the temperature of its loss, whatever temperature a harness requests. A policy pins
parameters by name, for all sessions (the server's option) or for one (its registered key, which overrides the server's option name by
name). A pin is a value, not a limit. `max_tokens` also replaces `max_completion_tokens`, and the engine gets only one of them.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal

import msgspec
import xxhash

from tokencache.core.media import MediaPart, as_reference, media_identity, media_part
from tokencache.core.messages import Message, ToolCall, canonical_json, digest, exact_digest_of_json, result_digest_of_json
from tokencache.dialects.json_io import FIELDS, NULL, member, value_of
from tokencache.dialects.members import KINDS, LIMITS, PINS, Kind

Raw = msgspec.Raw

_CALLS = msgspec.json.Decoder(list[dict[str, Raw]] | None)
_NO_ARGUMENTS = Raw(b'"{}"')
_TEXT = (str, NoneType)
_MEDIA_MEMBERS = frozenset(
    {
        *("image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds"),
    }
)
"""A part with one of these members, even if it is null, is media for vLLM, whatever its type: it then ignores supplied ids. With a `uuid`,
it reads the member and not the text (vLLM 0.32, `vllm/renderers/chat_utils.py`)."""
PartKind = Literal["text", "reference", "dropped", "media", "unsupported"]
"""What vLLM 0.32 does with a content part (`_parse_chat_message_content_part`, `has_non_text_content`):

`text`         it renders the text
`reference`    it passes the name of a deferred tool to the template, as text or as a part that the template may expand
`dropped`      it renders nothing: a text that is null
`media`        it loads an image, video or audio, and ignores supplied ids
`unsupported`  it refuses the part
"""
_PARTS: Mapping[str, tuple[PartKind, str]] = {
    "text": ("text", "text"),
    "input_text": ("text", "text"),
    "output_text": ("text", "text"),
    "refusal": ("text", "refusal"),
    "thinking": ("text", "thinking"),
    "tool_reference": ("reference", "name"),
    **{name: ("media", name) for name in _MEDIA_MEMBERS},
}
"""Type of a part → what the engine does with it, and the member that it reads. A part of another type is unsupported."""
_DROPPED_IF_NULL = frozenset({"text", "refusal"})


class UnreadableError(ValueError):
    """A message is of an unknown kind: its call is relayed and recorded, but not matched."""


class _Members(msgspec.Struct):
    """The members of a message that are read. Those of any type are checked where they count."""

    role: str
    content: str | list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: str | None = None
    name: Any = None


class ReadMessage(msgspec.Struct, frozen=True, gc=False):
    """A parsed message.

    Attributes:
        message: without text, unless it is an assistant's: for the others the digests suffice.
        digest: of an assistant's message, equal for all ways to write one reply; of another, `messages.context_digest`.
        exact: equal only for messages that every template renders alike.
        malformed: whether an engine may refuse the arguments of a call (`with_stand_ins`).
        media: its parts that are not text.
        size: number of its bytes if it has its text; if not, length of the id of the call that it answers.
    """

    message: Message
    digest: bytes
    exact: bytes
    malformed: bool = False
    media: tuple[MediaPart, ...] = ()
    size: int = 0


class MessageReader:
    """Parses raw messages and remembers the last `size` distinct ones, whose texts take no more than `memory` bytes."""

    def __init__(self, size: int = 200_000, memory: int = 256 * 2**20) -> None:
        self._known: OrderedDict[bytes, ReadMessage] = OrderedDict()
        self._size, self._memory, self._held = size, memory, 0
        self._seed = secrets.randbits(64)  # xxh3 is not cryptographic: without the seed clients cannot construct collisions

    def read(self, entries: Iterable[bytes]) -> list[ReadMessage]:
        """Parse raw messages, which are JSON objects.

        Raises:
            UnreadableError: a message is of an unknown kind.
        """
        found: list[ReadMessage] = []
        known = self._known
        while len(known) > self._size or self._held > self._memory:  # before the first message that cannot be read
            self._held -= known.popitem(last=False)[1].size
        for raw in entries:
            key = xxhash.xxh3_128_digest(raw, self._seed)
            read = known.get(key)
            if read is None:  # inline: a first call may have hundreds of new messages
                written = msgspec.json.decode(raw)
                message, entry = _read(written)
                media = _described(written, entry) if entry is not written else ()
                exact = exact_digest_of_json(entry)
                if message.role == "assistant":
                    malformed = bool(message.calls) and not _has_json(entry.get("tool_calls") or ())
                    read = ReadMessage(message, digest(message), exact, malformed, media, len(raw))
                else:
                    slim = Message(message.role, answers=message.answers, media=b"1" if message.media else b"")
                    own = result_digest_of_json(entry, exact) if message.role == "tool" else exact
                    read = ReadMessage(slim, own, exact, media=media, size=len(slim.answers or ""))
                known[key] = read
                self._held += read.size
            else:
                known.move_to_end(key)
            found.append(read)
        return found


def _described(entry: Any, identified: Any) -> tuple[MediaPart, ...]:
    """Describe the parts of a decoded message that are not text; `identified` is the same message with identities."""
    both = zip(entry["content"], identified["content"], strict=True)
    return tuple(media_part(part, identity, known=part_kind(part) == "media") for part, identity in both if part is not identity)


def with_references(raw: bytes) -> bytes:
    """Replace the bytes of images and other media in a raw message that has some by references (`core.media`), for records."""
    entry = msgspec.json.decode(raw)
    identified = with_media_identities(entry)
    both = zip(entry["content"], identified["content"], strict=True)
    parts = [part if part is identity else as_reference(part, media_part(part, identity)) for part, identity in both]
    return msgspec.json.encode({**entry, "content": parts})


def read_message(entry: Any) -> Message:
    """Convert one decoded message.

    Raises:
        UnreadableError: the message is of an unknown kind.
    """
    return _read(entry)[0]


def with_media_identities(entry: dict[str, Any]) -> dict[str, Any]:
    """Replace each content part of a decoded message that is not text by its identity (`core.media`); its content is a list.

    A message with identities has the same digests for all ways to write its media.
    """
    content = entry["content"]
    if not any(map(may_be_media, content)):
        return entry
    return {**entry, "content": [media_identity(part) if may_be_media(part) else part for part in content]}


def may_be_media(part: Any) -> bool:
    """Whether a decoded content part is media for the engine, or of a kind that is not known to be something else."""
    return isinstance(part, dict) and part_kind(part) in {"media", "unsupported"}


def part_kind(part: Mapping[str, Any]) -> PartKind:
    """Return what the engine does with a decoded content part."""
    kind = part.get("type")
    known = _PARTS.get(kind) if isinstance(kind, str) else None
    if not _MEDIA_MEMBERS.isdisjoint(part) or (known is not None and known[0] == "media"):
        return "media"
    if known is None or part.get("uuid") is not None:
        return "unsupported"
    value = part.get(known[1])
    if isinstance(value, str):
        return known[0]
    return "dropped" if value is None and kind in _DROPPED_IF_NULL else "unsupported"


def _read(written: Any) -> tuple[Message, Any]:
    """Convert one decoded message. Returns also the same with media identities."""
    listed = isinstance(written, dict) and isinstance(written.get("content"), list)
    entry = with_media_identities(written) if listed else written
    try:
        members = msgspec.convert(entry, _Members)
    except msgspec.ValidationError as why:
        raise UnreadableError(f"a message cannot be read: {why}") from None
    role = members.role
    content, media = _content(entry["content"]) if listed else (entry.get("content"), b"")
    reasoning = members.reasoning_content if members.reasoning is None else members.reasoning
    name = members.name if role not in {"tool", "assistant"} else None
    if not (isinstance(reasoning, _TEXT) and isinstance(name, _TEXT)):
        raise UnreadableError("reasoning_content or name is not a string")
    message = Message(
        role="system" if role == "developer" else role,
        content=content,
        reasoning=reasoning,
        calls=_calls(members) if members.tool_calls or members.function_call else (),
        answers=members.tool_call_id,
        name=name,
        media=media,
        parts=listed,
    )
    return message, entry


def _content(content: list[Any]) -> tuple[str | None, bytes]:
    """Read content that is not text: the text, and the canonical JSON of parts that are not only text."""
    parts: list[Any] = []
    for part in content:
        if not isinstance(part, str | dict):
            raise UnreadableError("a content part is not an object")
        kind = "text" if isinstance(part, str) else part_kind(part)
        if kind != "dropped":
            parts.append(part[_PARTS[part["type"]][1]] if kind == "text" and isinstance(part, dict) else part)
    texts = [part for part in parts if isinstance(part, str)]
    media = canonical_json(parts) if len(texts) < len(parts) else b""
    return ("\n".join(filter(None, texts)) if texts else None), media  # vLLM, too, leaves empty texts out


def _calls(members: _Members) -> tuple[ToolCall, ...]:
    listed = members.tool_calls or []
    if not isinstance(listed, list):
        raise UnreadableError("tool_calls is not a list")
    if members.function_call:
        listed = [*listed, {"function": members.function_call}]
    return tuple([_call(item) for item in listed])


def _call(item: Any) -> ToolCall:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnreadableError("a tool call names no function")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    if not isinstance(item.get("id"), _TEXT):
        raise UnreadableError("the id of a tool call is not a string")
    return ToolCall(item.get("id") or "", function["name"], arguments or "")


def _has_json(calls: Iterable[Any]) -> bool:
    """Whether the arguments of all calls are strings that the engine can parse."""
    return all(_is_json(call["function"].get("arguments")) for call in calls)


def _is_json(arguments: Any) -> bool:
    """Whether arguments are a string that the engine can parse.

    vLLM parses it with Python's `json`, which also accepts NaN, Infinity and numbers outside the range of a double.
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


def with_reasoning(messages: Sequence[bytes]) -> list[bytes]:
    """Rename `reasoning_content` to `reasoning`: chat completions accept both, `/tokenize` only the latter (vLLM 0.32).

    All other members keep their bytes. A message that cannot be parsed stays unchanged.
    """
    # the name may be written with escapes of ASCII
    return [_renamed(raw) if b'"reasoning_content"' in raw or b"\\u00" in raw else raw for raw in messages]


def _renamed(raw: bytes) -> bytes:
    try:
        members = FIELDS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return raw
    reasoning = members.pop("reasoning_content", None)
    if reasoning is None:
        return raw
    if bytes(members.get("reasoning", NULL)) == b"null":
        members["reasoning"] = reasoning  # may be null
    return msgspec.json.encode(members)


def as_reminders(entries: Sequence[bytes]) -> list[bytes]:
    """Turn system messages after the first message into user messages marked as reminders, for templates that refuse them there.

    vLLM's own converter moves them to the front of the system prompt instead (Messages, 0.32), so each new one changes the whole prompt.
    Claude Code itself writes them like this for models that it knows by name.
    """
    return [entries[0], *map(_as_reminder, entries[1:])]


def _as_reminder(raw: bytes) -> bytes:
    if b"system" not in raw and b"developer" not in raw:
        return raw
    entry = msgspec.json.decode(raw)
    if entry.get("role") not in {"system", "developer"}:
        return raw
    text = read_message(entry).content or ""
    return msgspec.json.encode({"role": "user", "content": f"<system-reminder>\n{text}\n</system-reminder>"})


def with_stand_ins(raw: bytes) -> bytes:
    """Replace tool-call arguments that an engine may refuse: an object or list by its text, all others that are not JSON text by `{}`.

    Because of them an engine may refuse the whole history, and so every later turn: vLLM before 0.32 if the text is not JSON, 0.32 if the
    value is an object or `null`. vLLM 0.32 itself renders `{}` if the text is not JSON. Arguments that it can parse keep their bytes, and
    so do all other members, so the prompt equals what the engine renders from the client's own bytes.
    """
    members = FIELDS.decode(raw)
    calls = _CALLS.decode(members.get("tool_calls", NULL)) or []
    for call in calls:
        function = FIELDS.decode(call["function"])
        function["arguments"] = _safe_arguments(function.get("arguments", NULL))
        call["function"] = Raw(msgspec.json.encode(function))
    return msgspec.json.encode({**members, "tool_calls": Raw(msgspec.json.encode(calls))}) if calls else raw


def _safe_arguments(arguments: Raw) -> Raw:
    given = bytes(arguments)
    if given[:1] in {b"{", b"["}:
        return Raw(msgspec.json.encode(given.decode()))
    return arguments if _is_json(msgspec.json.decode(given)) else _NO_ARGUMENTS


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


def check_policy(policy: Mapping[str, Any]) -> None:
    """Check the names and values of a sampling policy.

    Raises:
        ValueError: a name or value is not allowed. The message lists the allowed ones.
    """
    for name, value in policy.items():
        rule = PINS.get(name)
        if rule is None:
            raise ValueError(f"{name[:80]!r} cannot be pinned; these can: {', '.join(PINS)}")
        kinds = (int,) if KINDS[name] is Kind.WHOLE else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not rule.accepts(value):
            raise ValueError(f"{name!r} must be {rule.words}, not {str(value)[:80]}")


def pin(fields: dict[str, Raw], policy: Mapping[str, Any]) -> dict[str, Any]:
    """Write the values of a policy into a request's members, in place.

    Returns:
        The client's value of each parameter that had another value; `None` if the client set none.
    """
    replaced = {}
    for name, value in policy.items():
        requested = _requested(fields, name)
        if isinstance(requested, bool) or requested != value:
            replaced[name] = requested
        fields[name] = Raw(msgspec.json.encode(value))
    if "max_tokens" in policy:
        fields.pop("max_completion_tokens", None)
    return replaced


def _requested(fields: Mapping[str, Raw], name: str) -> Any:
    for spelling in LIMITS if name == "max_tokens" else (name,):
        raw = fields.get(spelling)
        if raw is not None and bytes(raw) != b"null":
            return value_of(raw)
    return None
