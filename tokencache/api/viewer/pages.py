"""The viewer's own routes: the page and its parts, read once at the start.

They are open to everybody, and hold no data: what they show is fetched from the trainer's routes with the trainer's key.
"""

from importlib.resources import files
from pathlib import PurePath

from aiohttp import web
from aiohttp.typedefs import Handler

from tokencache.api.viewer.routes import browse_routes
from tokencache.engine.pool import Pool
from tokencache.proxy.ledger import Ledger

UI = "/tokencache/ui/"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def viewer_routes(app: web.Application, ledger: Ledger, engine: Pool, *, admin_key: str | None) -> None:
    """Add the viewer to an application: the page, and the routes of what it shows."""
    browse_routes(app, ledger, engine, admin_key=admin_key)
    app.router.add_get(UI.rstrip("/"), _to_page)
    for path in sorted(files(__package__).joinpath("static").iterdir(), key=lambda path: path.name):
        handler = _serve(path.read_bytes(), _KINDS[PurePath(path.name).suffix])
        app.router.add_get(UI + path.name, handler)
        if path.name == "index.html":
            app.router.add_get(UI, handler)


async def _to_page(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("ui/")  # relative: a proxy before this one may have a path of its own


def _serve(body: bytes, kind: str) -> Handler:
    async def serve(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    return serve
