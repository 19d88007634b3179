r"""Finds where a reply ends in a rendering, with a sentinel in place of the reply.

A small conversation is rendered with a *sentinel* in place of the model's words: in the text, or, if the reply made calls, in the
arguments of its last call, because templates write calls after the text. The conversation is rendered twice, with two sentinels that have
no common beginning or end. The two results differ only in the sentinel. So what follows it is known without decoding an id, and without
searching for anything that a user could write.

    <|im_start|>user . <|im_end|> <|im_start|>assistant Qa1b2x <|im_end|> \n
                                                 sentinel ^^^^^^ ^^^^^^^^^^^^ after the reply

After the sentinel comes the *closing* that the model samples itself (a call's `"}}</tool_call>`), and then the template's end of turn,
which starts with a stop id. If the opening of the next message is the stop id (GLM), nothing follows the closing.
"""

import secrets
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.messages import Message, ToolCall
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.renderer import Renderer, RenderError

_RUN = secrets.token_hex(4)
SENTINEL, OTHER = f"Q{_RUN}x", f"W{_RUN[::-1]}k"
"""Two sentinels without a common beginning or end, drawn at random per process. `OTHER` is the second text for comparisons."""

ASK = b'{"role":"user","content":"."}'
"""The user message of a small conversation."""


class BoundaryUnknownError(Exception):
    """The rendering does not show where a reply ends. The text of the error is a `Reason`."""


class SentinelPlace(Enum):
    """Where in a reply the sentinel is: in the arguments of a call, or in the text."""

    LAST_CALL = "last call"
    FIRST_CALL = "first call"
    TEXT = "text"


class Boundary(msgspec.Struct, frozen=True):
    """What a template writes after a reply (packed ids).

    `mark` is the sentinel, written at `place`. `closing` is what the model samples after it. `turn_end` is what the template adds if no
    message follows; it is empty if the opening of the next message ends a turn.
    """

    mark: bytes
    closing: bytes
    turn_end: bytes
    place: SentinelPlace = SentinelPlace.TEXT

    def after(self, rendered: bytes) -> bytes:
        """Return what follows the reply that contains the sentinel.

        Raises:
            BoundaryUnknownError: the sentinel is missing, is rendered differently than when it was learned, or occurs twice.
        """
        return rendered[self._end(rendered) :]

    def until(self, rendered: bytes) -> bytes:
        """Return everything up to the end of the reply that contains the sentinel.

        Raises:
            BoundaryUnknownError: as for `after`.
        """
        return rendered[: self._end(rendered)]

    def split(self, rendered: bytes) -> tuple[bytes, bytes]:
        """Split a rendering at the first sentinel: what precedes the sentinel, and what follows its reply.

        Raises:
            BoundaryUnknownError: the sentinel is missing, or is rendered differently than when it was learned.
        """
        key = self.mark + self.closing
        at = ids.find(rendered, key)
        if at < 0:
            raise BoundaryUnknownError(Reason.SENTINEL_LOST)
        return ids.head(rendered, at), rendered[at * ids.ID_BYTES + len(key) :]

    def _end(self, rendered: bytes) -> int:
        key = self.mark + self.closing
        at = ids.find_last(rendered, key)  # few messages follow it
        if at < 0:
            raise BoundaryUnknownError(Reason.SENTINEL_LOST)
        if ids.find_last(rendered, key, end=at) >= 0:
            raise BoundaryUnknownError(Reason.SENTINEL_TWICE)
        return at * ids.ID_BYTES + len(key)


def reworded(message: bytes) -> bytes:
    """Insert other words into the middle of a raw message's text, to find out where the template writes that text.

    Beginning and end stay the same because templates inspect them: Qwen3's does not count a user's text in `<tool_response>` as a query.
    """
    entry = msgspec.json.decode(message)
    content = entry.get("content")
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            texts[0]["text"] = _interject(texts[0]["text"])
            return msgspec.json.encode(entry)
    return msgspec.json.encode({**entry, "content": _interject(content if isinstance(content, str) else "")})


def _interject(text: str) -> str:
    middle = len(text) // 2
    return text[:middle] + OTHER + text[middle:]


def answering(message: bytes, names: Mapping[str, str]) -> bytes:
    """Change the call id that a raw tool message answers, by `names`; other messages are returned unchanged."""
    entry = msgspec.json.decode(message)
    answers = entry.get("tool_call_id")
    return msgspec.json.encode({**entry, "tool_call_id": names[answers]}) if answers in names else message


