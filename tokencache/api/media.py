"""Handlers of the routes that read the images and other media of a session.

The bytes come from a harness, and so may their media type. A browser must not run them as a part of the proxy's site. So only the types of
`_SAFE`, which contain no scripts, are named in an answer, no browser guesses another one (`nosniff`), and a page that is opened directly is
offered as a file and runs nothing (`sandbox`).
"""

import re

from aiohttp import web

from tokencache.api.auth import AdminAuth
from tokencache.api.http import json_response, not_found
from tokencache.api.openapi import register
from tokencache.api.reader import SessionReader
from tokencache.core.media import file_name
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.proxy.ledger import Ledger
from tokencache.store.base import Store

_SAFE = frozenset({
    "image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp", "audio/wav", "audio/mpeg", "audio/ogg", "audio/flac", "video/mp4",
    "video/webm",
})  # fmt: skip
_UNKNOWN = "application/octet-stream"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def add_media_routes(app: web.Application, auth: AdminAuth, ledger: Ledger, weights: AnnouncedWeights) -> None:
    """Add the routes to an application."""
    api = _MediaApi(ledger.store, SessionReader(ledger, weights))
    register(app, auth, {"listMedia": api.list, "getMedium": api.medium})


class _MediaApi:
    def __init__(self, store: Store, reader: SessionReader) -> None:
        self._store = store
        self._reader = reader

    async def list(self, request: web.Request) -> web.StreamResponse:
        info = await self._reader.info(request)
        return json_response({"session": info.id, "media": await self._store.stored_media(info.id)})

    async def medium(self, request: web.Request) -> web.StreamResponse:
        info, sha256 = await self._reader.info(request), request.match_info["sha256"]
        found = await self._store.media(info.id, sha256) if _SHA256.fullmatch(sha256) else None
        if found is None:
            raise not_found(f"session {info.id!r} has no medium {sha256[:64]!r}, or its bytes were not kept (docs/images.md)")
        media_type, content = found
        disposition = f'attachment; filename="{file_name(sha256, media_type)}"'
        content_type = media_type if media_type in _SAFE else _UNKNOWN
        return web.Response(body=content, content_type=content_type, headers={**_HEADERS, "Content-Disposition": disposition})
