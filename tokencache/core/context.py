"""Packs and unpacks the request of a turn: its messages, tools and template arguments, in the form of chat completions.

A turn's tokens are what the policy saw; its *context* is the request from which they were made. Exporters, the viewer and the drift
measurement read contexts; model calls do not. A context is stored as a delta, like tokens: its first `Turn.context_shared` messages are
those of another turn's request. Both requests then have the same tools and template arguments, because the chain that was compared covers
them. So the text of a conversation is stored once. What a continuation adds begins with the echo of its parent's `served` message. That
message is the compression dictionary, so an unchanged echo takes about 30 bytes.
"""

import zlib
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

import msgspec
from isal import isal_zlib

from tokencache.core.messages import Message
from tokencache.core.turn import Turn

Raw = msgspec.Raw


class Context(msgspec.Struct, frozen=True):
    """The part of a request that is stored with its turn, or a whole request.

    Attributes:
        messages: raw JSON messages.
        tools: the raw JSON list; `None` if there are none, or if the request shares messages with another.
        members, kwargs: the arguments of its rendering (`RenderArgs`); empty if the request shares messages with another.
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


_DECODER = msgspec.json.Decoder(_Packed)


_SHAPE = (
    b'{"messages":[{"role":"assistant","content":"","tool_calls":[{"id":"call_","type":"function","function":'
    b'{"name":"","arguments":"{}"}}]},{"role":"tool","tool_call_id":"","content":"'
)
"""The beginning of the compression dictionary. It is a part of the stored format, like `_dictionary`."""
_BEST, _FAST = isal_zlib.ISAL_BEST_COMPRESSION, 1
"""Levels of ISA-L, whose output any zlib can read. The best one takes 0.4 ms for 140 kB of prose and code; zlib's level 1 takes 1.3 ms and
compresses less."""
_SHORT = 16 * 1024
"""Bytes of a context below which the fast level is used: for 2 kB, 33 µs instead of 57, and 2 % more bytes (AMD EPYC, cold caches)."""
_PLAIN, _ECHO = b"p", b"e"


def _dictionary(echoed: Message | None) -> bytes:
    if echoed is None:
        return _SHAPE
    texts = [echoed.content, echoed.reasoning]
    for call in echoed.calls:
        texts += call.id, call.name, call.arguments
    return _SHAPE + "".join(map(encode_basestring, filter(None, texts))).encode("utf-8", "surrogatepass")


def pack_context(context: Context, echoed: Message | None = None) -> bytes:
    """Pack a context for a store; `echoed` is the served reply of the turn `context_base`, if the context begins with its echo."""
    tools = [context.tools] if context.tools is not None else []
    plain = msgspec.json.encode(_Packed(context.messages, tools, context.members, context.kwargs))
    compressor = isal_zlib.compressobj(_FAST if len(plain) < _SHORT else _BEST, wbits=-15, zdict=_dictionary(echoed))
    return (_ECHO if echoed is not None else _PLAIN) + compressor.compress(plain) + compressor.flush()


def unpack_context(packed: bytes, echoed: Message | None = None) -> Context:
    """Unpack a context; `echoed` is the same as for packing. `b""` is an empty context.

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
        KeyError: the turn or one of its context bases is missing, or has no context.
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
    """Return the whole context of each turn that has one; `turns` are in the order in which they were recorded.

    Each context is unpacked once.

    Raises:
        KeyError: the context base of a turn is missing, or has no context.
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
    """Return the messages of a whole context that the turn's request does not share with its context base."""
    return context.messages[turn.context_shared :]