def stand_in(reply: Message, sentinel: str, place: SentinelPlace) -> bytes:
    """Write a raw assistant message of the same kind as `reply`, with the sentinel at `place`."""
    entry: dict[str, Any] = {"role": "assistant", "content": sentinel}
    if reply.calls:
        calls: list[dict[str, Any]] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "{}"}} for call in reply.calls
        ]
        entry["tool_calls"] = calls
        if place is not SentinelPlace.TEXT:
            entry["content"] = "." if reply.text else None
            marked = calls[-1 if place is SentinelPlace.LAST_CALL else 0]
            marked["function"]["arguments"] = msgspec.json.encode({"s": sentinel}).decode()
    return msgspec.json.encode(entry)


async def learn(
    renderer: Renderer, model: str, args: RenderArgs, reply: Message, stop_ids: AbstractSet[int], *, place: SentinelPlace
) -> Boundary:
    """Learn what the template writes after replies of the same kind as `reply`.

    Raises:
        BoundaryUnknownError: the template does not show the sentinel.
        RenderError: the template refuses the small conversation.
    """
    first, second = [await renderer.render(model, [ASK, stand_in(reply, s, place)], args, generation=False) for s in (SENTINEL, OTHER)]
    if first == second:
        raise BoundaryUnknownError(Reason.REPLY_NOT_RENDERED)
    start, end = ids.common_head(first, second), ids.count(first) - ids.common_end(first, second)
    mark, rest = ids.tail(ids.head(first, end), start), ids.tail(first, end)
    stop = next((i for i, token in enumerate(ids.unpack(rest)) if token in stop_ids), None)
    if stop is None:
        return Boundary(mark, rest, b"", place)
    return Boundary(mark, ids.head(rest, stop), ids.tail(rest, stop), place)


class StopCandidates(NamedTuple):
    """The ids with which a template may end a reply.

    `possible` are all of them. A reply with only text is followed by its end of turn. Calls are followed by their closing too, so only the
    last ids of it are candidates (gpt-oss ends calls with `<|call|>`). The first id of the next message is also a candidate.

    `turn_ends` are ids that can do nothing but end a turn: the first id after a text, or, if there is none, the openings of the next
    message. If a reply ends with one of them, the engine stops there. The other candidates prove nothing: a call that was cut by the limit
    may end with `</tool_call>`, and a text with a newline.

    `after_text` are the ids between a text and the next message.
    """

    possible: list[int]
    turn_ends: list[int]
    after_text: list[int]


async def stop_candidates(renderer: Renderer, model: str, args: RenderArgs) -> StopCandidates:
    """List the ids with which a template may end a reply.

    Raises:
        BoundaryUnknownError: the template does not show the sentinel.
        RenderError: the template refuses the small conversation.
    """
    text, call = Message("assistant", content="."), Message("assistant", calls=(_CALL,))
    boundary = await learn(renderer, model, args, text, frozenset(), place=SentinelPlace.TEXT)
    ends = ids.unpack(boundary.closing)
    openings = await _first_id_of(ASK, renderer, model, args, text, msgspec.structs.replace(boundary, closing=b""))
    possible = [*ends, *openings]
    with suppress(RenderError, BoundaryUnknownError):  # for example a template without tools
        boundary = await learn(renderer, model, args, call, frozenset(), place=SentinelPlace.LAST_CALL)
        results = await _first_id_of(_RESULT, renderer, model, args, call, boundary)
        possible += [*ids.unpack(boundary.closing)[-_END_OF_TURN:], *results]
        openings += results
    return StopCandidates(list(dict.fromkeys(possible)), ends[:1] or openings, ends)


async def _first_id_of(  # noqa: PLR0917
    following: bytes, renderer: Renderer, model: str, args: RenderArgs, reply: Message, boundary: Boundary
) -> list[int]:
    """Return the first id of a message that follows a reply, as a list; empty if it cannot be rendered."""
    try:
        rendered = await renderer.render(model, [ASK, stand_in(reply, SENTINEL, boundary.place), following], args, generation=True)
        return ids.unpack(ids.head(boundary.after(rendered), 1))
    except (RenderError, BoundaryUnknownError):
        return []


_END_OF_TURN = 2
"""Number of tokens in an end of turn: a stop id, and perhaps a newline that the model does not sample."""
_CALL = ToolCall("call_0", "f", "{}")
_RESULT = b'{"role":"tool","tool_call_id":"call_0","content":"."}'
