"""Packs token ids and log probabilities as bytes, and compares and joins packed ids.

A prompt of 32,000 tokens as a list of Python ints takes a millisecond to build and half a megabyte of memory; as bytes it is one `memcpy`
(docs/performance.md). So ids have two forms, and become a list only where code reads single tokens:

- *packed*: 4 bytes per token, int32, little endian. This form is stored, compared, sliced and joined.
- *fragment*: the inside of a JSON array, `b"1,2,3"`, without brackets. This form is sent to an engine that has no shorter one. The fragment
  of a long history (`Fragment`) is kept in pieces, to which each turn adds. The hundreds of kilobytes before it are copied only when they
  are sent.

Log probabilities are packed as float32 where that loses nothing (vLLM's are float32 values), otherwise as float64. So exports contain
exactly the values that the engine reported.
"""

import struct
import sys
from array import array
from collections.abc import Collection, Iterable, Sequence
from operator import methodcaller
from typing import Self

import msgspec

ID_BYTES = 4
ABOVE_ALL_IDS = 2**31
"""No vocabulary has this id, because ids are stored as int32."""
_MAX_PIECES = 32
"""Maximum number of pieces; more are joined into one. Each turn adds one."""
_PART = 2**14
"""Ids that `Fragment.write_part` writes at once: 0.6 ms."""
_JSON_GROWTH = 2
"""Largest size of a fragment over that of the packed ids: an id of up to seven digits and a comma, for four bytes."""
_JSON = msgspec.json.Encoder()
_NATIVE = sys.byteorder == "little"


def pack(ids: Iterable[int]) -> bytes:
    """Pack token ids.

    Raises:
        OverflowError: an id does not fit in a signed 32-bit integer.
        TypeError: an element is not an integer.
    """
    if isinstance(ids, array) and ids.typecode == "i" and _NATIVE:
        return ids.tobytes()
    listed = ids if isinstance(ids, list) else list(ids)
    try:  # `array` would take twice as long
        return struct.pack(f"<{len(listed)}i", *listed)
    except struct.error as error:
        raise (OverflowError if all(isinstance(i, int) for i in listed) else TypeError)(str(error)) from None


def unpack(packed: bytes) -> list[int]:
    """Unpack token ids into a list of ints."""
    return (array("i", packed) if _NATIVE else as_array(packed)).tolist()


def as_array(packed: bytes) -> "array[int]":
    """Unpack token ids into an array, which takes a tenth of the time of a list; for code that reads few of them."""
    ids = array("i", packed)
    if not _NATIVE:
        ids.byteswap()
    return ids


def count(packed: bytes) -> int:
    """Count the tokens in packed ids."""
    return len(packed) // ID_BYTES


def head(packed: bytes, n: int) -> bytes:
    """Return the first `n` tokens of packed ids."""
    return packed[: n * ID_BYTES]


def tail(packed: bytes, n: int) -> bytes:
    """Return packed ids without the first `n` tokens."""
    return packed[n * ID_BYTES :]


def fragment(packed: bytes) -> bytes:
    """Return packed ids as a fragment: `b"1,2,3"`, or `b""` for no ids."""
    return _JSON.encode(unpack(packed))[1:-1]


