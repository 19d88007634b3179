"""Responses: items → chat messages.

What one reply said comes back as several items (reasoning, message, calls). They become one chat message again; where
one reply ends and the next begins is told, in this order, by

- any item that is not the assistant's;
- our handles, where both sides have one (in an item's id, or in `encrypted_content`);
- the order: a message right behind a message, or reasoning behind anything but reasoning, begins a new one. vLLM 0.32
  parts them there too (`entrypoints/openai/responses/utils.py`), and no reply of ours holds the former.

Compared with that converter nothing is lost: of a message or a reasoning item it reads the first part alone, here all
parts are joined with nothing between (summaries, which are paragraphs, with newlines), and text behind a tool call
stays with its reply instead of becoming one of its own. `encrypted_content` that is not ours is ignored rather than
refused. Parts of the user's and the system's messages stay parts, and so do those of a tool's result.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects.gym import ReturnedIdFragments
from tokencache.dialects.places import Place, bracketed
from tokencache.dialects.thinking import CLOSED, UNCLOSED, Mark, folded, read_signature
from tokencache.errors import HarnessError

Item = tuple[bytes, Any]
"""An item's JSON, `b""` where nobody keeps it, and the same decoded."""

INLINE = "rst"
"""What the id of a reasoning item begins with that stood in the text (`dialects.thinking`)."""
_ID = re.compile(r"(rs|rst|msg|fc|ctc)_([0-9a-f]{32})_\d+")
_TEXTS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text") | {"refusal": "refusal"}
_ROLES = frozenset({"user", "system", "developer", "assistant"})
_DETAILS = "low", "high"
_UNFINISHED = "in_progress", "incomplete"


def item_id(prefix: str, handle: str, place: int) -> str:
    """Name an output item: its kind's prefix, the call's handle, its place in the output."""
    return f"{prefix}_{handle}_{place}"


def handle_of(item: Mapping[str, Any]) -> str:
    """Find our handle in an item; `""` if it has none."""
    sealed, _ = read_signature(item.get("encrypted_content"))
    ours = None if sealed else _own_id(item)
    return ours[2] if ours is not None else sealed


def _own_id(item: Mapping[str, Any]) -> re.Match[str] | None:
    name = item.get("id")
    return _ID.fullmatch(name) if isinstance(name, str) else None


def _mark_of(item: Mapping[str, Any], reply: Mapping[str, list[Any]]) -> Mark:
    """Where the thinking of a reasoning item stood. An id does not say whether the block was closed: something follows if it was."""
    handle, mark = read_signature(item.get("encrypted_content"))
    ours = None if handle else _own_id(item)
    if ours is None or ours[1] != INLINE:
        return mark
    return CLOSED if reply["content"] or reply["tool_calls"] else UNCLOSED


def flat_name(name: str, namespace: str | None) -> str:
    """Name a function of a namespace as the model is shown it (as vLLM 0.32 does)."""
    return f"{namespace}__{name}" if namespace else name


