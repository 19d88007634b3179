"""Contexts: the messages that a turn answered, as they were asked.

A turn's tokens say what the policy saw; its context says what that was meant to be: the harness's messages and tools, in the
form of chat completions whatever the dialect. Exporters, the viewer and the measure of drift read it; nothing on a call's
way does. Like tokens it is kept as a delta: the first `Turn.context_shared` messages are those of another turn's request,
and the tools and template arguments are that turn's, too (they stand in the chain by which the two were compared). So a
conversation's text is stored once.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokencache.core.turn import Turn

Raw = msgspec.Raw


class Context(msgspec.Struct, frozen=True):
    """What a request adds to another's: raw JSON messages; and if it shares nothing, what else shaped its prompt.

    `tools` is the raw JSON list; `members` and `kwargs` are the arguments of its rendering (`RenderArgs`).
    """

    messages: list[Raw] = []
    tools: Raw | None = None
    members: dict[str, Raw] = {}
    kwargs: dict[str, Any] = {}


class _Packed(msgspec.Struct, omit_defaults=True):
    """A context as JSON: msgspec has no raw value that may be missing."""

    messages: list[Raw]
    tools: list[Raw] = []
    members: dict[str, Raw] = {}
    kwargs: dict[str, Any] = {}


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Packed)


def pack_context(context: Context) -> bytes:
    """Pack a context for a store: JSON, deflated at level 1 (some 10 µs and a third to a half of the size for each kilobyte)."""
    tools = [context.tools] if context.tools is not None else []
    return zlib.compress(_ENCODER.encode(_Packed(context.messages, tools, context.members, context.kwargs)), 1)


def unpack_context(packed: bytes) -> Context:
    """Unpack a context; `b""` is an empty one.

    Raises:
        ValueError: it is none.
    """
    if not packed:
        return Context()
    try:
        held = _DECODER.decode(zlib.decompress(packed))
        return Context(held.messages, next(iter(held.tools), None), held.members, held.kwargs)
    except (zlib.error, msgspec.MsgspecError) as why:
        raise ValueError(f"unreadable context: {why}") from None


def whole_context(turn: str, turns: Mapping[str, Turn], packed: Mapping[str, bytes]) -> Context:
    """Put a turn's whole context together: all messages of its request.

    Raises:
        KeyError: a turn that it rests on is missing, or its context is.
        ValueError: the records are torn.
    """
    line: list[tuple[Turn, Context]] = []
    at: str | None = turn
    while at is not None:
        line.append((turns[at], unpack_context(packed[at])))
        at = line[-1][0].context_base
    messages: list[Raw] = []
    for record, own in reversed(line):
        if record.context_shared > len(messages):
            raise ValueError(f"turn {record.id}: shares {record.context_shared} of {len(messages)} messages")
        messages = [*messages[: record.context_shared], *own.messages]
    first = line[-1][1]
    return Context(messages, first.tools, first.members, first.kwargs)


def added(context: Context, turn: Turn) -> Sequence[Raw]:
    """The messages of a whole context that the turn's request did not share with its base's."""
    return context.messages[turn.context_shared :]
