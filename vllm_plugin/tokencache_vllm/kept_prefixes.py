"""Keeps the ids of recent conversations in the memory of vLLM's API server, bounded in bytes. Imports nothing of vLLM.

An entry is a prompt and the reply that was sampled for it, as packed ids: 4 bytes a token, int32, little endian. Its key is the SHA-256 of
these bytes. So the key proves the content, equal conversations share an entry, and any client that has the ids can compute the key.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable
from typing import Any

from cachetools import LRUCache

ID_BYTES = 4


def pack(ids: Iterable[int]) -> bytes:
    """Pack ids: 4 bytes a token, int32, little endian.

    Raises:
        OverflowError: an id does not fit.
    """
    return little_endian(array("i", ids))


def little_endian(values: "array[Any]") -> bytes:
    """Return the bytes of numbers in little endian order."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack(packed: bytes) -> list[int]:
    """Unpack ids.

    Raises:
        ValueError: the number of bytes is not a multiple of 4.
    """
    ids = array("i")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class KeptPrefixes:
    """Recent conversations by their hash; the one that was used least recently leaves first."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache for at most `max_bytes` bytes of packed ids."""
        self._entries: LRUCache[bytes, bytes] = LRUCache(max_bytes, getsizeof=len)

    def find(self, digest: bytes) -> bytes | None:
        """Return the packed ids with this SHA-256; `None` if they are not there."""
        return self._entries.get(digest)

    def keep(self, digest: bytes, packed: bytes) -> None:
        """Keep packed ids by their SHA-256. Ids that are larger than the whole cache are not kept."""
        if len(packed) <= self._entries.maxsize:
            self._entries[digest] = packed


class HashedPrompt:
    """A prompt, and what is sampled for it.

    Attributes:
        digest: the SHA-256 of the packed prompt, as hex digits.
    """

    def __init__(self, packed: bytes) -> None:
        """Hash a prompt's packed ids."""
        self._prompt = packed
        self._hash = hashlib.sha256(packed)
        self.digest = self._hash.hexdigest()

    def keep(self, reply: Iterable[int], cache: KeptPrefixes) -> None:
        """Keep the prompt and a reply as one entry; only the reply is hashed."""
        sampled = pack(reply)
        extended: Any = self._hash.copy()
        extended.update(sampled)
        cache.keep(extended.digest(), self._prompt + sampled)
