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
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.core.canonical import Call, Message
from tokencache.dialects.chat import RenderArgs
from tokencache.render.renderer import Renderer, RenderError

_RUN = secrets.token_hex(4)
SENTINEL, OTHER = f"Q{_RUN}x", f"W{_RUN[::-1]}k"
"""Two sentinels without a common beginning or end; unknown to those who write messages. Only `SENTINEL` stays in use."""

ASK = b'{"role":"user","content":"."}'
"""What the user says in a small conversation."""


class BoundaryUnknownError(Exception):
    """The template hides the end of a reply: nothing is spliced behind such replies."""


class Boundary(msgspec.Struct, frozen=True):
    """What a template puts behind a reply.

    `mark` is the packed sentinel, `closing` what the model samples behind it, `turn_end` what the template adds then
    when nothing follows (empty where the next message's opener ends a turn). `in_calls` says where the sentinel stands.
    """

    mark: bytes
    closing: bytes
    turn_end: bytes
    in_calls: bool = False

    def cut(self, rendered: bytes) -> bytes:
        """Cut what stands behind the sentinel's reply out of a rendering.

        Raises:
            BoundaryUnknownError: the sentinel is not there, or not as it was when the boundary was learned.
        """
        return rendered[self._end(rendered) :]

    def before(self, rendered: bytes) -> bytes:
        """What stands up to the end of the sentinel's reply.

        Raises:
            BoundaryUnknownError: as for `cut`.
        """
        return rendered[: self._end(rendered)]

    def _end(self, rendered: bytes) -> int:
        key = self.mark + self.closing
        at = ids.find(rendered, key)
        if at < 0:
            raise BoundaryUnknownError("sentinel-lost")
        return at * ids.ID_BYTES + len(key)


def reworded(message: bytes) -> bytes:
    """Give a raw message another text, so that it can be seen where the template puts it."""
    return msgspec.json.encode({**msgspec.json.decode(message), "content": OTHER})


def stand_in(reply: Message, sentinel: str, *, in_text: bool = False) -> bytes:
    """Write an assistant message like `reply`, raw, with the sentinel where its words end."""
    calls: list[dict[str, Any]] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "{}"}} for call in reply.calls
    ]
    entry: dict[str, Any] = {"role": "assistant"}
    if calls and not in_text:
        entry["content"] = "." if reply.text else None
        calls[-1]["function"]["arguments"] = msgspec.json.encode({"s": sentinel}).decode()
    else:
        entry["content"] = sentinel
    if calls:
        entry["tool_calls"] = calls
    return msgspec.json.encode(entry)


async def learn(renderer: Renderer, model: str, args: RenderArgs, reply: Message, stop_ids: AbstractSet[int], *, in_text: bool) -> Boundary:
    """Learn what the template puts behind replies like `reply`.

    Raises:
        BoundaryUnknownError: the template does not show the sentinel, or no stop id ends the reply.
        RenderError: the template refuses the small conversation.
    """
    small = msgspec.structs.replace(args, tools=None)
    first, second = [
        await renderer.render(model, [ASK, stand_in(reply, s, in_text=in_text)], small, generation=False) for s in (SENTINEL, OTHER)
    ]
    if first == second:
        raise BoundaryUnknownError("reply-not-rendered")
    start, end = ids.common_head(first, second), ids.count(first) - ids.common_end(first, second)
    mark, behind = ids.tail(ids.head(first, end), start), ids.tail(first, end)
    stop = next((i for i, token in enumerate(ids.unpack(behind)) if token in stop_ids), None)
    in_calls = bool(reply.calls) and not in_text
    if stop is None:
        return Boundary(mark, behind, b"", in_calls)
    return Boundary(mark, ids.head(behind, stop), ids.tail(behind, stop), in_calls)


async def candidates(renderer: Renderer, model: str, args: RenderArgs) -> Sequence[int]:
    """List the ids with which a template may end a reply of text: those behind it, and the openers of what can follow.

    Raises:
        BoundaryUnknownError: the template does not show the sentinel.
        RenderError: the template refuses the small conversation.
    """
    said = Message("assistant", content=".")
    boundary = await learn(renderer, model, args, said, frozenset(), in_text=True)
    found = ids.unpack(boundary.closing)
    called = Message("assistant", calls=(_CALL,))
    for reply, following in ((said, ASK), (called, _RESULT)):
        try:
            shown = await renderer.render(model, [ASK, stand_in(reply, SENTINEL, in_text=True), following], args, generation=True)
            behind = Boundary(boundary.mark, b"", b"").cut(shown)
        except (RenderError, BoundaryUnknownError):
            continue  # a template without tools, say
        found += ids.unpack(ids.head(behind, 1))
    return list(dict.fromkeys(found))


_CALL = Call("call_0", "f", "{}")
_RESULT = b'{"role":"tool","tool_call_id":"call_0","content":"."}'
