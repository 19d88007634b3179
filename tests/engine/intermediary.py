"""A server between the proxy and an engine that changes or refuses requests."""

import contextlib
import json

import aiohttp
from aiohttp import web

from tests.engine.listening import listening


class Intermediary:
    """Passes requests on to `upstream`. `change(route, body)` returns the body to send, or a status (`int`) to refuse with."""

    def __init__(self, upstream, change=None):
        self.upstream = upstream
        self.change = change or (lambda _route, body: body)

    @contextlib.asynccontextmanager
    async def serve(self, port=0):
        """Serve on a free port, or on this one; yields the base URL. At the end requests in flight are broken off."""
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._pass)
        async with aiohttp.ClientSession() as self._http, listening(app, port) as url:
            yield url

    async def _pass(self, request):
        raw = await request.read()
        changed = self.change(request.path, json.loads(raw)) if raw else None
        if isinstance(changed, int):
            return web.json_response({"error": {"message": "no", "type": "X", "param": None, "code": changed}}, status=changed)
        kept = {name: request.headers[name] for name in ("X-Session-ID", "X-Request-Id") if name in request.headers}
        async with self._http.request(request.method, self.upstream + request.path, json=changed, headers=kept) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
