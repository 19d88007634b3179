r"""Boundaries: where does a reply end, in ids?

A small conversation is rendered with a *sentinel* where the assistant's words would stand: in its text, or, if it made
calls, in the arguments of its last call, because templates put calls after the text. Rendered twice with two sentinels
that share no character, the two results differ in the sentinel alone; so what stands behind it is known without
decoding a single id and without searching for anything that a user could spell out.

    <|im_start|>user . <|im_end|> <|im_start|>assistant Qa1b2x <|im_end|> \n
                                                 sentinel ^^^^^^ ^^^^^^^^^^^^ behind

`behind` is the *closing* that the model samples itself (a call's `"}}</tool_call>`) and then the template's end of
turn, which starts with a stop id; or nothing after the closing, where the stop id is the next message's opener (GLM).
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
"""Two sentinels without a common beginning or end; unknown to those who write messages. Only `SENTINEL` stays in use."""

ASK = b'{"role":"user","content":"."}'
"""What the user says in a small conversation."""


class BoundaryUnknownError(Exception):
    """The template hides the end of a reply: nothing is spliced behind such replies."""


class Spot(Enum):
    """Where in a reply the sentinel stands: in the arguments of a call, or in the text."""

    LAST_CALL = "last call"
    FIRST_CALL = "first call"
    TEXT = "text"


class Boundary(msgspec.Struct, frozen=True):
    """What a template puts behind a reply.

    `mark` is the packed sentinel, which stands at `spot`, `closing` what the model samples behind it, `turn_end` what the template adds
    then when nothing follows (empty where the next message's opener ends a turn).
    """

    mark: bytes
    closing: bytes
    turn_end: bytes
    spot: Spot = Spot.TEXT

    def cut(self, rendered: bytes) -> bytes:
        """Cut what stands behind the sentinel's reply out of a rendering.

        Raises:
            BoundaryUnknownError: the sentinel is not there, or not as it was when the boundary was learned, or not once.
        """
        return rendered[self._end(rendered) :]

    def before(self, rendered: bytes) -> bytes:
        """What stands up to the end of the sentinel's reply.

        Raises:
            BoundaryUnknownError: as for `cut`.
        """
        return rendered[: self._end(rendered)]

    def around(self, rendered: bytes) -> tuple[bytes, bytes]:
        """Part a rendering at the first sentinel: what stands before it, and what stands behind its reply.

        Raises:
            BoundaryUnknownError: the sentinel is not there, or not as it was when the boundary was learned.
        """
        key = self.mark + self.closing
        at = ids.find(rendered, key)
        if at < 0:
            raise BoundaryUnknownError(Reason.SENTINEL_LOST)
        return ids.head(rendered, at), rendered[at * ids.ID_BYTES + len(key) :]

    def _end(self, rendered: bytes) -> int:
        _, behind = self.around(rendered)
        if ids.find(behind, self.mark + self.closing) >= 0:
            raise BoundaryUnknownError(Reason.SENTINEL_TWICE)
        return len(rendered) - len(behind)


def reworded(message: bytes) -> bytes:
    """Put other words into the middle of a raw message's text, so that it can be seen where the template puts it.

    Beginning and end stay, for templates look there: to Qwen3's, a user's text in `<tool_response>` is no query.
    """
    entry = msgspec.json.decode(message)
    content = entry.get("content")
    if isinstance(content, list):
        texts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            texts[0]["text"] = _interject(texts[0]["text"])
            return msgspec.json.encode(entry)
    return msgspec.json.encode({**entry, "content": _interject(content if isinstance(content, str) else "")})


def answering(message: bytes, names: Mapping[str, str]) -> bytes:
    """Let a raw tool message answer the call of another id, by `names`; all others stay as they are."""
    entry = msgspec.json.decode(message)
    answers = entry.get("tool_call_id")
    return msgspec.json.encode({**entry, "tool_call_id": names[answers]}) if answers in names else message


def _interject(text: str) -> str:
    middle = len(text) // 2
    return text[:middle] + OTHER + text[middle:]


def stand_in(reply: Message, sentinel: str, spot: Spot) -> bytes:
    """Write an assistant message like `reply`, raw, with the sentinel where its words end, or where the template shows it."""
    calls: list[dict[str, Any]] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "{}"}} for call in reply.calls
    ]
    entry: dict[str, Any] = {"role": "assistant"}
    if calls and spot is not Spot.TEXT:
        entry["content"] = "." if reply.text else None
        shown = calls[-1 if spot is Spot.LAST_CALL else 0]
        shown["function"]["arguments"] = msgspec.json.encode({"s": sentinel}).decode()
    else:
        entry["content"] = sentinel
    if calls:
        entry["tool_calls"] = calls
    return msgspec.json.encode(entry)


async def learn(renderer: Renderer, model: str, args: RenderArgs, reply: Message, stop_ids: AbstractSet[int], *, spot: Spot) -> Boundary:
    """Learn what the template puts behind replies like `reply`.

    Raises:
        BoundaryUnknownError: the template does not show the sentinel, or no stop id ends the reply.
        RenderError: the template refuses the small conversation.
    """
    first, second = [await renderer.render(model, [ASK, stand_in(reply, s, spot)], args, generation=False) for s in (SENTINEL, OTHER)]
    if first == second:
        raise BoundaryUnknownError(Reason.REPLY_NOT_RENDERED)
    start, end = ids.common_head(first, second), ids.count(first) - ids.common_end(first, second)
    mark, behind = ids.tail(ids.head(first, end), start), ids.tail(first, end)
    stop = next((i for i, token in enumerate(ids.unpack(behind)) if token in stop_ids), None)
    if stop is None:
        return Boundary(mark, behind, b"", spot)
    return Boundary(mark, ids.head(behind, stop), ids.tail(behind, stop), spot)


class Candidates(NamedTuple):
    """The ids with which a template may end a reply, `possible` ones and those that can only do that.

    Behind a reply of text stands its end of turn and nothing else; behind calls stands their closing, too, so of that
    only the last ids are taken (gpt-oss ends calls with `<|call|>`). What can follow begins with an opener.

    `turn_ends` are what comes first behind a text, or if nothing does, the openers. A reply that ends with one of them
    has shown that the engine stops there; of the others it would prove nothing (a call cut by the limit may end with
    `</tool_call>`, a text with a newline).
    """

    possible: list[int]
    turn_ends: list[int]


async def candidates(renderer: Renderer, model: str, args: RenderArgs) -> Candidates:
    """List the ids with which a template may end a reply.

    Raises:
        BoundaryUnknownError: the template does not show the sentinel.
        RenderError: the template refuses the small conversation.
    """
    said, called = Message("assistant", content="."), Message("assistant", calls=(_CALL,))
    boundary = await learn(renderer, model, args, said, frozenset(), spot=Spot.TEXT)
    ends = ids.unpack(boundary.closing)
    openers = await _opener(renderer, model, args, said, boundary=msgspec.structs.replace(boundary, closing=b""), following=ASK)
    possible = [*ends, *openers]
    with suppress(RenderError, BoundaryUnknownError):  # a template without tools, say
        boundary = await learn(renderer, model, args, called, frozenset(), spot=Spot.LAST_CALL)
        results = await _opener(renderer, model, args, called, boundary=boundary, following=_RESULT)
        possible += [*ids.unpack(boundary.closing)[-_END_OF_TURN:], *results]
        openers += results
    return Candidates(list(dict.fromkeys(possible)), ends[:1] or openers)


async def _opener(renderer: Renderer, model: str, args: RenderArgs, reply: Message, *, boundary: Boundary, following: bytes) -> list[int]:
    """Find the id with which `following` begins behind a reply."""
    try:
        shown = await renderer.render(model, [ASK, stand_in(reply, SENTINEL, boundary.spot), following], args, generation=True)
        return ids.unpack(ids.head(boundary.cut(shown), 1))
    except (RenderError, BoundaryUnknownError):
        return []


_END_OF_TURN = 2
"""An end of turn is a stop id, and perhaps a newline that the model never says."""
_CALL = ToolCall("call_0", "f", "{}")
_RESULT = b'{"role":"tool","tool_call_id":"call_0","content":"."}'
