"""The messages that a turn answered, as they were in the request.

A turn's tokens are what the policy saw; its context is the request behind them: the harness's messages and tools, in the form of chat
completions. Exporters, the viewer and the drift measurement read it, the calls do not. Like tokens it is stored as a delta: the first
`Turn.context_shared` messages are those of another turn's request, whose tools and template arguments it shares, too (the chain by which
the two were compared covers them). So a conversation's text is stored once. A continuation begins with the reply that its parent has as
`served`: that is used as a dictionary for compression, so that an unchanged echo takes some 30 bytes.
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
    """What a request adds to another's.

    Attributes:
        messages: raw JSON messages.
        tools: the raw JSON list, if the request shares nothing.
        members, kwargs: the arguments of its rendering (`RenderArgs`), if the request shares nothing.
    """

    messages: list[Raw] = []
    tools: Raw | None = None
    members: dict[str, Raw] = {}
    kwargs: dict[str, Any] = {}


class _Packed(msgspec.Struct, omit_defaults=True):
    """A context as JSON; `tools` is a list because msgspec has no optional raw value."""

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
"""The beginning of the compression dictionary. It is a part of the stored format, like `_dictionary`."""
_LEVEL = isal_zlib.ISAL_BEST_COMPRESSION
"""ISA-L writes what any zlib reads: 140 kB of prose and code in 0.4 ms; zlib's level 1 takes 1.3 ms and compresses less."""
_PLAIN, _ECHO = b"p", b"e"


def _dictionary(echoed: Message | None) -> bytes:
    if echoed is None:
        return _SHAPE
    texts = [echoed.content, echoed.reasoning, *(text for call in echoed.calls for text in (call.id, call.name, call.arguments))]
    return _SHAPE + b"".join(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass") for text in texts if text)


def pack_context(context: Context, echoed: Message | None = None) -> bytes:
    """Pack a context for a store; `echoed` is the reply that the turn of `context_base` served, if it begins with that."""
    tools = [context.tools] if context.tools is not None else []
    plain = _ENCODER.encode(_Packed(context.messages, tools, context.members, context.kwargs))
    compressor = isal_zlib.compressobj(_LEVEL, wbits=-15, zdict=_dictionary(echoed))
    return (_ECHO if echoed is not None else _PLAIN) + compressor.compress(plain) + compressor.flush()


def unpack_context(packed: bytes, echoed: Message | None = None) -> Context:
    """Unpack a context; `echoed` is what it was packed with. `b""` is an empty context.

    Raises:
        ValueError: the bytes are not a packed context.
    """
    if not packed:
        return Context()
    try:
        dictionary = _dictionary(echoed if packed[:1] == _ECHO else None)
        stored = _DECODER.decode(zlib.decompressobj(wbits=-15, zdict=dictionary).decompress(packed[1:]))
        return Context(stored.messages, next(iter(stored.tools), None), stored.members, stored.kwargs)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"unreadable context: {error}") from None


def whole_context(turn: str, turns: Mapping[str, Turn], packed: Mapping[str, bytes]) -> Context:
    """Return a turn's whole context: all messages of its request.

    Raises:
        KeyError: a turn that it rests on is missing, or its context is.
        ValueError: the records are torn.
    """
    line = [turns[turn]]
    while line[-1].context_base is not None:
        line.append(turns[line[-1].context_base])
    whole: dict[str, Context] = {}
    for record in reversed(line):
        whole[record.id] = _combine(record, turns, packed, whole)
    return whole[turn]


def whole_contexts(turns: Sequence[Turn], packed: Mapping[str, bytes]) -> dict[str, Context]:
    """Return the whole contexts of turns, in the order in which they were recorded, except of turns that have none.

    Each is unpacked once, however many rest on it.

    Raises:
        KeyError: a turn that another rests on is missing, or its context is.
        ValueError: the records are torn.
    """
    lookup = {turn.id: turn for turn in turns}
    whole: dict[str, Context] = {}
    for turn in turns:
        if packed.get(turn.id):
            whole[turn.id] = _combine(turn, lookup, packed, whole)
    return whole


def _combine(turn: Turn, turns: Mapping[str, Turn], packed: Mapping[str, bytes], whole: Mapping[str, Context]) -> Context:
    """Combine a turn's own context with the whole one of its base."""
    if turn.context_base is None:
        base, own = Context(), unpack_context(packed[turn.id])
        arguments = own
    else:
        base = arguments = whole[turn.context_base]
        own = unpack_context(packed[turn.id], turns[turn.context_base].served)
    if turn.context_shared > len(base.messages):
        raise ValueError(f"turn {turn.id}: shares {turn.context_shared} of {len(base.messages)} messages")
    return Context([*base.messages[: turn.context_shared], *own.messages], arguments.tools, arguments.members, arguments.kwargs)


def added_messages(context: Context, turn: Turn) -> Sequence[Raw]:
    """Return the messages of a whole context that the turn's request does not share with its base's."""
    return context.messages[turn.context_shared :]