class Fragment(msgspec.Struct, eq=False):
    """Ids as a JSON fragment in pieces; all but the first begin with a comma. The JSON is written when it is first read."""

    _pieces: tuple[bytes, ...] = ()
    _packed: tuple[bytes, ...] = ()  # the ids whose JSON is not written yet

    @classmethod
    def of(cls, packed: bytes) -> Self:
        """Return the fragment of packed ids."""
        return cls((), (packed,) if packed else ())

    def __bool__(self) -> bool:
        """Whether there are ids."""
        return bool(self._pieces or self._packed)

    def __bytes__(self) -> bytes:
        """Return the JSON as one piece."""
        return b"".join(self.pieces)

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """The JSON in pieces."""
        if self._packed:
            added = fragment(b"".join(self._packed))
            before = self._pieces if len(self._pieces) < _MAX_PIECES else (b"".join(self._pieces),)
            self._pieces, self._packed = (*before, b"," + added if before else added), ()
        return self._pieces

    def write_part(self) -> bool:
        """Write at most `_PART` ids of the JSON; false if all is written."""
        if not self._packed:
            return False
        first, *rest = self._packed
        self._packed = (head(first, _PART),)
        self._pieces, left = self.pieces, tail(first, _PART)
        self._packed = (left, *rest) if left else tuple(rest)
        return True

    @property
    def tokens(self) -> int:
        """The number of ids."""
        commas: int = sum(map(methodcaller("count", b","), self._pieces))
        return commas + bool(self._pieces) + sum(map(count, self._packed))

    @property
    def size(self) -> int:
        """The size in bytes, at most, whether or not the JSON is written."""
        return sum(map(len, self._pieces)) + _JSON_GROWTH * sum(map(len, self._packed))

    def extended(self, packed: bytes) -> "Fragment":
        """Return this fragment with more packed ids; this one does not change."""
        return Fragment(self._pieces, (*self._packed, packed) if packed else self._packed)


NO_IDS = Fragment()


def find(haystack: bytes, needle: bytes, start: int = 0) -> int:
    """Return the first position from `start` on, in tokens, of the packed ids `needle` in `haystack`; -1 if there is none."""
    sought = needle[:-2] if len(needle) > ID_BYTES else needle  # a search that ends with the high bytes, equal in most ids, is slow
    at = haystack.find(sought, start * ID_BYTES)
    while at != -1 and (at % ID_BYTES or not haystack.startswith(needle, at)):  # skip matches that are not aligned to tokens
        at = haystack.find(sought, at + 1)
    return at // ID_BYTES if at != -1 else -1


def find_last(haystack: bytes, needle: bytes, end: int | None = None) -> int:
    """Return the last position before the token `end`, in tokens, of the packed ids `needle` in `haystack`; -1 if there is none."""
    at = haystack.rfind(needle, 0, len(haystack) if end is None else end * ID_BYTES)
    while at != -1 and at % ID_BYTES:  # skip matches that are not aligned to tokens
        at = haystack.rfind(needle, 0, at + len(needle) - 1)
    return at // ID_BYTES if at != -1 else -1


def places_of(packed: bytes, tokens: Collection[int]) -> list[int]:
    """Return the positions in packed ids, in order, at which one of `tokens` is."""
    return [place for place, token in enumerate(unpack(packed)) if token in tokens]


def common_head(a: bytes, b: bytes) -> int:
    """Count the tokens that two packed sequences have in common at their beginning."""
    if a == b:
        return count(a)
    low, high, view = 0, min(len(a), len(b)) // ID_BYTES, memoryview(a)
    while low < high:  # bisection: each step is one memcmp of what is not known yet to be equal
        middle = (low + high + 1) // 2
        if b.startswith(view[low * ID_BYTES : middle * ID_BYTES], low * ID_BYTES):
            low = middle
        else:
            high = middle - 1
    return low


def common_end(a: bytes, b: bytes) -> int:
    """Count the tokens that two packed sequences have in common at their end."""
    low, high = 0, min(len(a), len(b)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle * ID_BYTES : len(a) - low * ID_BYTES] == b[len(b) - middle * ID_BYTES : len(b) - low * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Pack log probabilities without loss: as float32 if every value is a float32, otherwise as float64.

    The first byte is `f` or `d`. No values pack to no bytes.

    Raises:
        TypeError: an element is not a number.
    """
    if not values:
        return b""
    single = array("f", values)
    kind, packed = ("f", single) if single.tolist() == list(values) else ("d", array("d", values))
    if sys.byteorder == "big":
        packed.byteswap()
    return kind.encode() + packed.tobytes()


def unpack_logprobs(packed: bytes) -> list[float]:
    """Unpack log probabilities into a list of floats (natural logarithm)."""
    if not packed:
        return []
    values: array[float] = array(chr(packed[0]))
    values.frombytes(packed[1:])
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
