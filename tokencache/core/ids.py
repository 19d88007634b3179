"""Token ids as bytes.

A prompt of 32,000 tokens as a list of Python ints costs a millisecond to build and half a megabyte to hold; as
bytes it is one `memcpy`. So ids travel through the project in two shapes, and are a list only where somebody must
look at single tokens:

- *packed*: 4 bytes per token, int32, little endian. This is what is stored, compared, sliced and joined.
- *fragment*: the inside of a JSON array, `b"1,2,3"`, without brackets. This is what is sent to an engine. That of a long
  history is held in *pieces*: put one behind the other they are the fragment, so all but the first begin with a comma. What a
  turn adds is a piece more, and the hundreds of kilobytes before it are copied nowhere but onto the wire.

Log probabilities are packed too: float32 where that loses nothing (vLLM's are float32 values), float64 otherwise, so
that what is exported is to the last bit what the engine reported.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

import msgspec

ID_BYTES = 4
Pieces = tuple[bytes, ...]
_MANY = 32
"""Pieces that are put together before there are more: each turn adds two."""
_JSON = msgspec.json.Encoder()


def pack(ids: Iterable[int]) -> bytes:
    """Pack token ids.

    Raises:
        OverflowError: an id does not fit in a signed 32-bit integer.
        TypeError: an element is no integer.
    """
    listed = ids if isinstance(ids, list) else list(ids)
    try:  # an array takes twice as long to fill
        return struct.pack(f"<{len(listed)}i", *listed)
    except struct.error as why:
        raise (OverflowError if all(isinstance(i, int) for i in listed) else TypeError)(str(why)) from None


def unpack(packed: bytes) -> list[int]:
    """Unpack token ids into a list of ints."""
    ids = array("i")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def count(packed: bytes) -> int:
    """Count the tokens in packed ids."""
    return len(packed) // ID_BYTES


def head(packed: bytes, n: int) -> bytes:
    """Cut packed ids after the first `n` tokens."""
    return packed[: n * ID_BYTES]


def tail(packed: bytes, n: int) -> bytes:
    """Drop the first `n` tokens of packed ids."""
    return packed[n * ID_BYTES :]


def fragment(packed: bytes) -> bytes:
    """Write packed ids as the inside of a JSON array: `b"1,2,3"`, or `b""` for no ids."""
    return _JSON.encode(unpack(packed))[1:-1]


def extended(pieces: Pieces, packed: bytes) -> Pieces:
    """Put packed ids behind a fragment in pieces; `()` is that of no ids."""
    if not packed:
        return pieces
    if not pieces:
        return (fragment(packed),)
    return (*(pieces if len(pieces) < _MANY else (b"".join(pieces),)), b"," + fragment(packed))


def find(haystack: bytes, needle: bytes) -> int:
    """Find the first place, in tokens, where the packed ids `needle` stand within `haystack`; -1 if nowhere."""
    at = haystack.find(needle)
    while at != -1 and at % ID_BYTES:  # a match across token borders is no match
        at = haystack.find(needle, at + 1)
    return at // ID_BYTES if at != -1 else -1


def find_last(haystack: bytes, needle: bytes) -> int:
    """Find the last place, in tokens, where the packed ids `needle` stand within `haystack`; -1 if nowhere."""
    at = haystack.rfind(needle)
    while at != -1 and at % ID_BYTES:
        at = haystack.rfind(needle, 0, at + len(needle) - 1)
    return at // ID_BYTES if at != -1 else -1


def common_head(a: bytes, b: bytes) -> int:
    """Count the tokens that two packed sequences share at their beginning."""
    if a == b:
        return count(a)
    low, high = 0, min(len(a), len(b)) // ID_BYTES
    while low < high:  # bisection: every probe is one memcmp
        middle = (low + high + 1) // 2
        if a[: middle * ID_BYTES] == b[: middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(a: bytes, b: bytes) -> int:
    """Count the tokens that two packed sequences share at their end."""
    low, high = 0, min(len(a), len(b)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle * ID_BYTES :] == b[len(b) - middle * ID_BYTES :]:
            low = middle
        else:
            high = middle - 1
    return low


def pack_logprobs(values: Sequence[float]) -> bytes:
    """Pack log probabilities without loss: float32 if every value is one, else float64.

    The first byte says which: `f` or `d`. No values pack to no bytes.

    Raises:
        TypeError: an element is no number.
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
