"""Encodes records (turns, incidents, …) and tokens as the bytes that stores keep.

The first byte of a record selects the encoding of the rest:

* `z`: MessagePack, deflated with the dictionary below. The dictionary is part of the format: a new one needs a new letter;
* `m`: MessagePack, if that is shorter;
* `j`: JSON, deflated, for values that MessagePack cannot represent (lone surrogates and integers of more than 64 bits; requests contain
  both).

Tokens are raw bytes after a header. From the header a script can find a turn's base, and a reader can check the lengths, without the turn's
record. An id takes three bytes (the lower ones), or four if one of the turn's does not fit. Three are marked in the header by a length with
which readers before that form refuse the tokens as cut off.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from isal import isal_zlib

from tokencache.core.ids import ID_BYTES
from tokencache.core.turn import Prefix, Tokens, Turn, rebuild_prefix
from tokencache.store.base import Entry

R = TypeVar("R")

HEADER = struct.Struct("<HIIII")
"""Length of the base's name, `shared`, prompt tokens, completion tokens, length of the delta (plus `_NARROW`). The base's name follows."""
_NARROW = 1 << 31
"""Added to the length if ids have only `_NARROW_BYTES`: those of all vocabularies today have less than 24 bits."""
_NARROW_BYTES = 3

_DICTIONARY = (
    b"\xa6engine\xa8engine-disagrees\xabno-logprobs\xa7aborted\xaeupstream-broke\xa5media\xa8resplice\xaecontext-edited\xa5plain"
    b"\xb2unrecognised-reply\xa6branch\xa4root\xa9messages\xa9responses\xa6gemini\xa6length\xaftool_choice\xa4auto\xabmin_p\xa4seed"
    b"\xb2max_completion_tokens\xb0presence_penalty\xb1frequency_penalty\xb2repetition_penalty\xa4stop\xa6origin\xa7anchors\xa5start\xa3end"
    b"\xa8forgiven\xa9args-json\xaacontent-shape\xabwhitespace\xb1reasoning-dropped\xa8tool-ids\xacinline-think\xa6reason"
    b'{"command": "", "file_path": "/", "path": "/", "content": "", "pattern": "", "old_string": "", "new_string": ""}'
    b"\xa2id\xb0\xa4call\xb0\xa5match\xa8continue\xa6parent\xb0\xa4base\xb0\xa6shared\xcd\xadprompt_tokens\xcd\xb1completion_tokens\xcc"
    b"\xabprefix_hash\xc4\x10\xafcompletion_hash\xc4\x10\xa6served\xa4role\xa9assistant\xa7content\xa9reasoning\xd9\xa5calls\x91\x83"
    b"\xa2id\xb4call_\xa4name\xa4bash\xa9arguments\xad<think>\n</think>\n\n\xadfinish_reason\xa4stop\xaatool_calls\xabstop_reason\xce"
    b"\xa7stopped\xc3\xa5model\xa7dialect\xa4chat\xa6stream\xc3\xa6choice\xa8messages\x02\xa5tools\x01\xa8sampling\x83"
    b"\xabtemperature\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa5top_p\xa5top_k\xaamax_tokens\xcd\xa5marks\xa7created\xcbA\xda\xa7seconds\xcb"
    b"\xa8versions\x91"
)


class Piece(NamedTuple):
    """The tokens of a turn, and what is needed to rebuild a prefix from them."""

    base: str | None
    shared: int
    prompt_tokens: int
    completion_tokens: int
    tokens: Tokens


def pack(record: msgspec.Struct) -> bytes:
    """Encode a record."""
    try:
        plain = msgspec.msgpack.encode(record)
    except (UnicodeEncodeError, OverflowError):
        return b"j" + _deflate(json.dumps(msgspec.to_builtins(record)).encode())
    short = _deflate(plain)
    return b"z" + short if len(short) < len(plain) else b"m" + plain


def unpack(packed: bytes, kind: type[R]) -> R:
    """Decode a record. Raises `ValueError` if `pack` did not write this."""
    try:
        if packed[:1] == b"j":
            return msgspec.convert(json.loads(_inflate(packed[1:])), kind)
        return msgspec.msgpack.decode(_inflate(packed[1:]) if packed[:1] == b"z" else packed[1:], type=kind)
    except (msgspec.MsgspecError, zlib.error) as why:
        raise ValueError(f"unreadable {kind.__name__.lower()}: {why}") from None


def pack_tokens(turn: Turn, tokens: Tokens) -> bytes:
    """Encode a turn's ids. Its log probabilities are stored separately, unchanged."""
    base, size, packed = text(turn.base or ""), len(tokens.delta), bytearray().join((tokens.delta, tokens.completion))
    highest = packed[_NARROW_BYTES::ID_BYTES]
    if highest == bytes(len(highest)):
        del packed[_NARROW_BYTES::ID_BYTES]
        size = size // ID_BYTES * _NARROW_BYTES + _NARROW
    header = HEADER.pack(len(base), turn.shared, turn.prompt_tokens, turn.completion_tokens, size)
    return b"".join((header, base, packed))


