"""The application: routes, start and stop.

Three kinds of requests come in: the proxy's own (`/healthz`, `/readyz`, `/metrics`, `/tokencache/…`), model calls within
a session, and everything else, which is relayed byte for byte.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tokencache import metrics
from tokencache.config import Settings
from tokencache.dialects.growth import Bodies
from tokencache.engines.engine import Engine
from tokencache.engines.probe import Capability
from tokencache.engines.upstream import Upstream
from tokencache.errors import EngineError, HarnessError
from tokencache.proxy.caller import CHAT, Caller, tokenized
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.prefixes import Prefixes
from tokencache.proxy.relay import keep_headers, relay, request_headers
from tokencache.proxy.sessions import Origin, SessionFinder
from tokencache.render.local import LocalRenderer
from tokencache.store import open_store
from tokencache.store.contract import Incident, SessionSealedError, Store, StoreError
from tokencache.trainer.api import trainer_routes

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PROBE_EVERY = 2.0
_SAMPLING_ROUTES = ("/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")
"""Routes that sample tokens and that no dialect of ours records yet: within a session they leave a hole, and it is said."""


class Proxy:
    """The proxy's parts, wired together."""

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self.settings = settings
        self.store = store or open_store(settings.store, ttl_seconds=settings.store_ttl, timeout_seconds=settings.store_timeout)
        self.upstream = Upstream(settings.upstream, key=settings.upstream_key)
        local = LocalRenderer(settings.tokenizer) if settings.tokenizer is not None else None
        self.engine = Engine(self.upstream, local=local, on_probe=_note_level)
        self.ledger = Ledger(self.store, Prefixes(self.store, max_bytes=settings.prefix_memory), strict=settings.on_store_error == "fail")
        self.caller = Caller(self.engine, self.ledger, Bodies())
        self.sessions = SessionFinder(self.store, header=settings.session_header, registered_only=settings.registered_only)
        self._prober: asyncio.Task[None] | None = None

    def application(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(client_max_size=self.settings.max_body, middlewares=[_errors])
        app.on_response_prepare.append(keep_headers)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        trainer_routes(app, self.store, self.ledger, admin_key=self.settings.admin_key or None)
        app.router.add_route("*", "/{path:.*}", self._any)
        return app

    async def _running(self, _app: web.Application) -> AsyncIterator[None]:
        await self.store.open()
        await self.upstream.open()
        self._prober = asyncio.create_task(self._keep_probing())
        yield
        self._prober.cancel()
        await asyncio.gather(self._prober, return_exceptions=True)
        await self.ledger.close()
        await self.upstream.close()
        await self.store.close()

    async def _keep_probing(self) -> None:
        """Probe until something is found, and again when that is gone: who is not ready is sent no call to find it out by."""
        while True:
            if not self.engine.capabilities:
                try:
                    await self.engine.model()
                except EngineError as why:
                    log.warning("the engine is not there: %s", why)
            await asyncio.sleep(_PROBE_EVERY)

    async def _any(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs  # `GET http://host/path`
        origin = await self.sessions.find(path, request.headers)
        if origin.session is None:
            return await relay(request, self.upstream, origin.path)
        headers = self._headers(request, origin)
        route = origin.path.partition("?")[0]
        if request.method == "POST" and route == CHAT:
            return await self.caller.chat(request, origin.session, origin.path, headers)
        if request.method == "POST" and route == "/tokenize":
            found = await self.caller.tokens_of_next(request, origin.session)
            if found is not None:
                return web.Response(body=tokenized(*found), content_type="application/json")
            return await relay(request, self.upstream, origin.path, headers=headers, body=await request.read())
        if request.method == "POST" and route.startswith(_SAMPLING_ROUTES):
            incident = Incident("unrecorded-route", f"{route} is relayed, not recorded", hole=True, at=time.time())
            await self.ledger.note(origin.session, [incident])
        return await relay(request, self.upstream, origin.path, headers=headers)

    def _headers(self, request: web.Request, origin: Origin) -> CIMultiDict[str]:
        """The headers of a call within a session, as they go to the engine."""
        drop = {self.settings.session_header.lower(), "content-length", "accept-encoding"}
        if origin.own_key:
            drop |= {"authorization", "x-api-key", "x-goog-api-key"}
        headers = request_headers(request, drop=frozenset(drop))
        headers.setdefault("X-Session-ID", origin.session or "")  # engines and routers keep a session's cache warm by it
        return headers

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _request: web.Request) -> web.Response:
        found = [msgspec.to_builtins(capability) for capability in {c.model: c for c in self.engine.capabilities}.values()]
        store = "ok"
        try:
            await self.store.ping()
        except StoreError as why:
            store = str(why)
        ready = bool(found) and store == "ok"
        body = {"ready": ready, "engine": {"url": self.upstream.url, "error": self.engine.error, "models": found}, "store": store}
        return web.json_response(body, status=200 if ready else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _note_level(found: Capability) -> None:
    metrics.ENGINE_LEVEL.labels(found.model).set(found.level == "exact")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error in the shape that OpenAI's clients expect."""
    try:
        return await handler(request)
    except (HarnessError, EngineError, SessionSealedError, StoreError, web.HTTPRequestEntityTooLarge) as why:
        return _answer_to(why)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("%s %s: our own error", request.method, request.path)
        if request.writer.output_size:
            raise  # an answer is under way: aiohttp breaks the connection off
        return error_response(500, "tokencache failed; its log says why", "internal_error")


def _answer_to(why: Exception) -> web.Response:
    match why:
        case HarnessError():
            return error_response(why.status, str(why), why.kind, why.param)
        case EngineError():
            return error_response(why.status, str(why), "upstream_error")
        case SessionSealedError():
            return error_response(409, f"session {why} is sealed and takes no more calls", "session_sealed")
        case web.HTTPRequestEntityTooLarge():
            return error_response(413, f"the request body is too large: {why.text}", "invalid_request_error")
        case _:
            return error_response(503, f"the store failed: {why}", "store_error")


def error_response(status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    """Write an error in OpenAI's shape."""
    return web.json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status=status)
