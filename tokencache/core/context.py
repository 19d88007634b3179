"""Contexts: the messages that a turn answered, as they were asked.

A turn's tokens say what the policy saw; its context says what that was meant to be: the harness's messages and tools, in the
form of chat completions whatever the dialect. Exporters, the viewer and the measure of drift read it; nothing on a call's
way does. Like tokens it is kept as a delta: the first `Turn.context_shared` messages are those of another turn's request,
and the tools and template arguments are that turn's, too (they stand in the chain by which the two were compared). So a
conversation's text is stored once; and the reply that comes back first in a continuation, which its turn has as `served`,
serves to deflate it: it costs some 30 bytes if nothing was changed.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from isal import isal_zlib

from tokencache.core.messages import Message
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


_SHAPE = (
    b'{"messages":[{"role":"assistant","content":"","tool_calls":[{"id":"call_","type":"function","function":'
    b'{"name":"","arguments":"{}"}}]},{"role":"tool","tool_call_id":"","content":"'
)
"""What nearly every context spells: part of the format, like `_words`."""
_LEVEL = isal_zlib.ISAL_BEST_COMPRESSION
"""ISA-L writes what any zlib reads: 140 kB of prose and code in 0.4 ms, where zlib's level 1 takes 1.3 ms and is not as small."""
_PLAIN, _ECHO = b"p", b"e"


def _words(echoed: Message | None) -> bytes:
    if echoed is None:
        return _SHAPE
    said = [echoed.content, echoed.reasoning, *(text for call in echoed.calls for text in (call.id, call.name, call.arguments))]
    return _SHAPE + b"".join(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass") for text in said if text)


def pack_context(context: Context, echoed: Message | None = None) -> bytes:
    """Pack a context for a store; `echoed` is the reply with which it begins, as the turn of `context_base` served it."""
    tools = [context.tools] if context.tools is not None else []
    plain = _ENCODER.encode(_Packed(context.messages, tools, context.members, context.kwargs))
    squeeze = isal_zlib.compressobj(_LEVEL, wbits=-15, zdict=_words(echoed))
    return (_ECHO if echoed is not None else _PLAIN) + squeeze.compress(plain) + squeeze.flush()


def unpack_context(packed: bytes, echoed: Message | None = None) -> Context:
    """Unpack a context; `echoed` is what it was packed with, if it was. `b""` is an empty one.

    Raises:
        ValueError: it is none.
    """
    if not packed:
        return Context()
    try:
        words = _words(echoed if packed[:1] == _ECHO else None)
        held = _DECODER.decode(zlib.decompressobj(wbits=-15, zdict=words).decompress(packed[1:]))
        return Context(held.messages, next(iter(held.tools), None), held.members, held.kwargs)
    except (zlib.error, msgspec.MsgspecError) as why:
        raise ValueError(f"unreadable context: {why}") from None


def whole_context(turn: str, turns: Mapping[str, Turn], packed: Mapping[str, bytes]) -> Context:
    """Put a turn's whole context together: all messages of its request.

    Raises:
        KeyError: a turn that it rests on is missing, or its context is.
        ValueError: the records are torn.
    """
    line = [turns[turn]]
    while line[-1].context_base is not None:
        line.append(turns[line[-1].context_base])
    whole: dict[str, Context] = {}
    for record in reversed(line):
        whole[record.id] = _upon(record, turns, packed, whole)
    return whole[turn]


def whole_contexts(turns: Sequence[Turn], packed: Mapping[str, bytes]) -> dict[str, Context]:
    """Put the contexts of all turns together, given in the order they were recorded; none for a turn that keeps none.

    Each is read once, however many rest on it.

    Raises:
        KeyError: a turn that one rests on is missing, or its context is.
        ValueError: the records are torn.
    """
    lookup = {turn.id: turn for turn in turns}
    whole: dict[str, Context] = {}
    for turn in turns:
        if packed.get(turn.id):
            whole[turn.id] = _upon(turn, lookup, packed, whole)
    return whole


def _upon(turn: Turn, turns: Mapping[str, Turn], packed: Mapping[str, bytes], whole: Mapping[str, Context]) -> Context:
    """A turn's own context upon that of its base, which is whole already."""
    if turn.context_base is None:
        base, own = Context(), unpack_context(packed[turn.id])
        whose = own
    else:
        base = whose = whole[turn.context_base]
        own = unpack_context(packed[turn.id], turns[turn.context_base].served)
    if turn.context_shared > len(base.messages):
        raise ValueError(f"turn {turn.id}: shares {turn.context_shared} of {len(base.messages)} messages")
    return Context([*base.messages[: turn.context_shared], *own.messages], whose.tools, whose.members, whose.kwargs)


def added_messages(context: Context, turn: Turn) -> Sequence[Raw]:
    """The messages of a whole context that the turn's request did not share with its base's."""
    return context.messages[turn.context_shared :]
