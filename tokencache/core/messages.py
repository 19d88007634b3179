"""Defines messages, the form to which all dialects are translated, and digests them.

A harness does not send a reply back as it was served: text is trimmed, `null` becomes `""`, arguments are serialized again, reasoning is
left out or moved into the text, ids are rewritten. All these variants of a reply must have the same digest. `digest` ignores exactly the
differences that the canonical rules allow. `verdict` reports these rules by name, and metrics count them:

==================  ================================================================================================
`content-shape`     `null`, `""`, absent, an empty list and blank text are equal; a list of text parts equals its texts
                    joined with newlines (as vLLM joins them, `chat_utils.py`, 0.32)
`whitespace`        whitespace (and U+FEFF) around a text is ignored, never inside it
`args-json`         tool-call arguments are compared by value: key order, spacing, escapes, numbers as IEEE doubles
                    (every JavaScript client turns `10000.0` into `10000`); the last duplicate key counts; `""` is `{}`
`inline-think`      a leading `<think>…</think>` in an assistant's text is its reasoning
`reasoning-dropped` reasoning is not a part of an assistant's digest
`tool-ids`          ids of tool calls are not a part of a digest; the chain records which call a tool result answers
`members`           `cache_control`, `annotations` and other members of an assistant's message are ignored
                    (`Message` does not keep them, so this rule is never reported)
==================  ================================================================================================

`Message` keeps the fields as they were written, so that `verdict` can compare two messages whose digests are equal.

These rules apply only to replies of the model. The harness's own messages are context, and a template may show every difference in them. So
a message has a second digest, `exact_digest`, which is equal only for messages that no template can distinguish. Its evidence for the reply
that follows is the same digest without the name of a tool (`context_digest`).
"""

import hashlib
import json
import math
import re
from typing import Any

import msgspec

from tokencache.core.strict_json import replace_surrogates