def unpack_tokens(packed: bytes, logprobs: bytes = b"") -> Piece:
    """Decode what `pack_tokens` encoded. Raises `ValueError` if the value is cut off."""
    if len(packed) < HEADER.size:
        raise ValueError("the header is incomplete")
    named, shared, prompt_tokens, completion_tokens, size = HEADER.unpack_from(packed)
    narrow, start, size = size >= _NARROW, HEADER.size + named, size % _NARROW
    if len(packed) < start + size:
        raise ValueError("ids are missing")
    base, stored = untext(packed[HEADER.size : start]) or None, packed[start:]
    if narrow:
        size, stored = size // _NARROW_BYTES * ID_BYTES, _widened(stored)
    return Piece(base, shared, prompt_tokens, completion_tokens, Tokens(stored[:size], stored[size:], logprobs))


def _widened(narrow: bytes) -> bytes:
    """Return the packed ids that were stored in `_NARROW_BYTES` bytes each."""
    packed = bytearray(len(narrow) // _NARROW_BYTES * ID_BYTES)
    for place in range(_NARROW_BYTES):
        packed[place::ID_BYTES] = narrow[place::_NARROW_BYTES]
    return bytes(packed)


def unpack_prefix(turn: str, line_of_bases: Iterable[bytes]) -> Prefix:
    """Rebuild a turn's prefix from what `pack_tokens` encoded: its own ids first, then those of all its bases.

    Raises:
        KeyError: there is no such turn.
    """
    line: dict[str, tuple[Turn, Tokens]] = {}
    at: str | None = turn
    for piece in map(unpack_tokens, line_of_bases):
        if at is not None:
            line[at] = (_lengths(at, piece), piece.tokens)
            at = piece.base
    return rebuild_prefix(line, turn)


def _lengths(turn: str, piece: Piece) -> Turn:
    """As much of a turn as `rebuild_prefix` needs."""
    return Turn(
        id=turn,
        call="",
        match="root",
        base=piece.base,
        shared=piece.shared,
        prompt_tokens=piece.prompt_tokens,
        completion_tokens=piece.completion_tokens,
    )


def pack_keys(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Encode lookup keys as two arguments, lengths and keys, because hundreds of arguments would cost more than the rest of the call."""
    return struct.pack(f"<{len(keys)}H", *map(len, keys)), b"".join(keys)


def text(name: str) -> bytes:
    """Encode a name, which may contain any characters."""
    return name.encode("utf-8", "surrogatepass")


def untext(name: bytes) -> str:
    """Decode a name that `text` encoded."""
    return name.decode("utf-8", "surrogatepass")


def _deflate(plain: bytes) -> bytes:
    # Any zlib can read the output of ISA-L. Compared with zlib's level 1, it takes half the time, and records are 6 % longer. Level 2 of
    # ISA-L saves no bytes of a record, and takes 58 µs for 2 kB instead of 33, because it uses more memory (AMD EPYC, cold caches).
    squeeze = isal_zlib.compressobj(1, wbits=-15, zdict=_DICTIONARY)
    return squeeze.compress(plain) + squeeze.flush()


def _inflate(packed: bytes) -> bytes:
    return zlib.decompressobj(wbits=-15, zdict=_DICTIONARY).decompress(packed)


def milliseconds_of(entries: Sequence[Entry]) -> int:
    """Return how long the call of these entries took; 0 if there are none. All entries of a call have the same time."""
    return round(1000 * entries[0].turn.seconds) if entries else 0
