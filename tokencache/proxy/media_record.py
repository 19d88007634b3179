"""Stores the bytes of images and other media in requests, before the turn that refers to them is stored.

A session has each content once. What this process has stored is remembered, so that a call that repeats its images sends nothing to the
store. A content that is not stored marks the turns of the call (`media-not-kept`); their ids and digests are recorded all the same.
"""

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from tokencache.core.media import StoredMedium, media_content
from tokencache.dialects.chat.request import ChatCall
from tokencache.recent import Recent
from tokencache.store.base import SessionGoneError, Store

_REMEMBERED = 65_536
"""Number of contents of all sessions that are remembered."""


class MediaRecord:
    """Stores media, at most `limit` bytes in each session."""

    def __init__(self, store: Store, limit: int) -> None:
        self._store, self._limit = store, limit
        self._kept: Recent[tuple[str, str], bool] = Recent(_REMEMBERED)  # (epoch, digest) → whether it is stored

    async def keep(self, session: str, epoch: str, call: ChatCall) -> bool:
        """Store the media of a call that are not stored yet. Returns whether all of them are stored now.

        A medium that was sent as a URL has no bytes here, and does not count.

        Raises:
            StoreError: the store failed.
        """
        types = {part.sha256: part.media_type for part in call.media_parts() if part.sha256}
        kept = {sha256: self._kept.get((epoch, sha256)) for sha256 in types}  # others may be forgotten meanwhile
        unknown = {sha256 for sha256, known in kept.items() if known is None}
        if unknown:
            places = [index for index, parts in call.media.items() if any(part.sha256 in unknown for part in parts)]
            found = await asyncio.to_thread(_contents, [call.raw_messages[index] for index in places], unknown)
            try:
                for sha256, content in found.items():
                    medium = StoredMedium(sha256, types[sha256], len(content))
                    stored = await self._store.put_media(session, epoch, medium, content, limit=self._limit)
                    kept[sha256] = self._kept[epoch, sha256] = stored
            except SessionGoneError:  # the end of the call reports it
                return False
        return all(kept.values())


def _contents(messages: Sequence[bytes | msgspec.Raw], wanted: Collection[str]) -> Mapping[str, bytes]:
    """Decode the wanted media of raw messages, by digest."""
    found: dict[str, bytes] = {}
    for message in messages:
        parts: Any = msgspec.json.decode(message).get("content")
        for part in parts if isinstance(parts, list) else ():
            content = media_content(part) if isinstance(part, dict) else None
            if content is not None and (sha256 := hashlib.sha256(content).hexdigest()) in wanted:
                found[sha256] = content
    return found
