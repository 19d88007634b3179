"""Images for tests, and a way to store them."""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import TYPE_CHECKING

from tokencache.core.media import StoredMedium

if TYPE_CHECKING:
    from tokencache.store.base import Store

LIMIT = 2**20


def png(width: int = 2, height: int = 1, color: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    """A PNG of one color (PNG specification, 3rd edition)."""
    rows = (b"\0" + bytes(color) * width) * height
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


RED, BLUE = png(), png(color=(0, 0, 255))


def described(content: bytes, media_type: str = "image/png") -> StoredMedium:
    return StoredMedium(hashlib.sha256(content).hexdigest(), media_type, len(content))


async def put(store: Store, session: str, *contents: bytes, media_type: str = "image/png") -> list[str]:
    """Store media in a session that exists. Returns their digests."""
    info = await store.session(session)
    assert info is not None
    media = [described(content, media_type) for content in contents]
    for medium, content in zip(media, contents, strict=True):
        assert await store.put_media(session, info.epoch, medium, content, limit=LIMIT)
    return [medium.sha256 for medium in media]