BLANK = (
    "\ufeff \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006"
    "\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
"""The characters that `str.strip()` removes, and U+FEFF, which JavaScript's `trim()` removes too."""

_INLINE_THINK = re.compile(r"\s*+<think>(.*?)</think>", re.DOTALL)
_RESULT = frozenset({"role", "content", "tool_call_id", "task"})
"""The members of a tool's result that a template may show, without the tool's name."""
SORTED_JSON = msgspec.json.Encoder(order="sorted")
"""Writes JSON with sorted keys, and each number as it is: a template shows whether it is 1 or 1.0."""
_VERSION = b"tc1"
_MAX_VALUES = 200_000


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call as it was written; `arguments` is JSON text, valid or not."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a conversation, with its fields as they were written.

    Attributes:
        role: `system` (also for `developer`), `user`, `assistant`, `tool`, or any other role that the harness wrote.
        content: the text, parts joined by newlines; `None` if there was none.
        reasoning: the reasoning, if it is in a member of its own.
        calls: the tool calls of an assistant message.
        answers: the id of the call that a tool result answers.
        name: the name of a participant; ignored for tools and assistants, because harnesses drop and add it.
        media: for a message with parts that are not text, the canonical JSON of all its parts in order: texts, and the identities of the
            others (`core.media`). A template may show where an image is between the texts.
        parts: whether the content was a list of parts.
    """

    role: str
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    answers: str | None = None
    name: str | None = None
    media: bytes = b""
    parts: bool = False

    @property
    def text(self) -> str:
        """The text without surrounding whitespace and, for an assistant, without inline reasoning."""
        content = self.content or ""
        start = inline_end(content) if self.role == "assistant" and "<think>" in content else 0
        return content[start:].strip(BLANK)

    @property
    def thought(self) -> str:
        """The reasoning, wherever it was written, without surrounding whitespace."""
        return (self.reasoning or "").strip(BLANK) or split_think(self.content)[0]


def split_think(content: str | None) -> tuple[str, str]:
    """Split a text into its leading inline reasoning and the rest, both stripped."""
    text = content or ""
    inline = _INLINE_THINK.match(text) if "<think>" in text else None
    if inline is None:
        return "", text.strip(BLANK)
    return inline[1].strip(BLANK), text[inline.end() :].strip(BLANK)


def inline_end(content: str) -> int:
    """Return where the leading inline reasoning of a text ends; 0 if it has none."""
    inline = _INLINE_THINK.match(content)
    return inline.end() if inline is not None else 0


def digest(message: Message) -> bytes:
    """Digest one message: 16 bytes of a SHA-256, equal for all variants that the rules of this module treat as equal.

    Fields are hashed with their tags and lengths, so different fields never give the same bytes. A harness chooses the content of messages
    and must not be able to find two messages with the same digest. With a fast hash it could.
    """
    role, text = message.role.encode("utf-8", "surrogatepass"), message.text.encode("utf-8", "surrogatepass")
    fields = b"%brole:%d:%btext:%d:%b" % (_VERSION, len(role), role, len(text), text)
    if message.name and message.role not in {"tool", "assistant"}:
        fields += _field(b"who", message.name.encode("utf-8", "surrogatepass"))
    for call in message.calls:
        fields += _field(b"name", call.name.encode("utf-8", "surrogatepass")) + _field(b"args", canonical_arguments(call.arguments))
    if message.media:
        fields += _field(b"media", message.media)
    return hashlib.sha256(fields).digest()[:16]


def _field(tag: bytes, data: bytes) -> bytes:
    return b"%b:%d:%b" % (tag, len(data), data)


def exact_digest(message: Message) -> bytes:
    """Digest one message exactly as written: 16 bytes of a SHA-256. For messages read from JSON, use `exact_digest_of_json`."""
    return hashlib.sha256(_VERSION + msgspec.json.encode(message)).digest()[:16]


def exact_digest_of_json(entry: dict[str, Any]) -> bytes:
    """Digest a decoded chat message exactly as written: 16 bytes of a SHA-256.

    The digest ignores only what vLLM 0.32 hides from every template: the order of members, `cache_control`, and whether a text is a string
    or a single text part. A template may show everything else: whitespace, the number of parts, names, ids, other members.
    """
    visible = _unmarked(entry) if "cache_control" in entry else entry
    if isinstance(content := visible.get("content"), list):
        parts = [_unmarked(part) if isinstance(part, dict) else part for part in content]
        visible = {**visible, "content": parts[0]["text"] if len(parts) == 1 and _is_text(parts[0]) else parts}
    return hashlib.sha256(_VERSION + SORTED_JSON.encode(visible)).digest()[:16]


def context_digest(message: Message) -> bytes:
    """Digest a message of the harness as evidence for the reply that follows it: exactly as written, but without the name of a tool.

    A tool result names its call by id. Hermes leaves the name of the tool out when it resumes a session (0.19.0, recorded traffic).
    Of messages read from JSON, only results of tools need their own (`result_digest_of_json`); for others it is `exact_digest_of_json`.
    """
    return exact_digest(msgspec.structs.replace(message, name=None) if message.role == "tool" else message)


def result_digest_of_json(entry: dict[str, Any], exact: bytes) -> bytes:
    """Digest a decoded result of a tool as `context_digest` does; `exact` is its `exact_digest_of_json`.

    Members that vLLM hides from every template (`renderers/chat_utils.py`, 0.32) are ignored, too: Copilot CLI adds one to each result when
    it resumes a session (1.0.102, recorded traffic).
    """
    if entry.keys() <= _RESULT:
        return exact
    return exact_digest_of_json({name: value for name, value in entry.items() if name in _RESULT})


def _unmarked(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name != "cache_control"}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"


def canonical_arguments(arguments: str) -> bytes:
    """Return tool-call arguments in canonical form, which is the same for all JSON texts of one value.

    Text that is not JSON, or has more values than a model could have written, is marked and otherwise unchanged. It equals only itself.
    """
    text = arguments.strip(BLANK)
    if not text:
        return b"{}"
    if len(text) > _MAX_VALUES and text.count(",") + text.count("[") > _MAX_VALUES:
        return b"\x00raw:" + arguments.encode("utf-8", "surrogatepass")
    try:
        return canonical_json(_loads(text))
    except (ValueError, RecursionError):
        return b"\x00raw:" + arguments.encode("utf-8", "surrogatepass")


def canonical_json(value: Any) -> bytes:
    """Encode a JSON value with sorted keys and every number as a double."""
    return SORTED_JSON.encode(_canonical(value))


def _loads(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        # msgspec rejects lone surrogates and NaN, which Python harnesses write.
        return json.loads(text)


def _canonical(value: Any) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            text = replace_surrogates(value)
            return "\x00" + text if text.startswith("\x00") else text  # NUL marks numbers that are not doubles
        case int() | float():
            return _double(value)
        case list():
            return [_canonical(item) for item in value]
        case _:
            return {replace_surrogates(key): _canonical(item) for key, item in value.items()}


def _double(value: float) -> float | str:
    try:
        number = float(value) + 0.0  # -0.0 + 0.0 is 0.0
    except OverflowError:
        return f"\x00number:{value}"
    return number if math.isfinite(number) else f"\x00number:{number}"