class Talk:
    """The chat messages of a list of items: add them in order, then `close`.

    `messages` are chat messages, `handles` the places of those (the assistant's) that came back with a handle, `echoes` of those
    that came back with token ids; `merged` says that several items became one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.handles: dict[int, str] = {}
        self.echoes: dict[int, ReturnedIdFragments] = {}
        self.merged = False
        self._reply: dict[str, list[Any]] = {}  # the assistant's message under way
        self._handle = self._last = ""
        self._echo: ReturnedIdFragments | None = None
        self._thinking: dict[str, Any] = {}  # its last reasoning item

    def add(self, item: Any, at: Place, echo: ReturnedIdFragments | None = None) -> None:
        """Read one item; `at` says where it stood, `echo` are the token ids that came back with it.

        Raises:
            HarnessError: it is malformed, or of a type that is not supported.
        """
        if not isinstance(item, dict):
            raise _wrong(at, " must be an object")
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._message(item, at)
            case "reasoning":
                self._continue(item, "reasoning")["reasoning"].append(_thought(item, at))
                self._thinking = item
            case "function_call":
                name = flat_name(_text(item, "name", at), _optional(item, "namespace", at))
                self._call(item, at, name, _text(item, "arguments", at))
            case "custom_tool_call":
                name = flat_name(_text(item, "name", at), _optional(item, "namespace", at))
                self._call(item, at, name, msgspec.json.encode({"input": _text(item, "input", at)}).decode())
            case "function_call_output" | "custom_tool_call_output":
                content = _content(item.get("output"), (at, "output"))
                self._say({"role": "tool", "tool_call_id": _text(item, "call_id", at), "content": content})
            case _:
                raise _wrong(at, f": items of type {kind!r} are not supported")
        if self._reply:  # the last item of a reply carries its ids
            self._echo = echo or self._echo

    def close(self) -> None:
        """End the assistant's message that is under way."""
        if not self._reply:
            return
        reply, self._reply = self._reply, {}
        message: dict[str, Any] = {"role": "assistant"}
        if any(reply["reasoning"]):
            message["reasoning"] = "".join(reply["reasoning"])
        if reply["content"] or not reply["tool_calls"]:
            message["content"] = "".join(reply["content"])
        if reply["tool_calls"]:
            message["tool_calls"] = reply["tool_calls"]
        if self._handle:
            self.handles[len(self.messages)] = self._handle
        if self._echo is not None:
            self.echoes[len(self.messages)] = self._echo
        self.messages.append(folded(message, _mark_of(self._thinking, reply)))

    def _say(self, message: dict[str, Any]) -> None:
        self.close()
        self.messages.append(message)

    def _continue(self, item: dict[str, Any], kind: str) -> dict[str, list[Any]]:
        """The assistant's message that an item belongs to."""
        handle = handle_of(item)
        if self._reply and handle and self._handle:
            ended = handle != self._handle
        else:
            ended = kind == self._last == "message" or (kind == "reasoning" and self._last != "reasoning")
        if ended:
            self.close()
        self.merged = self.merged or bool(self._reply)
        if not self._reply:
            self._reply = {"reasoning": [], "content": [], "tool_calls": []}
            self._handle, self._echo, self._thinking = "", None, {}
        self._handle = self._handle or handle
        self._last = kind
        return self._reply

    def _message(self, item: dict[str, Any], at: Place) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _wrong((at, "role"), f" must be one of {', '.join(sorted(_ROLES))}, not {role!r}")
        content = _content(item.get("content"), (at, "content"))
        if role != "assistant":
            self._say({"role": role, "content": content})
            return
        if isinstance(content, list):
            texts = [part["text"] for part in content if part["type"] == "text"]
            if len(texts) < len(content):
                raise _wrong((at, "content"), ": an assistant's message can only have text")
            content = "".join(texts)
        self._continue(item, "message")["content"].append(content)

    def _call(self, item: dict[str, Any], at: Place, name: str, arguments: str) -> None:
        call = {"id": _text(item, "call_id", at), "type": "function", "function": {"name": name, "arguments": arguments}}
        self._continue(item, "call")["tool_calls"].append(call)


def continues(item: Any) -> bool:
    """Whether a last item asks for its own continuation: what vLLM 0.32 makes of an assistant's that is not complete."""
    if not isinstance(item, dict) or item.get("status") not in _UNFINISHED:
        return False
    return item.get("type") == "reasoning" or item.get("role") == "assistant"


def _content(content: Any, at: Place) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(at, " must be a string or a list of parts")
    return [_part(part, (at, i)) for i, part in enumerate(content)] or ""


def _part(part: Any, at: Place) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    member = _TEXTS.get(kind) if isinstance(kind, str) else None
    if member is not None:
        return {"type": "text", "text": _text(part, member, at)}
    if kind == "input_image":
        url, detail = part.get("image_url"), part.get("detail")
        if not isinstance(url, str):
            raise _wrong(at, ": an image must have an 'image_url'; files are not kept here")
        return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail in _DETAILS else {})}}
    raise _wrong(at, f": content of type {kind!r} is not supported")


def _thought(item: dict[str, Any], at: Place) -> str:
    for member, between in (("content", ""), ("summary", "\n")):
        parts = item.get(member) or []
        if not isinstance(parts, list):
            raise _wrong((at, member), " must be a list of parts")
        read = [_part(part, ((at, member), i)) for i, part in enumerate(parts)]
        text = between.join([part["text"] for part in read if part["type"] == "text"])
        if text:
            return text
    return ""


def _text(item: dict[str, Any], member: str, at: Place) -> str:
    value = item.get(member)
    if not isinstance(value, str):
        raise _wrong((at, member), " must be a string")
    return value


def _optional(item: dict[str, Any], member: str, at: Place) -> str | None:
    return _text(item, member, at) if item.get(member) is not None else None


def _wrong(at: Place, why: str) -> HarnessError:
    name = bracketed(at)
    return HarnessError(f"'{name}'{why}", param=name)
