"""Images for tests, and a way to store them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tokencache.core.media import StoredMedium
from tokencache.engine.images import png

if TYPE_CHECKING:
    from tokencache.store.base import Store

LIMIT = 2**20


RED, BLUE = png(2, 1, 255), png(2, 1, 0)


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
